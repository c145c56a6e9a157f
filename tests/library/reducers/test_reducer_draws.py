"""Draws of reducers: levels without bias, independence, and seeds."""

import functools
from typing import Any

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
def round_at_random(name: str) -> Any:
    """Returns combined and sent after steps 0, 1, …, and step 7 once again."""
    x = np.broadcast_to(ENTRIES, (DRAWS + 1, 2, len(ENTRIES)))
    updates = {"a": x} if name.startswith("top_k") else {"a": x, "b": x}
    combined, sent_updates, _ = run(ROUNDING[name], updates, [*range(DRAWS), 7])
    return jax.tree.map(np.float64, (combined, sent_updates))


def assert_unbiased(draws: np.ndarray, exact: np.ndarray) -> None:
    """Every entry is within 4.5 standard errors; one in 150,000 is not by chance."""
    error = draws.std(0) / np.sqrt(len(draws)) + 1e-6  # some are levels: no variance
    z = (draws.mean(0) - exact) / error
    assert (np.abs(z) < 4.5).all()
    assert np.abs(z.mean()) < 4.5 / np.sqrt(z.size)


def split_in_halves(x: np.ndarray) -> np.ndarray:
    """Splits (…, 16) into the parts that two workers average: (…, 2, 8)."""
    return x.reshape(*x.shape[:-1], 2, 8)


@pytest.mark.parametrize("name", tiers(ROUNDING, ["int4"]))
def test_rounding_at_random_sends_one_of_two_neighbouring_levels_without_bias(name):
    combined, sent_updates = round_at_random(name)
    exact = np.broadcast_to(np.float64(ENTRIES), sent_updates["a"].shape)
    assert_neighbours(
        split_in_halves(sent_updates["a"]), split_in_halves(exact), LEVELS
    )
    assert_unbiased(sent_updates["a"][:DRAWS].reshape(DRAWS, -1), np.tile(ENTRIES, 2))
    assert_unbiased(combined["a"][:DRAWS, 0], ENTRIES)


def test_quantized_rounds_the_mean_of_what_was_sent_once_more():
    combined, sent_updates = round_at_random("int4")
    mean = split_in_halves(mean_over_workers(sent_updates["a"]))
    assert_neighbours(split_in_halves(combined["a"]), mean, LEVELS)


@pytest.mark.parametrize("name", ROUNDING)
def test_draws_are_independent(name):
    combined, sent_updates = jax.tree.map(lambda x: x[:DRAWS], round_at_random(name))
    # (steps, workers, entries)
    errors_by_leaf = {key: x - ENTRIES for key, x in sent_updates.items()}
    errors = errors_by_leaf["a"][:, 0]
    pairs = {
        "workers": (errors, errors_by_leaf["a"][:, 1]),
        "steps": (errors[1:], errors[:-1]),
        "halves": (errors[:, :8], errors[:, 8:]),
        "entries": (errors[:, 1:7], errors[:, 2:8]),
    }
    if "b" in errors_by_leaf:
        mean_errors = combined["a"][:, 0] - sent_updates["a"].mean(1)
        pairs["leaves"] = (errors, errors_by_leaf["b"][:, 0])
        pairs["roundings"] = (errors, mean_errors)
        pairs["halves, rounded again"] = (mean_errors[:, :8], mean_errors[:, 8:])
    for which, pair in pairs.items():
        # What is near a level is rarely rounded away from it: too few cases to tell.
        varies = np.all([x.std(0) > 0.2 / LEVELS for x in pair], axis=0)
        x, y = (x[:, varies] / x[:, varies].std(0) for x in pair)
        assert abs((x * y).mean()) < 4.5 / np.sqrt(x.size), which


@functools.cache
def draw_entries() -> tuple[np.ndarray, Any, Any]:
    """Returns x and the entries that random_k sends, step 7 once again."""
    x = np.broadcast_to(np.arange(1, 11, dtype=np.float32), (DRAWS + 1, 2, 10))
    return x, *run(reducers.random_k(0.3), x, [*range(DRAWS), 7])[:2]


