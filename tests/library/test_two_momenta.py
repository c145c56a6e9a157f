"""Tests of how an outer momentum, and a delay, narrow what an inner momentum bears."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa

INNER_MOMENTUM = 0.9
ROUNDS = 3000


class RoundTerms(NamedTuple):
    """The terms of a linear round.

    Attributes:
        period: local steps.
        momentum: of the blocks.
        nesterov: whether the step looks ahead along it.
        resets: whether the inner momentum begins anew.
        rate: the outer one.
        late_share: the share of a step that arrives a round later.
    """

    period: int
    momentum: float
    nesterov: bool = False
    resets: bool = False
    rate: float = 1.0
    late_share: float = 0.0


def compute_growth(curvature: float, terms: RoundTerms) -> float:
    """The factor by which a round multiplies the center of a quadratic in the end.

    A heavy ball takes `period` steps m <- 0.9 m + h x, x <- x - m from the center; the
    block momentum is v <- mu v + g, where g is rate (x - center), or a share of it that
    of the round before. The round is linear in center, m, v and what was sent: the
    factor is the largest eigenvalue of its matrix.
    """
    center, m, v, sent_step = np.eye(4)
    x = center
    m = m * (not terms.resets)
    for _ in range(terms.period):
        m = INNER_MOMENTUM * m + curvature * x
        x = x - m
    step = terms.rate * (x - center)
    arrived = terms.late_share * sent_step + (1 - terms.late_share) * step
    v = terms.momentum * v + arrived
    center = center + (arrived + terms.momentum * v if terms.nesterov else v)
    return np.abs(np.linalg.eigvals(np.stack([center, m, v, step]))).max()


def find_limit(terms: RoundTerms) -> float:
    """The largest lr times curvature up to which nothing grows."""
    grid = np.geomspace(1e-4, 10, 1001)
    return next(h for h in grid if compute_growth(h, terms) > 1 + 1e-9)


def is_stable(terms: RoundTerms) -> bool:
    """Whether no curvature up to 1 grows."""
    grid = np.geomspace(1e-4, 1, 120)
    return max(compute_growth(h, terms) for h in grid) < 1 + 1e-9


def train_sizes(
    make: Callable[[optax.GradientTransformation], sa.Strategy],
    curvatures: np.ndarray,
    period: int,
) -> np.ndarray:
    """The sizes of one worker's params after ROUNDS syncs, from 1, with a rate of 1."""
    inner_optimizer = optax.sgd(1.0, momentum=INNER_MOMENTUM)
    optimizer = sa.as_optimizer(make(inner_optimizer), inner_optimizer)

    def train(curvature: jax.Array) -> jax.Array:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            x, state = carry
            updates, state = optimizer.update(curvature * x, state, x)
            return (optax.apply_updates(x, updates), state), None

        start = jnp.float64(1), optimizer.init(jnp.float64(1))
        return jnp.abs(jax.lax.scan(step, start, length=ROUNDS * period)[0][0])

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(train))(curvatures))


def make_bmuf(momentum: float, nesterov: bool = False) -> sa.Strategy:
    return sa.bmuf(12, block_momentum=momentum, nesterov=nesterov)


class LinearRound(NamedTuple):
    """A strategy, made for an inner optimizer, and its linear round."""

    make: Callable[[optax.GradientTransformation], sa.Strategy]
    terms: RoundTerms


LINEAR_ROUNDS = {
    "0.9 kept": LinearRound(lambda _: make_bmuf(0.9), RoundTerms(12, 0.9)),
    "0.9 reset": LinearRound(
        lambda optimizer: sa.at_syncs(make_bmuf(0.9), sa.reset(optimizer)),
        RoundTerms(12, 0.9, resets=True),
    ),
    "nesterov": LinearRound(
        lambda _: make_bmuf(0.9, nesterov=True), RoundTerms(12, 0.9, nesterov=True)
    ),
    "each step": LinearRound(
        lambda _: sa.diloco(1, outer_lr=0.1),
        RoundTerms(1, 0.9, nesterov=True, rate=0.1),
    ),
    "late": LinearRound(
        lambda _: sa.diloco_x(10, outer_lr=0.4, outer_momentum=0.9),
        RoundTerms(10, 0.9, nesterov=True, rate=0.4, late_share=1),
    ),
    "late heavy ball": LinearRound(
        lambda _: sa.co2(12, outer_momentum=0.5, penalty=False),
        RoundTerms(12, 0.5, late_share=1),
    ),
}


@pytest.mark.parametrize("name", LINEAR_ROUNDS)
def test_a_worker_grows_where_the_linear_round_does(name):
    make, terms = LINEAR_ROUNDS[name]
    curvatures = np.geomspace(5e-4, 10, 12)
    factors = np.array([compute_growth(curvature, terms) for curvature in curvatures])
    grows = ~(train_sizes(make, curvatures, terms.period) < 1)  # NaN has grown
    is_clear = np.abs(factors - 1) > 0.005  # of the others 3,000 rounds do not tell
    np.testing.assert_array_equal(grows[is_clear], factors[is_clear] > 1)
    assert {*grows[is_clear]} == {True, False}


def test_limits_of_the_rate_are_those_of_the_studies():
    """The figures of docs/studies/inner-momentum.md."""
    momenta = 0.4, 0.6, 0.8, 0.9
    limits = [find_limit(RoundTerms(12, momentum)) for momentum in momenta]
    np.testing.assert_allclose(limits, [3.02, 2.06, 0.0040, 0.0014], rtol=0.03)
    assert find_limit(RoundTerms(12, 0.9, resets=True)) > 3.3
    nesterov_limit = find_limit(RoundTerms(12, 0.9, nesterov=True))
    assert nesterov_limit == pytest.approx(0.051, rel=0.02)
    # The mean of gradients that Adam keeps is a heavy ball with a tenth of the rate.
    local_limit = find_limit(RoundTerms(1, 0, nesterov=True))
    every_step_limit = find_limit(RoundTerms(1, 0.9, nesterov=True, rate=0.1))
    tenth_step_limit = find_limit(RoundTerms(10, 0.9, nesterov=True, rate=0.7))
    assert 10 * local_limit == pytest.approx(38, rel=0.02)
    assert 10 * every_step_limit == pytest.approx(0.298, rel=0.02)
    assert 10 * tenth_step_limit == pytest.approx(32.4, rel=0.02)


# The table of docs/studies/atlas.md: by nesterov and the share of a step that is late,
# the largest outer rates with a momentum of 0, 0.4 and 0.9.
LARGEST_RATES = {
    (True, 0): (1.39, 1.08, 0.94),
    (True, 7 / 8): (0.73, 0.46, 0.16),
    (True, 1): (0.64, 0.40, 0.13),
    (False, 0): (1.39, 1.95, 0.32),
    (False, 1): (0.64, 0.37, 0.05),
}


def test_largest_outer_rates_are_those_of_the_atlas():
    for (nesterov, late_share), rates in LARGEST_RATES.items():
        for momentum, rate in zip((0, 0.4, 0.9), rates, strict=True):
            terms = RoundTerms(
                period=16,
                momentum=momentum,
                nesterov=nesterov,
                rate=rate,
                late_share=late_share,
            )
            assert is_stable(terms)
            assert not is_stable(terms._replace(rate=rate + 0.01))
    diloco_x = RoundTerms(16, 0.5, nesterov=True, rate=0.35, late_share=1)
    assert is_stable(diloco_x)
    assert not is_stable(diloco_x._replace(rate=0.36))
