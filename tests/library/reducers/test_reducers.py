"""Properties of all reducers: results on all workers, on each backend."""

import functools

import jax
import numpy as np
import pytest
from reducing import (
    EXACT,
    REDUCERS,
    ROBUST,
    ROUNDING,
    SHAPES,
    SPOILED,
    VOTES,
    ZEROS,
    assert_close,
    each_leaf,
    mean_over_workers,
    means,
    normal,
    normal_tree,
    outcome,
    reduced,
    run,
    side_by_side,
)

from syncalgos import reducers
from syncalgos.reducers import (
    clipped,
    error_feedback,
    power_sgd,
    quantized,
    random_k,
    row_sparse,
    sign,
    top_k,
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REDUCERS)
def test_workers_get_the_same_in_its_own_dtype(name):
    updates, combined, _ = outcome(name)
    for key in SHAPES:
        x = combined[key]
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1], x.shape))
        assert x.dtype == updates[key].dtype


@pytest.mark.parametrize("name", EXACT)
def test_combined_is_the_mean_of_what_was_sent(name):
    _, combined, sent = outcome(name)
    for x, parts in each_leaf(combined, sent):
        assert_close(x, mean_over_workers(parts))


# The unit to which each rounds, as a share of the largest entry.
PACKED = {"bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7, "int2": 1, "top_k-int4": 1 / 7}


@pytest.mark.parametrize(
    "name",
    ["int4", *(pytest.param(n, marks=pytest.mark.slow) for n in PACKED if n != "int4")],
)
def test_entries_of_odd_sizes_are_packed_in_their_places(name):
    reducer = (ROUNDING | {"bf16": reducers.bf16()})[name]
    updates = [normal((size,), workers=2) for size in (1, 2, 3, 7, 513, 1025)]
    combined, sent, _ = run(reducer, updates)
    for x, given, parts in zip(updates, combined, sent, strict=True):
        # To a unit of the largest entry, and twice over where that is rounded again.
        unit = 1.001 * PACKED[name] * np.max(np.abs(x))
        assert np.max(np.abs(parts - x)) <= unit
        assert np.max(np.abs(given - mean_over_workers(x))) <= 2 * unit


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
    for key in ("matrix", "scalar"):
        assert np.isnan(combined[key][SPOILED]).any()


@pytest.mark.parametrize("name", REDUCERS)
def test_nan_of_one_worker_stays_in_no_state(name):
    _, combined, _, state = reduced(name)
    for x in jax.tree.leaves((combined, state)):
        assert np.isfinite(x[SPOILED + 1]).all()


# Others use the same collectives and draws as one of these.
COMPARED = ["int4", "random_k", "power_sgd", "clipped"]


@functools.cache
def on_lanes(workers):
    """Returns updates, and the results of COMPARED on the lanes of one device."""
    updates = {"matrix": normal((5, 3), 2, workers)}
    return updates, run(side_by_side({n: REDUCERS[n] for n in COMPARED}), updates)


@pytest.mark.parametrize(
    ("backend", "devices", "lanes"),
    [
        ("pmap", 2, 2),
        ("shard_map", 2, 2),
        pytest.param("pmap", 3, 1, marks=pytest.mark.slow),
        pytest.param("shard_map", 3, 1, marks=pytest.mark.slow),
        pytest.param("pmap", 1, 3, marks=pytest.mark.slow),
        pytest.param("shard_map", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_backends_and_layouts_agree(backend, devices, lanes):
    updates, expected = on_lanes(devices * lanes)
    several = side_by_side({n: REDUCERS[n] for n in COMPARED})
    results = run(several, updates, None, backend, devices)
    assert_close(results, expected)
    for x in jax.tree.leaves(results[0]):  # bit for bit alike on all devices
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1], x.shape))


@pytest.mark.slow
def test_reducers_take_one_axis_name():
    def chosen(**axis):
        return side_by_side(
            {
                "int8": quantized(8, **axis),
                "sign": sign(**axis),
                "top_k": error_feedback(functools.partial(top_k, 0.3), **axis),
            }
        )

    x = normal((11,))
    one = chosen(axis="batch")

    def program(own):
        return one.combine(own, one.init(own), 0)[0]

    combined = jax.pmap(program, axis_name="batch")(x[0])
    assert_close(combined, jax.tree.map(lambda x: x[0], run(chosen(), x)[0]))


LIMITS = {
    "mean": reducers.mean(),
    "top_k(1)": top_k(1),
    "random_k(1)": random_k(1),
    "power_sgd-full-rank": power_sgd(4, min_rate=0),
    "power_sgd-more-than-full": power_sgd(100, min_rate=0),
    "clipped-wide": clipped(1e3, iterations=2),
    "error_feedback(mean)": error_feedback("mean"),
    "error_feedback(top_k(1))": error_feedback(top_k(1)),
    "row_sparse-pair": row_sparse(5, {"matrix": "pair", "scale": "pair"}),
    "row_sparse-second": row_sparse(5, {"matrix": False, "scale": True}),
    "row_sparse-all": row_sparse(7, lambda tree: True),
    "row_sparse-none": row_sparse(1, False),
}


TAIL = ("power_sgd-more-than-full", "error_feedback(top_k(1))", "row_sparse-second")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in TAIL)) for n in LIMITS],
)
def test_limit_is_the_mean(name):
    with jax.enable_x64(True):
        updates = normal_tree(2, matrix=(5, 4), scale=(5,))
        updates = jax.tree.map(np.float64, updates)
        combined, _, _ = run(LIMITS[name], updates)
    # Float64 rounds at 1e-16: nothing passes through float32.
    assert_close(combined, means(updates), 1e-14)
    assert {x.dtype for x in combined.values()} == {np.dtype(np.float64)}
