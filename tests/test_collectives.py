"""Collectives over the pair of worker axes, and over a single one, against NumPy."""

import jax
import numpy as np
import pytest

from syncalgos import collectives
from syncalgos.layout import BACKENDS, make_layout, spread

LAYOUTS = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 1), (3, 2), (2, 3)]


def over_workers(function, values, backend, devices):
    """Applies a collective to each worker's value; returns all workers' results."""
    workers = len(values)
    layout = make_layout(workers, backend, range(devices))

    def program(own, shared, batches):
        return function(own), ()

    own = values.reshape(*layout.shape, *values.shape[1:])
    result, _ = spread(layout, program, donate=False)(own, ((), ()))
    return jax.tree.map(
        lambda x: np.asarray(x).reshape(workers, *x.shape[2:]),
        jax.block_until_ready(result),
    )


def cases():
    for devices, lanes in LAYOUTS:
        for backend in BACKENDS:
            if backend != "vmap" or devices == 1:
                yield pytest.param(backend, devices, lanes)


@pytest.mark.parametrize(("backend", "devices", "lanes"), list(cases()))
def test_collectives_match_numpy(backend, devices, lanes):
    workers = devices * lanes
    values = np.random.default_rng(0).normal(size=(workers, 3)).astype(np.float32)
    shifts = (0, 1, 2, lanes, workers - 1, workers + 1, -1)

    def everything(x):
        return {
            "index": collectives.index(),
            "size": np.int32(collectives.size()),
            "mean": collectives.mean(x),
            "agreed": collectives.agreed(x),
            "gather": collectives.gather({"x": x})["x"],
            "shift": [collectives.shift(x, by) for by in shifts],
        }

    result = over_workers(everything, values, backend, devices)
    mean = np.broadcast_to(values.astype(np.float64).mean(0), values.shape)
    np.testing.assert_array_equal(result["index"], np.arange(workers))
    np.testing.assert_array_equal(result["size"], np.full(workers, workers))
    np.testing.assert_allclose(result["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["agreed"], mean, rtol=1e-5, atol=1e-6)
    for row in result["gather"]:
        np.testing.assert_array_equal(row, values)
    for by, shifted in zip(shifts, result["shift"], strict=True):
        np.testing.assert_array_equal(shifted, np.roll(values, -by, axis=0))


@pytest.mark.parametrize("workers", [3, 5, 7])
def test_agreed_value_is_kept_bit_for_bit(workers):
    value = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    values = np.broadcast_to(value, (workers, 1000))
    result = over_workers(collectives.agreed, values, "vmap", 1)
    np.testing.assert_array_equal(result, values)
    # A plain mean is an ulp off here: else this test could not fail.
    assert (over_workers(collectives.mean, values, "vmap", 1) != values).any()


def test_mean_keeps_counts_and_keys():
    def program(x):
        tree = {"count": x.astype("int32"), "key": jax.random.key(7), "x": x}
        mean = collectives.mean(tree)
        return {**mean, "key": jax.random.key_data(mean["key"])}

    result = over_workers(program, np.arange(4.0, dtype=np.float32), "vmap", 1)
    np.testing.assert_array_equal(result["count"], [0, 1, 2, 3])
    np.testing.assert_array_equal(result["x"], np.full(4, 1.5))
    np.testing.assert_array_equal(
        result["key"], np.broadcast_to(jax.random.key_data(jax.random.key(7)), (4, 2))
    )


def test_collectives_take_one_axis_name():
    values = np.arange(6.0).reshape(3, 2)

    def program(x):
        return (
            collectives.mean(x, "batch"),
            collectives.gather(x, "batch"),
            collectives.shift(x, 1, "batch"),
        )

    mean, gathered, shifted = jax.pmap(program, axis_name="batch")(values)
    np.testing.assert_allclose(mean, np.broadcast_to(values.mean(0), (3, 2)), 1e-6)
    np.testing.assert_array_equal(gathered, np.broadcast_to(values, (3, 3, 2)))
    np.testing.assert_array_equal(shifted, np.roll(values, -1, axis=0))
