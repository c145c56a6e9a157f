"""Tests of how an outer momentum, and a delay, narrow what an inner momentum bears."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa

INNER = 0.9
ROUNDS = 3000


def growth(curvature, period, momentum, nesterov, resets=False, rate=1.0, late=0):
    """The factor by which a round multiplies the center of a quadratic in the end.

    A heavy ball takes `period` steps m <- 0.9 m + h x, x <- x - m from the center; the
    block momentum is v <- mu v + g, where g is rate (x - center), or a share `late` of
    it that of the round before. The round is linear in center, m, v and what was sent:
    the factor is the largest eigenvalue of its matrix.
    """
    center, m, v, sent = np.eye(4)
    x = center
    m = m * (not resets)
    for _ in range(period):
        m = INNER * m + curvature * x
        x = x - m
    step = rate * (x - center)
    arrived = late * sent + (1 - late) * step
    v = momentum * v + arrived
    center = center + (arrived + momentum * v if nesterov else v)
    return np.abs(np.linalg.eigvals(np.stack([center, m, v, step]))).max()


def limit(*args, **kwargs):
    """The largest lr times curvature up to which nothing grows."""
    grid = np.geomspace(1e-4, 10, 1001)
    return next(h for h in grid if growth(h, *args, **kwargs) > 1 + 1e-9)


def holds(rate, momentum, nesterov, late):
    """Whether no curvature up to 1 grows, at an outer rate."""
    grid = np.geomspace(1e-4, 1, 120)
    told = momentum, nesterov, False, rate, late
    return max(growth(h, 16, *told) for h in grid) < 1 + 1e-9


def sizes_after(strategy, curvatures, period):
    """The sizes of one worker's params after ROUNDS syncs, from 1, with a rate of 1."""
    inner = optax.sgd(1.0, momentum=INNER)
    optimizer = sa.as_optimizer(strategy(inner), inner)

    def train(curvature):
        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(curvature * x, state, x)
            return (optax.apply_updates(x, updates), state), None

        start = jnp.float64(1), optimizer.init(jnp.float64(1))
        return jnp.abs(jax.lax.scan(step, start, length=ROUNDS * period)[0][0])

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(train))(curvatures))


def bmuf(momentum, nesterov=False):
    return sa.bmuf(12, block_momentum=momentum, nesterov=nesterov)


def late(rate, momentum):
    return sa.diloco_x(10, outer_lr=rate, outer_momentum=momentum)


# Strategies, made for an inner optimizer, and the arguments of their linear round.
ROUNDS_OF = {
    "0.9 kept": (lambda _: bmuf(0.9), (12, 0.9, False)),
    "0.9 reset": (
        lambda inner: sa.at_syncs(bmuf(0.9), sa.reset(inner)),
        (12, 0.9, False, True),
    ),
    "nesterov": (lambda _: bmuf(0.9, True), (12, 0.9, True)),
    "each step": (lambda _: sa.diloco(1, outer_lr=0.1), (1, 0.9, True, False, 0.1)),
    "late": (lambda _: late(0.4, 0.9), (10, 0.9, True, False, 0.4, 1)),
    "late heavy ball": (
        lambda _: sa.co2(12, outer_momentum=0.5, penalty=False),
        (12, 0.5, False, False, 1.0, 1),
    ),
}


@pytest.mark.parametrize(("strategy", "terms"), ROUNDS_OF.values(), ids=ROUNDS_OF)
def test_a_worker_grows_where_the_linear_round_does(strategy, terms):
    curvatures = np.geomspace(5e-4, 10, 12)
    factors = np.array([growth(curvature, *terms) for curvature in curvatures])
    grows = ~(sizes_after(strategy, curvatures, terms[0]) < 1)  # NaN has grown
    told = np.abs(factors - 1) > 0.005  # of the others 3,000 rounds do not tell
    np.testing.assert_array_equal(grows[told], factors[told] > 1)
    assert {*grows[told]} == {True, False}


def test_what_the_studies_say_of_the_limit():
    """The figures of docs/studies/inner-momentum.md."""
    kept = [limit(12, momentum, False) for momentum in (0.4, 0.6, 0.8, 0.9)]
    np.testing.assert_allclose(kept, [3.02, 2.06, 0.0040, 0.0014], rtol=0.03)
    assert limit(12, 0.9, False, resets=True) > 3.3
    assert limit(12, 0.9, True) == pytest.approx(0.051, rel=0.02)
    # The mean of gradients that Adam keeps is a heavy ball with a tenth of the rate.
    each = limit(1, 0.9, True, rate=0.1)
    tenth = limit(10, 0.9, True, rate=0.7)
    assert [10 * limit(1, 0, True), 10 * each] == pytest.approx([38, 0.298], rel=0.02)
    assert 10 * tenth == pytest.approx(32.4, rel=0.02)


def test_what_the_atlas_says_of_the_largest_outer_rate():
    """The table of docs/studies/atlas.md: what a share of a step bears to be late."""
    momenta = 0, 0.4, 0.9
    table = {
        (True, 0): (1.39, 1.08, 0.94),
        (True, 7 / 8): (0.73, 0.46, 0.16),
        (True, 1): (0.64, 0.40, 0.13),
        (False, 0): (1.39, 1.95, 0.32),
        (False, 1): (0.64, 0.37, 0.05),
    }
    for kind, rates in table.items():
        for momentum, rate in zip(momenta, rates, strict=True):
            assert holds(rate, momentum, *kind)
            assert not holds(rate + 0.01, momentum, *kind)
    assert holds(0.35, 0.5, True, 1) and not holds(0.36, 0.5, True, 1)  # diloco_x
