"""Draws of reducers: levels without bias, independence, and seeds."""

import functools

import jax
import numpy as np
import pytest
from support.reducer_cases import (
    CLOSE,
    REDUCERS,
    assert_neighbours,
    mean_over_workers,
    normal,
    run,
    side_by_side,
)
from support.tiers import tiers

from syncalgos import reducers

# Its halves are equal, as are two leaves and all workers: only draws tell them apart.
HALF = [1.0, -0.937, 0.71, 0.333, 0.04, -0.005, -0.28, -0.61]
ENTRIES = np.tile(np.float32(HALF), 2)
DRAWS = 2000
# One code in two hops and in one; `top_k` sends all entries here. Other numbers of bits
# differ in their levels alone, which are in the recurrence of quantized_sgd.
ROUNDING = {"int4": reducers.quantized(4), "top_k-int4": reducers.top_k(1, bits=4)}
LEVELS = 7  # of each sign


@functools.cache
def rounded(name):
    """Returns combined and sent after steps 0, 1, …, and step 7 once again."""
    x = np.broadcast_to(ENTRIES, (DRAWS + 1, 2, len(ENTRIES)))
    updates = {"a": x} if name.startswith("top_k") else {"a": x, "b": x}
    combined, sent, _ = run(ROUNDING[name], updates, [*range(DRAWS), 7])
    return jax.tree.map(np.float64, (combined, sent))


def assert_unbiased(draws, exact):
    """Every entry is within 4.5 standard errors; one in 150,000 is not by chance."""
    error = draws.std(0) / np.sqrt(len(draws)) + 1e-6  # some are levels: no variance
    z = (draws.mean(0) - exact) / error
    assert (np.abs(z) < 4.5).all()
    assert np.abs(z.mean()) < 4.5 / np.sqrt(z.size)


def in_parts(x):
    """Splits (…, 16) into the parts that two workers average: (…, 2, 8)."""
    return x.reshape(*x.shape[:-1], 2, 8)


@pytest.mark.parametrize("name", tiers(ROUNDING, ["int4"]))
def test_rounding_at_random_sends_one_of_two_neighbouring_levels_without_bias(name):
    combined, sent = rounded(name)
    exact = np.broadcast_to(np.float64(ENTRIES), sent["a"].shape)
    assert_neighbours(in_parts(sent["a"]), in_parts(exact), LEVELS)
    assert_unbiased(sent["a"][:DRAWS].reshape(DRAWS, -1), np.tile(ENTRIES, 2))
    assert_unbiased(combined["a"][:DRAWS, 0], ENTRIES)


def test_quantized_rounds_the_mean_of_what_was_sent_once_more():
    combined, sent = rounded("int4")
    mean = in_parts(mean_over_workers(sent["a"]))
    assert_neighbours(in_parts(combined["a"]), mean, LEVELS)


@pytest.mark.parametrize("name", ROUNDING)
def test_draws_are_independent(name):
    combined, sent = jax.tree.map(lambda x: x[:DRAWS], rounded(name))
    lost = {key: x - ENTRIES for key, x in sent.items()}  # (steps, workers, entries)
    first = lost["a"][:, 0]
    pairs = {
        "workers": (first, lost["a"][:, 1]),
        "steps": (first[1:], first[:-1]),
        "halves": (first[:, :8], first[:, 8:]),
        "entries": (first[:, 1:7], first[:, 2:8]),
    }
    if "b" in lost:
        second = combined["a"][:, 0] - sent["a"].mean(1)
        pairs["leaves"] = (first, lost["b"][:, 0])
        pairs["roundings"] = (first, second)
        pairs["halves, rounded again"] = (second[:, :8], second[:, 8:])
    for which, pair in pairs.items():
        # What is near a level is rarely rounded away from it: too few cases to tell.
        vary = np.all([x.std(0) > 0.2 / LEVELS for x in pair], axis=0)
        x, y = (x[:, vary] / x[:, vary].std(0) for x in pair)
        assert abs((x * y).mean()) < 4.5 / np.sqrt(x.size), which


