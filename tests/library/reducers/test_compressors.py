"""Signs, largest entries and low-rank products, against NumPy and theory."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import (
    CLOSE,
    ZEROS,
    assert_close,
    assert_neighbours,
    each_leaf,
    mean_over_workers,
    normal,
    outcome,
    run,
    side_by_side,
)

from syncalgos import DataParallel, sign_sgd, stateless
from syncalgos.reducers import power_sgd, random_k, sign, tally, top_k


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
    """300 workers need two bytes: 255 is the most that one holds."""
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
    """Taken as +, they would move entries without gradients and shift all minima."""
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
        workers=workers,
        backend="vmap",
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


def largest(x, share):
    """Marks a share of largest entries along the last axis; returns their number too.

    No two are equal but in a step of zeros, which is left out.
    """
    count = int(np.ceil(share * x.shape[-1]))
    return np.abs(x) >= np.sort(np.abs(x), axis=-1)[..., [-count]], count


def test_top_k_matches_numpy():
    for leaf in each_leaf(*outcome("top_k")):
        x, combined, sent = (v[:ZEROS] for v in leaf)
        chosen, count = largest(x, 0.3)
        assert (chosen.sum(-1) == count).all()
        np.testing.assert_array_equal(sent, np.where(chosen, x, 0))
        assert_close(combined, mean_over_workers(np.where(chosen, x, 0)))


def test_top_k_rounds_what_it_sends_to_a_neighbouring_level():
    for leaf in each_leaf(*outcome("top_k-int4")):
        x, _, sent = (v[:ZEROS] for v in leaf)
        chosen, count = largest(x, 0.3)  # 154 at most: they share one scale
        assert (sent[~chosen] == 0).all()
        exact, rounded = (v[chosen].reshape(ZEROS, 3, count) for v in (x, sent))
        assert_neighbours(rounded, exact, 7)


def test_top_k_sends_as_many_of_equal_entries():
    combined, sent, _ = run(top_k(0.3), np.ones((1, 2, 10), np.float32))
    assert (np.count_nonzero(sent, axis=-1) == 3).all()
    assert_close(combined, mean_over_workers(sent))


# In float64 0.07 · 100 is 7.000000000000001.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("density", "counts"),
    [(0.3, {1: 1, 7: 3, 10: 3}), (0.07, {100: 7}), (0.001, {7: 1})],
)
def test_share_of_the_entries_is_rounded_up(density, counts):
    both = side_by_side({"top_k": top_k(density), "random_k": random_k(density)})
    _, sent, _ = run(both, [normal((size,), workers=2) for size in counts])
    for leaves in sent.values():
        seen = [np.unique(np.count_nonzero(x, axis=-1)).tolist() for x in leaves]
        assert seen == [[count] for count in counts.values()]


def test_power_sgd_loses_only_what_is_orthogonal_to_what_it_sends():
    updates, combined, sent = outcome("power_sgd")
    for step in range(ZEROS):
        values = np.linalg.svd(combined["matrix"][step, 0])[1]
        assert values[2] < CLOSE * values[0]  # its rank is 2
        for worker in range(3):
            matrix, part = (
                t["matrix"][step, worker].astype(np.float64) for t in (updates, sent)
            )
            size = np.linalg.norm(matrix) ** 2
            np.testing.assert_allclose(part.T @ (matrix - part) / size, 0, atol=CLOSE)
            assert 0 < np.linalg.norm(part) < np.linalg.norm(matrix)


def test_power_sgd_sends_a_mean_of_its_rank_exactly():
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20))
    apart = rng.normal(size=(30, 20))  # by which the two workers differ from their mean
    x = np.float32([[mean + apart, mean - apart]])
    combined, _, _ = run(power_sgd(2), x)
    # Rounding of what cancels in the mean, over a QR of some condition.
    assert_close(combined[0, 0], mean, 1e-5)


def test_power_sgd_of_a_steady_gradient_becomes_its_best_approximation():
    rng = np.random.default_rng(1)
    left, _ = np.linalg.qr(rng.normal(size=(30, 20)))
    right, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    values = 2.0 ** -np.arange(20)
    x = np.float32((left * values) @ right.T)
    combined, _, _ = run(power_sgd(2), np.broadcast_to(x, (16, 2, 30, 20)))
    best = (left[:, :2] * values[:2]) @ right[:, :2].T  # Eckart and Young
    # Each iteration shrinks the error by the square of the third value over the second.
    assert_close(combined[-1, 0], best, 1e-5)


def test_power_sgd_recovers_from_a_zero_gradient():
    # As behind a readout that starts from zeros, of inputs whose first are never lit.
    x = np.zeros((12, 2, 8, 6), np.float32)
    rng = np.random.default_rng(0)
    x[1:, :, 4:] = np.outer(rng.normal(size=4), rng.normal(size=6))
    combined, _, _ = run(power_sgd(2, min_rate=0), x)
    assert_close(combined[-1, 0], x[-1, 0], 1e-5)


def test_power_sgd_keeps_a_matrix_of_integers():
    count = np.arange(12, dtype=np.int32).reshape(1, 2, 2, 3)
    combined, _, _ = run(power_sgd(2), {"count": count, "x": normal((3,), 1, 2)})
    np.testing.assert_array_equal(combined["count"], count)


def test_wide_matrix_at_full_rank_is_sent_whole():
    x = normal((3, 1, 8), steps=2)  # a matrix of 3 × 8
    combined, sent, _ = run(power_sgd(3, min_rate=0), x)
    assert_close(combined, mean_over_workers(x))
    assert_close(sent, x)
