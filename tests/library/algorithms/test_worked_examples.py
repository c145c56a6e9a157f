"""Numbers worked out apart from the library, for four workers of one parameter each.

Worker i's loss is aᵢ (x - bᵢ)² / 2; all start at 1, with plain SGD at 0.1 inside. The
minimum of the mean loss is at 5/3. The numbers are those of NumPy scripts that know the
papers' formulas and not this library.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from own_loop import local_steps
from reducing import follow

import syncalgos
from syncalgos import Replica
from syncalgos.keys import own_key

pytestmark = pytest.mark.usefixtures("float64")

A, B, LR = np.array([1.0, 2.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0, 3.0]), 0.1
BEST = 5 / 3


def replicas(strategy, steps, a=A, b=B, start=1.0, state=None):
    """All workers' params after each step, (steps, workers, …), and the centers."""
    optimizer = optax.sgd(LR)

    def worker(a, b):
        x = jnp.full(a.shape, start)
        replica = Replica(x, optimizer.init(x))
        sync = strategy.init(x) if state is None else state(x)

        def gradient(params, _):
            return a * (params - b)

        nothing = jnp.zeros(steps)
        found = local_steps(strategy, optimizer, gradient, (replica, sync), nothing)
        replica, centers = found
        return replica.params, centers

    mapped = jax.vmap(worker, axis_name="ring", out_axes=1)
    params, centers = jax.jit(mapped)(jnp.asarray(a), jnp.asarray(b))
    return np.asarray(params), np.asarray(centers)


D2_HALF = [
    [1.0, 1.0, 1.1333333333, 1.2666666667],
    [1.08, 1.0422222222, 1.2488888889, 1.3622222222],
    [1.1871111111, 1.1348148148, 1.321037037, 1.3765925926],
    [1.2885037037, 1.2508395062, 1.3568098765, 1.3703061728],
]
D2_WHOLE = [
    [1.1, 1.0, 1.1666666667, 1.1333333333],
    [1.1433333333, 1.1688888889, 1.1855555556, 1.2488888889],
    [1.2758888889, 1.2296296296, 1.2826296296, 1.2420740741],
    [1.3033444444, 1.3478024691, 1.2949469136, 1.3339358025],
]
TRACKING = [
    [0.9, 1.0, 1.1, 1.4],
    [1.21, 1.0, 1.3233333333, 1.1866666667],
    [1.1556666667, 1.2666666667, 1.2176666667, 1.3893333333],
]
PGA = [
    [1.1, 1.0, 1.1666666667, 1.1333333333],
    [1.1655555556, 1.08, 1.2522222222, 1.2488888889],
    [1.2373703704, 1.1466666667, 1.330037037, 1.325037037],
    [1.3220074074] * 4,
]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (syncalgos.d2(axis="ring"), D2_HALF),
        (syncalgos.d2(mixing=1, axis="ring"), D2_WHOLE),
        (syncalgos.gradient_tracking(axis="ring"), TRACKING),
        (syncalgos.gossip_pga(4, topology="ring", axis="ring"), PGA),
    ],
    ids=["d2", "d2 of W itself", "gradient_tracking", "gossip_pga"],
)
def test_peers_move_as_worked_out(strategy, expected):
    params, _ = replicas(strategy, len(expected))
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-10)


def test_choco_sgd_moves_as_worked_out_from_nothing_known():
    """In the paper neighbours know nothing at first."""
    a, b = np.stack([A, A[::-1]], 1), np.stack([B, B[::-1] / 2], 1)
    strategy = syncalgos.choco_sgd(density=0.5, consensus=0.5, axis="ring")

    def nothing_known(x):
        return jax.tree.map(jnp.zeros_like, strategy.init(x))

    params, _ = replicas(strategy, 3, a, b, state=nothing_known)
    expected = [
        [[1.3, 0.7333333333], [0.85, 1.1833333333]],
        [[1.18, 0.8766666667], [0.925, 1.0966666667]],
        [[1.162, 0.9783333333], [1.005, 1.0446666667]],
    ]
    np.testing.assert_allclose(params[:, :2], expected, rtol=0, atol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5])
def test_choco_sgd_stays_together_at_its_default_step(density):
    """Gradients are noise: mixing alone holds the workers together."""

    def noise(grads, replica, state, step):
        key = own_key(0, step, "ring")
        return jax.random.normal(key, grads.shape, grads.dtype), state

    strategy = syncalgos.choco_sgd(density=density, axis="ring")
    drifting = syncalgos.chain(syncalgos.Strategy(reduce=noise), strategy)
    anywhere = np.zeros((8, 100))
    params, _ = replicas(drifting, 1500, anywhere, anywhere)
    apart = np.sqrt(np.mean((params - params.mean(1, keepdims=True)) ** 2, (1, 2)))
    assert apart[-500:].max() < 1.2 * apart[500:-500].max()