@functools.cache
def drawn_entries():
    """Returns x and the entries that random_k sends, step 7 once again."""
    x = np.broadcast_to(np.arange(1, 11, dtype=np.float32), (DRAWS + 1, 2, 10))
    return x, *run(reducers.random_k(0.3), x, [*range(DRAWS), 7])[:2]


def test_random_k_sends_every_entry_equally_often():
    x, combined, sent = drawn_entries()
    np.testing.assert_array_equal(sent, np.where(sent != 0, x, 0))
    np.testing.assert_array_equal(combined, sent)  # all draw alike, and hold alike
    assert (np.count_nonzero(sent, axis=-1) == 3).all()
    error = np.sqrt(0.3 * 0.7 / DRAWS)
    assert (np.abs((sent[:DRAWS, 0] != 0).mean(0) - 0.3) < 4.5 * error).all()


@pytest.mark.parametrize("name", [*ROUNDING, "random_k"])
def test_draws_follow_the_step_and_are_alike_only_where_they_must(name):
    sent = drawn_entries()[2] if name == "random_k" else rounded(name)[1]["a"]
    np.testing.assert_array_equal(sent[7], sent[-1])
    assert len(np.unique(sent[:10, 0], axis=0)) > 5  # of ten steps; some may agree
    assert (sent[:, 0] == sent[:, 1]).all() == (name == "random_k")


@pytest.mark.slow
def test_seed_changes_the_draws():
    """Draws of `quantized` and `power_sgd` are in recurrences, of given seeds."""

    def seeded(seed):
        first = reducers.top_k(1, bits=4, seed=seed)
        second = reducers.random_k(0.3, seed=seed)
        return side_by_side({"top_k": first, "random_k": second})

    both = side_by_side({seed: seeded(seed) for seed in (0, 1)})
    combined, _, _ = run(both, normal((6, 4)))
    for name in ("top_k", "random_k"):
        assert (combined[0][name] != combined[1][name]).any(), name


@pytest.mark.parametrize(
    "reducer",
    [REDUCERS[name] for name in ("int4", "top_k-int4", "random_k")]
    + [reducers.error_feedback("int4")],
)
def test_random_reducer_without_a_step_is_refused(reducer):
    def program(x):
        return reducer.update(x, reducer.init(x))[0]

    mapped = jax.vmap(jax.vmap(program, axis_name="lanes"), axis_name="devices")
    with pytest.raises(ValueError, match="call its update with step="):
        mapped(np.ones((1, 2, 5), np.float32))


def test_large_entry_spoils_at_most_its_block():
    x = 1e-3 * normal((1025,), workers=1)  # one worker's part, of three blocks
    x[0, 0, 300] = 1e3
    _, sent, _ = run(reducers.quantized(4), x)
    np.testing.assert_allclose(sent[0, 0, 300], 1e3, rtol=CLOSE)
    unit = np.sort(np.abs(x), axis=None)[-2] / 7
    assert (np.abs(sent - x) > unit * (1 + 1e-5)).sum() < 512


def test_rounding_takes_any_finite_magnitude():
    magnitudes = 10.0 ** np.array([-40, -38, -30, 0, 30, 36, 38])[:, None, None]
    x = np.broadcast_to(np.float32(magnitudes * [1, -0.3, 0]), (7, 2, 3))
    combined, sent, _ = run(reducers.quantized(8), x)
    for y in (combined, sent):
        # Rounded twice; and below 1.2e-38 XLA may flush to zero.
        assert (np.abs(np.float64(y) - x) <= magnitudes * 2.01 / 127 + 1.2e-38).all()


@pytest.mark.slow
def test_rounding_takes_large_entries_of_float16():
    several = {"quantized": reducers.quantized(8), "top_k": reducers.top_k(1, bits=8)}
    x = np.full((1, 2, 3), 1000, np.float16)  # 127 times that is above 65504
    combined, sent, _ = run(side_by_side(several), x)
    for y in jax.tree.leaves((combined, sent)):
        np.testing.assert_array_equal(y, x)