def test_random_k_sends_every_entry_equally_often():
    x, combined, sent_updates = draw_entries()
    np.testing.assert_array_equal(sent_updates, np.where(sent_updates != 0, x, 0))
    # All draw alike, and hold alike.
    np.testing.assert_array_equal(combined, sent_updates)
    assert (np.count_nonzero(sent_updates, axis=-1) == 3).all()
    error = np.sqrt(0.3 * 0.7 / DRAWS)
    assert (np.abs((sent_updates[:DRAWS, 0] != 0).mean(0) - 0.3) < 4.5 * error).all()


@pytest.mark.parametrize("name", [*ROUNDING, "random_k"])
def test_draws_follow_the_step_and_are_alike_only_where_they_must(name):
    if name == "random_k":
        _, _, sent_updates = draw_entries()
    else:
        sent_updates = round_at_random(name)[1]["a"]
    np.testing.assert_array_equal(sent_updates[7], sent_updates[-1])
    # Of ten steps; some may agree.
    assert len(np.unique(sent_updates[:10, 0], axis=0)) > 5
    assert (sent_updates[:, 0] == sent_updates[:, 1]).all() == (name == "random_k")


@pytest.mark.slow
def test_seed_changes_the_draws():
    """Draws of `quantized` and `power_sgd` are in recurrences, of given seeds."""

    def make_reducer(seed: int) -> reducers.Reducer:
        top_k = reducers.top_k(1, bits=4, seed=seed)
        random_k = reducers.random_k(0.3, seed=seed)
        return side_by_side({"top_k": top_k, "random_k": random_k})

    reducer_pair = side_by_side({seed: make_reducer(seed) for seed in (0, 1)})
    combined, _, _ = run(reducer_pair, normal((6, 4)))
    for name in ("top_k", "random_k"):
        assert (combined[0][name] != combined[1][name]).any(), name


@pytest.mark.parametrize(
    "reducer",
    [REDUCERS[name] for name in ("int4", "top_k-int4", "random_k")]
    + [reducers.error_feedback("int4")],
)
def test_random_reducer_without_a_step_is_refused(reducer):
    def program(x: jax.Array) -> jax.Array:
        return reducer.update(x, reducer.init(x))[0]

    mapped = jax.vmap(jax.vmap(program, axis_name="lanes"), axis_name="devices")
    with pytest.raises(ValueError, match="call its update with step="):
        mapped(np.ones((1, 2, 5), np.float32))


def test_large_entry_spoils_at_most_its_block():
    x = 1e-3 * normal((1025,), workers=1)  # one worker's part, of three blocks
    x[0, 0, 300] = 1e3
    _, sent_updates, _ = run(reducers.quantized(4), x)
    np.testing.assert_allclose(sent_updates[0, 0, 300], 1e3, rtol=CLOSE)
    unit = np.sort(np.abs(x), axis=None)[-2] / 7
    assert (np.abs(sent_updates - x) > unit * (1 + 1e-5)).sum() < 512


def test_rounding_takes_any_finite_magnitude():
    magnitudes = 10.0 ** np.array([-40, -38, -30, 0, 30, 36, 38])[:, None, None]
    x = np.broadcast_to(np.float32(magnitudes * [1, -0.3, 0]), (7, 2, 3))
    combined, sent_updates, _ = run(reducers.quantized(8), x)
    for y in (combined, sent_updates):
        # Rounded twice; and below 1.2e-38 XLA may flush to zero.
        assert (np.abs(np.float64(y) - x) <= magnitudes * 2.01 / 127 + 1.2e-38).all()


@pytest.mark.slow
def test_rounding_takes_large_entries_of_float16():
    named_reducers = {
        "quantized": reducers.quantized(8),
        "top_k": reducers.top_k(1, bits=8),
    }
    x = np.full((1, 2, 3), 1000, np.float16)  # 127 times that is above 65504
    combined, sent_updates, _ = run(side_by_side(named_reducers), x)
    for y in jax.tree.leaves((combined, sent_updates)):
        np.testing.assert_array_equal(y, x)