# After rounds of two local steps.
CENTERS = {
    "fedadam": (
        syncalgos.fedopt(2, outer_lr=0.1, axis="ring"),
        [1.0946000254, 1.222840217, 1.3702397349],
    ),
    "fedyogi": (
        syncalgos.fedopt(2, method="yogi", outer_lr=0.1, axis="ring"),
        [1.0945986465, 1.2224815392, 1.3689967061],
    ),
    "fedadagrad": (
        syncalgos.fedopt(2, method="adagrad", outer_lr=0.1, b1=0, axis="ring"),
        [1.0994459876, 1.1638518066, 1.2133043857],
    ),
    "lookahead": (syncalgos.lookahead(2, axis="ring"), [1.09, 1.167625, 1.2345765625]),
    "fedprox": (
        syncalgos.fedprox(2, proximal=0.5, axis="ring"),
        [1.175, 1.3031875, 1.3970848438],
    ),
    "feddyn": (
        syncalgos.feddyn(2, proximal=0.5, axis="ring"),
        [1.35, 1.657125, 1.8547634375, 1.9293307789],
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("strategy", "expected"), CENTERS.values(), ids=CENTERS)
def test_centers_move_as_worked_out(strategy, expected):
    _, centers = replicas(strategy, 2 * len(expected))
    expected = np.tile(expected, (4, 1)).T
    np.testing.assert_allclose(centers[1::2], expected, rtol=0, atol=1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad", "lookahead"])
def test_workers_start_a_round_from_the_center(name):
    params, centers = replicas(CENTERS[name][0], 4)
    np.testing.assert_allclose(params[1::2], centers[1::2], rtol=1e-15)


PULLED = {
    0.0: [
        [0.924, 1.0, 1.076, 1.288],
        [0.942576, 1.0432, 1.143824, 1.404928],
        [0.985573824, 1.0912384, 1.202778176, 1.471840768],
        [1.0320405942, 1.1360717056, 1.2544148042, 1.5215059118],
    ],
    0.7: [
        [0.924, 1.0, 1.076, 1.288],
        [0.942576, 1.0432, 1.143824, 1.404928],
        [1.015813824, 1.1214784, 1.233018176, 1.502080768],
        [1.1070357942, 1.2090105856, 1.3294100042, 1.5944447918],
    ],
}


@pytest.mark.parametrize(("momentum", "expected"), PULLED.items())
def test_overlapped_replicas_move_as_worked_out(momentum, expected):
    strategy = syncalgos.overlap_local_sgd(2, anchor_momentum=momentum, axis="ring")
    params, centers = replicas(strategy, 2 * len(expected))
    np.testing.assert_allclose(params[1::2], expected, atol=1e-10, rtol=0)
    means = np.tile(np.mean(expected, axis=1), (4, 1)).T
    np.testing.assert_allclose(centers[1::2], means, atol=1e-10, rtol=0)


def test_muloco_of_a_constant_gradient_moves_as_worked_out():
    strategy = syncalgos.muloco(2, outer_lr=0.7, outer_momentum=0.6)
    gradients = np.tile([1.0, 3.0], (8, 1, 1))
    params = follow(strategy, optax.sgd(LR), np.array([[1.0, -2.0]]), gradients)
    np.testing.assert_allclose(params[-1, 0], [-0.125824, -5.377472], atol=1e-9, rtol=0)


EXACT = {
    "sync_sgd": syncalgos.sync_sgd(axis="ring"),
    # Its controls take the workers' differences out of the local steps.
    "scaffold": syncalgos.scaffold(2, learning_rate=LR, axis="ring"),
    "d2": syncalgos.d2(axis="ring"),
    "gradient_tracking": syncalgos.gradient_tracking(axis="ring"),
    "scaffnew": syncalgos.scaffnew(2, learning_rate=LR, axis="ring"),
    "feddyn": syncalgos.feddyn(2, proximal=0.5, axis="ring"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_rest_at_the_minimum_of_the_mean_loss(name):
    params, centers = replicas(EXACT[name], 3000)
    np.testing.assert_allclose(centers[-1], BEST, rtol=0, atol=1e-9)
    np.testing.assert_allclose(params[-1], BEST, rtol=0, atol=1e-9)


BIASED = {
    "gossip": syncalgos.gossip(topology="ring", axis="ring"),
    "gossip_pga": syncalgos.gossip_pga(4, topology="ring", axis="ring"),
    "choco_sgd": syncalgos.choco_sgd(density=1, consensus=1, axis="ring"),
    "fedprox": syncalgos.fedprox(2, proximal=0.5, axis="ring"),
}


@pytest.mark.parametrize("name", BIASED)
def test_other_methods_rest_beside_it(name):
    _, centers = replicas(BIASED[name], 3000)
    assert np.abs(centers[-1] - BEST).max() > 1e-3
