"""All reducers: what their results have in common, and each against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.reducer_cases import (
    CLOSE,
    EXACT,
    REDUCERS,
    ROBUST,
    SHAPES,
    SPOILED,
    VOTES,
    ZEROS,
    assert_close,
    assert_neighbours,
    each_leaf,
    mean_over_workers,
    normal,
    outcome,
    reduced,
    run,
    side_by_side,
)

from syncalgos import reducers
from syncalgos.reducers._reducer import count_share


@pytest.mark.parametrize("name", REDUCERS)
def test_workers_get_the_same_in_its_own_dtype(name):
    updates, combined, _ = outcome(name)
    for key in SHAPES:
        x = combined[key]
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1], x.shape))
        assert x.dtype == updates[key].dtype


@pytest.mark.parametrize("name", EXACT)
def test_combined_is_the_mean_of_what_was_sent(name):
    _, combined, sent_updates = outcome(name)
    for x, messages in each_leaf(combined, sent_updates):
        assert_close(x, mean_over_workers(messages))


@pytest.mark.parametrize("name", REDUCERS)
def test_integers_and_empty_leaves_are_kept(name):
    updates, *results = outcome(name)
    for tree in results:
        for key in ("count", "empty"):
            np.testing.assert_array_equal(tree[key], updates[key])
            assert tree[key].dtype == updates[key].dtype


# Votes on zeros are drawn, and two go on from what was before.
@pytest.mark.parametrize(
    "name", [n for n in REDUCERS if n not in (*VOTES, "clipped", "low_bit", "ef21")]
)
def test_zeros_combine_to_zeros(name):
    for _, combined, _ in each_leaf(*outcome(name)):
        np.testing.assert_array_equal(combined[ZEROS], np.zeros_like(combined[ZEROS]))


# A draw of entries may miss it, and robust ones are there to leave it out.
@pytest.mark.parametrize(
    "name", [n for n in REDUCERS if n not in (*VOTES, *ROBUST, "random_k")]
)
def test_nan_of_one_worker_shows(name):
    _, combined, _ = outcome(name)
    assert np.isnan(combined["matrix"][SPOILED]).any()


@pytest.mark.parametrize("name", REDUCERS)
def test_nan_of_one_worker_stays_in_no_state(name):
    _, combined, _, state = reduced(name)
    for x in jax.tree.leaves((combined, state)):
        assert np.isfinite(x[SPOILED + 1]).all()


def test_cast_rounds_the_mean_of_what_was_sent_once_more():
    for x, combined, sent_updates in each_leaf(*outcome("bf16")):
        np.testing.assert_array_equal(sent_updates, x.astype(jnp.bfloat16))
        np.testing.assert_array_equal(combined, combined.astype(jnp.bfloat16))
        mean = mean_over_workers(sent_updates)
        # To nearest, of 8 bits, and a float32 sum before it.
        assert (np.abs(combined - mean) <= (2**-8 + CLOSE) * np.abs(mean)).all()


def test_scaled_sign_matches_numpy():
    for x, combined, sent_updates in each_leaf(*outcome("sign")):
        scaled = np.abs(x).mean(-1, keepdims=True) * np.where(x >= 0, 1, -1)
        assert_close(sent_updates, scaled)
        assert_close(combined, mean_over_workers(scaled))


def test_votes_match_numpy():
    for name in VOTES:
        for x, combined, sent_updates in each_leaf(*outcome(name)):
            np.testing.assert_array_equal(
                sent_updates, np.where(x == 0, sent_updates, np.sign(x))
            )
            mean = mean_over_workers(sent_updates)
            assert_close(combined, np.sign(mean) if name == "majority" else mean)


def mark_largest(x: np.ndarray, share: float) -> tuple[np.ndarray, int]:
    """Marks a share of largest entries along the last axis; returns their number too.

    No two are equal but in a step of zeros, which is left out.
    """
    count = int(np.ceil(share * x.shape[-1]))
    return np.abs(x) >= np.sort(np.abs(x), axis=-1)[..., [-count]], count


def test_top_k_matches_numpy():
    for leaf in each_leaf(*outcome("top_k")):
        x, combined, sent_updates = (v[:ZEROS] for v in leaf)
        chosen, count = mark_largest(x, 0.3)
        assert (chosen.sum(-1) == count).all()
        np.testing.assert_array_equal(sent_updates, np.where(chosen, x, 0))
        assert_close(combined, mean_over_workers(np.where(chosen, x, 0)))


def test_top_k_rounds_what_it_sends_to_a_neighbouring_level():
    for leaf in each_leaf(*outcome("top_k-int4")):
        x, _, sent_updates = (v[:ZEROS] for v in leaf)
        chosen, count = mark_largest(x, 0.3)  # 154 at most: they share one scale
        assert (sent_updates[~chosen] == 0).all()
        exact, rounded = (v[chosen].reshape(ZEROS, 3, count) for v in (x, sent_updates))
        assert_neighbours(rounded, exact, 7)


def test_top_k_sends_as_many_of_equal_entries():
    combined, sent_updates, _ = run(
        reducers.top_k(0.3), np.ones((1, 2, 10), np.float32)
    )
    assert (np.count_nonzero(sent_updates, axis=-1) == 3).all()
    assert_close(combined, mean_over_workers(sent_updates))


@pytest.mark.parametrize(
    ("density", "size", "count"),
    [(0.3, 1, 1), (0.3, 7, 3), (0.3, 10, 3), (0.07, 100, 7), (0.001, 7, 1)],
)
def test_share_of_the_entries_is_rounded_up(density, size, count):
    """In float64 0.07 · 100 is 7.000000000000001."""
    assert count_share(density, size) == count


def test_entries_of_odd_sizes_are_packed_in_their_places():
    updates = [normal((size,), workers=2) for size in (1, 7, 1025)]
    combined, sent_updates, _ = run(reducers.quantized(4), updates)
    for x, mean, message in zip(updates, combined, sent_updates, strict=True):
        # To a unit of the largest entry, and twice over where that is rounded again.
        unit = 1.001 / 7 * np.max(np.abs(x))
        assert np.max(np.abs(message - x)) <= unit
        assert np.max(np.abs(mean - mean_over_workers(x))) <= 2 * unit


# Of so many fair draws the mean is within 5 deviations of 0, but once in two million.
NUM_DRAWS = 4096
MAX_MEAN = 5 / np.sqrt(NUM_DRAWS)
NAN = np.float32(np.nan)


def test_votes_on_zeros_nan_and_ties_are_fair_draws_that_the_workers_agree_on():
    """Taken as +, they would move entries without gradients and shift all minima."""
    zeros = np.zeros((1, 2, NUM_DRAWS), np.float32)
    tied = zeros + np.float32([[1], [-1]])
    votes = np.concatenate([zeros, -zeros, zeros + NAN, tied], axis=-1)
    majority, other_majority = (
        reducers.sign(majority=True, seed=seed) for seed in (0, 1)
    )
    named_reducers = {
        "majority": majority,
        "other": other_majority,
        "tally": reducers.tally(),
    }
    combined, sent_updates, _ = run(side_by_side(named_reducers), votes)
    for x in (
        combined["majority"],
        combined["other"],
        sent_updates["majority"],
        sent_updates["tally"],
    ):
        np.testing.assert_array_equal(np.abs(x), 1)
        for kind in np.split(x, 4, axis=-1):
            assert abs(kind.mean()) < MAX_MEAN
    for x in combined.values():
        np.testing.assert_array_equal(x[0, 0], x[0, 1])
    assert (combined["majority"] != combined["other"])[..., :NUM_DRAWS].any()


def test_tally_counts_the_votes_of_many_workers():
    """300 workers need two bytes: 255 is the most that one holds."""
    x = np.ones((1, 300, 3), np.float32)
    x[0, :130, 1] = -1
    x[0, :, 2] = -1
    combined, _, _ = run(reducers.tally(), x)
    np.testing.assert_allclose(combined[0, 0], [1, 40 / 300, -1], rtol=1e-6)


def test_scaled_sign_of_zero_is_plus():
    x = np.array([[0.0, -0.0, 1.0, -1.0], [0.0, -0.0, -1.0, -1.0]], np.float32)
    combined, sent_updates, _ = run(reducers.sign(), x[None])
    signs = np.array([[1, 1, 1, -1], [1, 1, -1, -1]])
    np.testing.assert_array_equal(sent_updates[0], 0.5 * signs)  # mean(|x|) is 0.5
    np.testing.assert_array_equal(combined[0], [[0.5, 0.5, 0, -0.5]] * 2)


@pytest.mark.slow
def test_devices_and_lanes_combine_alike():
    """Takes one whose draws are each worker's own and whose parts are each's.

    Collectives are tested in more layouts, and reducers know of no others.
    """
    updates = {"matrix": normal((5, 3), 2, 4)}
    results = run(REDUCERS["int4"], updates, None, "shard_map", 2)
    assert_close(results, run(REDUCERS["int4"], updates))
    for x in jax.tree.leaves(results[0]):  # bit for bit alike on all devices
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1], x.shape))
