"""What theory says of algorithms on a quadratic, where one entry is one curvature."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos
from syncalgos import DataParallel, Strategy


def train(
    curvatures: Sequence[float],
    strategy: Strategy,
    optimizer: optax.GradientTransformation,
    rounds: int,
    period: int = 1,
) -> np.ndarray:
    """Trains from 1 toward 0, and returns the center after each round.

    Returns:
        (rounds, curvatures), float64.
    """
    weights = np.float32(curvatures)

    def loss(params, batch):
        return jnp.sum(weights * params**2) / 2 + 0 * batch.mean()

    trainer = DataParallel(loss, optimizer, strategy, workers=2)
    state = trainer.init(np.ones(len(curvatures), np.float32))
    centers = []
    for _ in range(rounds):
        state, _ = trainer.run(state, np.zeros((period, 2), np.float32))
        centers.append(np.asarray(trainer.center(state).params, np.float64))
    return np.array(centers)


def test_sync_sgd_is_stable_up_to_two_over_the_curvature():
    rate = 0.5
    curvatures = [1.99 / rate, 2.01 / rate]
    below, above = train(curvatures, syncalgos.sync_sgd(), optax.sgd(rate), 1, 900)[-1]
    assert abs(below) < 1e-3
    assert abs(above) > 1e3


def root_product(track: np.ndarray) -> np.ndarray:
    """The product of the two roots of x[t+1] = a x[t] - b x[t-1], which is b."""
    # x[t+1] x[t-1] - x[t]² shrinks by b in each round.
    invariant = track[2:] * track[:-2] - track[1:-1] ** 2
    return invariant[1:] / invariant[:-1]


@pytest.mark.slow
def test_heavy_ball_shrinks_by_the_root_of_its_momentum():
    heavy_ball = optax.sgd(0.1, momentum=0.81)
    (track,) = train([1.0], syncalgos.sync_sgd(), heavy_ball, 12).T
    # Complex roots have one absolute value, the root of 0.81.
    np.testing.assert_allclose(root_product(track), 0.81, rtol=1e-3)


def test_bmuf_shrinks_by_the_root_of_its_block_momentum_in_each_round():
    strategy = syncalgos.bmuf(4, block_momentum=0.64)
    (track,) = train([1.0], strategy, optax.sgd(0.1), 12, 4).T
    np.testing.assert_allclose(root_product(track), 0.64, rtol=1e-3)


@pytest.mark.slow
def test_lookahead_mixes_a_round_of_fast_steps_with_none():
    strategy = syncalgos.lookahead(5, slow_lr=0.3)
    track = train([0.5, 2.0], strategy, optax.sgd(0.2), 4, 5)
    fast_factors = (1 - 0.2 * np.array([0.5, 2.0])) ** 5
    factors = 1 - 0.3 + 0.3 * fast_factors
    np.testing.assert_allclose(track[1:] / track[:-1], [factors] * 3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 4])
def test_averaging_has_the_noise_floor_of_sync_sgd(period):
    rate = 0.3
    workers = 4
    entries = 2000
    noise = np.random.default_rng(0).normal(size=(60, workers, entries))

    def loss(params, batch):
        return jnp.sum(params**2) / 2 + batch.mean(0) @ params

    strategy = syncalgos.model_averaging(period)
    trainer = DataParallel(loss, optax.sgd(rate), strategy, workers=workers)
    state = trainer.init(np.zeros(entries, np.float32))
    state, _ = trainer.run(state, np.float32(noise))
    variance = np.var(trainer.center(state).params)
    assert variance == pytest.approx(rate / (workers * (2 - rate)), rel=0.15)


def test_diloco_with_a_period_of_four_is_unstable_between_two_products():
    """The table of docs/studies/outer-rate-by-period.md: rate times curvature."""
    heavy_ball = optax.sgd(1.0, momentum=0.9)
    products = [0.004, 0.0055, 0.18, 0.22, 1.1, 1.2]
    (center,) = train(products, syncalgos.diloco(4), heavy_ball, 1, 4800)
    is_stable = abs(center) < 0.5
    assert is_stable.tolist() == [True, False, False, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("period", "limit"), [(16, 3.55), (64, 3.79)])
def test_diloco_with_a_long_period_is_stable_at_any_rate(period, limit):
    heavy_ball = optax.sgd(1.0, momentum=0.9)
    products = np.geomspace(1e-3, limit, 200)
    (center,) = train(products, syncalgos.diloco(period), heavy_ball, 1, 200 * period)
    assert np.max(abs(center)) < 0.5
