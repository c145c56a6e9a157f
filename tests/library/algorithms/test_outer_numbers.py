"""Rounds of a toy worked out apart: four workers, a number each, H = 2 local steps.

Worker i's loss is aᵢ (x - bᵢ)² / 2, all start from 1, with plain SGD at 0.1. The
numbers are those of NumPy scripts that know the papers' formulas and not this library.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos

PERIOD, LR = 2, 0.1
A, B = np.array([1.0, 2, 1, 2]), np.array([0.0, 1, 2, 3])


def loss(params, batch):
    a, b = batch
    return jnp.mean(a * (params["x"] - b) ** 2) / 2


def after_rounds(strategy, rounds):
    """Returns the centers (rounds,) and the replicas (rounds, workers)."""
    batches = tuple(np.tile(x, (PERIOD, 1)) for x in (A, B))
    centers, replicas = [], []
    with jax.enable_x64(True):
        trainer = syncalgos.DataParallel(
            syncalgos.stateless(loss), optax.sgd(LR), strategy, len(A), "vmap"
        )
        state = trainer.init({"x": np.ones(())})
        for _ in range(rounds):
            state, _ = trainer.run(state, batches)
            centers.append(float(trainer.center(state).params["x"]))
            replicas.append(np.ravel(state.replica.params["x"]))
    return np.array(centers), np.array(replicas)


CENTERS = {
    "fedadam": (
        syncalgos.fedopt(PERIOD),
        [1.0946000254, 1.222840217, 1.3702397349],
    ),
    "fedyogi": (
        syncalgos.fedopt(PERIOD, "yogi"),
        [1.0945986465, 1.2224815392, 1.3689967061],
    ),
    "fedadagrad": (
        syncalgos.fedopt(PERIOD, "adagrad", beta1=0),
        [1.0994459876, 1.1638518066, 1.2133043857],
    ),
    "lookahead": (syncalgos.lookahead(PERIOD), [1.09, 1.167625, 1.2345765625]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "expected"), CENTERS.values(), ids=CENTERS)
def test_centers_are_those_worked_out_apart(strategy, expected):
    centers, replicas = after_rounds(strategy, len(expected))
    np.testing.assert_allclose(centers, expected, atol=1e-10, rtol=0)
    np.testing.assert_allclose(replicas, np.tile(centers, (4, 1)).T, rtol=1e-15)


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
def test_overlapped_replicas_are_those_worked_out_apart(momentum, expected):
    strategy = syncalgos.overlap_local_sgd(PERIOD, anchor_momentum=momentum)
    centers, replicas = after_rounds(strategy, len(expected))
    np.testing.assert_allclose(replicas, expected, atol=1e-10, rtol=0)
    np.testing.assert_allclose(centers, np.mean(expected, axis=1), atol=1e-10, rtol=0)


def test_muloco_of_a_constant_gradient_is_worked_out_apart():
    strategy = syncalgos.muloco(PERIOD, outer_lr=0.7, outer_momentum=0.6)
    with jax.enable_x64(True):
        trainer = syncalgos.DataParallel(
            syncalgos.stateless(lambda params, g: jnp.mean(g @ params["x"])),
            optax.sgd(LR),
            strategy,
            1,
            "vmap",
        )
        state = trainer.init({"x": np.array([1.0, -2.0])})
        gradients = np.tile([1.0, 3.0], (8, 1, 1))
        state, _ = trainer.run(state, gradients)
        [[end]] = np.asarray(state.replica.params["x"])
    np.testing.assert_allclose(end, [-0.125824, -5.377472], atol=1e-9, rtol=0)
