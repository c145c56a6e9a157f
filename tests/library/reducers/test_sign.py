"""Signs against NumPy: scaled, and by majority."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import (
    assert_close,
    each_leaf,
    mean_over_workers,
    outcome,
    run,
    side_by_side,
)

from syncalgos import DataParallel, sign_sgd, stateless
from syncalgos.reducers import sign, tally


def test_scaled_sign_matches_numpy():
    for x, combined, sent in each_leaf(*outcome("sign")):
        scaled = np.abs(x).mean(-1, keepdims=True) * np.where(x >= 0, 1, -1)
        assert_close(sent, scaled)
        assert_close(combined, mean_over_workers(scaled))


def test_majority_matches_numpy():
    for x, combined, sent in each_leaf(*outcome("majority")):
        drawn = x == 0
        signs = np.where(drawn, sent, np.sign(x))
        np.testing.assert_array_equal(sent, signs)
        np.testing.assert_array_equal(combined, np.sign(mean_over_workers(signs)))


def test_tally_matches_numpy():
    for x, combined, sent in each_leaf(*outcome("tally")):
        drawn = x == 0
        np.testing.assert_array_equal(sent, np.where(drawn, sent, np.sign(x)))
        assert_close(combined, mean_over_workers(sent))


def test_tally_counts_the_votes_of_many_workers():
    """Of 300 in two bytes: 255 is the most that one holds."""
    x = np.ones((1, 300, 3), np.float32)
    x[0, :130, 1], x[0, :, 2] = -1, -1
    combined, _, _ = run(tally(), x)
    np.testing.assert_allclose(combined[0, 0], [1, 40 / 300, -1], rtol=1e-6)


def test_scaled_sign_of_zero_is_plus():
    x = np.array([[0.0, -0.0, 1.0, -1.0], [0.0, -0.0, -1.0, -1.0]], np.float32)
    combined, sent, _ = run(sign(), x[None])
    signs = np.array([[1, 1, 1, -1], [1, 1, -1, -1]])
    np.testing.assert_array_equal(sent[0], 0.5 * signs)  # mean(|x|) is 0.5
    np.testing.assert_array_equal(combined[0], [[0.5, 0.5, 0, -0.5]] * 2)


# Of so many fair draws the mean is within 5 deviations of 0, but once in two million.
DRAWN = 4096
FAIR = 5 / np.sqrt(DRAWN)


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_votes_on_zeros_and_ties_are_fair_and_agreed_draws(workers):
    """Taken as +, they would move what has no gradient, and shift every minimum."""
    zeros = np.zeros((workers, DRAWN), np.float32)
    tied = zeros + np.where(np.arange(workers) % 2, 1, -1)[:, None]
    for x in (zeros, -zeros, tied) if workers > 1 else (zeros, -zeros):
        combined, sent, _ = run(sign(majority=True), x[None].astype(np.float32))
        assert set(np.unique(combined)) == set(np.unique(sent)) == {-1, 1}
        assert abs(combined[0, 0].mean()) < FAIR
        np.testing.assert_array_equal(combined[0], combined[0, [0] * workers])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_an_even_number_of_voters_comes_to_rest_at_the_minimum(workers):
    """With ties as + they rest 0.55, 0.29 and 0.15 deviations of the noise below it."""
    noise = np.random.default_rng(0).normal(size=(600, workers, DRAWN))
    trainer = DataParallel(
        stateless(lambda x, batch: 0.5 * jnp.sum((x - jnp.mean(batch, 0)) ** 2)),
        optax.sgd(0.02),
        sign_sgd(majority=True),
        workers,
        "vmap",
    )
    state = trainer.init(np.zeros(DRAWN, np.float32))
    state, _ = trainer.run(state, noise.astype(np.float32))
    assert abs(np.mean(trainer.center(state).params)) < 0.02


@pytest.mark.parametrize("reducer", [sign(majority=True), tally()])
def test_a_vote_on_nan_is_a_fair_draw(reducer):
    """It was counted as a vote for -: one bad batch moved all entries one way."""
    x = np.full((1, 1, DRAWN), np.nan, np.float32)
    combined, sent, _ = run(reducer, x)
    np.testing.assert_array_equal(np.abs(sent), 1)
    assert abs(combined.mean()) < FAIR


def test_seed_changes_the_draws_of_a_vote():
    zeros = np.zeros((1, 2, 64), np.float32)
    both = side_by_side({i: sign(majority=True, seed=i) for i in range(2)})
    combined, _, _ = run(both, zeros)
    assert (combined[0] != combined[1]).any()
