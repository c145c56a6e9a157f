"""Collectives over the pair of worker axes, and over a single one, against NumPy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from support.mapped_workers import over_workers

from syncalgos import collectives
from syncalgos.collectives import _topology


def list_group_numbers(workers: int) -> list[int]:
    return [n for n in range(1, workers + 1) if workers % n == 0]


def make_permutations(workers: int) -> list[np.ndarray]:
    rng = np.random.default_rng(workers)
    identity = np.arange(workers)
    turned = np.roll(np.arange(workers), 1)
    return [identity, turned, *(rng.permutation(workers) for _ in range(3))]


def list_shifts(workers: int) -> tuple[int, ...]:
    return 0, 1, 2, workers // 2, workers - 1, workers, workers + 1, -1


def compute_group_means(values: np.ndarray, groups: int) -> np.ndarray:
    grouped_values = values.reshape(groups, -1, *values.shape[1:])
    members = len(values) // groups
    return np.repeat(grouped_values.astype(np.float64).mean(1), members, axis=0)


def make_inputs(workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each worker's values, and its rows and codes for each of the others."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(workers, 3)).astype(np.float32)
    rows = rng.normal(size=(workers, workers, 2)).astype(np.float32)
    return values, rows, rng.integers(0, 256, (workers, workers), dtype=np.uint8)


def call_all_collectives(
    worker_inputs: Any, axis: Any = collectives.WORKERS
) -> dict[str, Any]:
    """One worker's results of all collectives."""
    x, rows, codes = worker_inputs
    workers = collectives.size(axis)
    permutations = make_permutations(workers)

    def exchange(index: jax.Array) -> jax.Array:
        return collectives.exchange({"x": x}, permutations, index, axis)["x"]

    return {
        "index": collectives.index(axis),
        "size": np.int32(workers),
        "mean": collectives.mean(x, axis),
        "agreed": collectives.agreed(x, axis),
        "groups": [
            collectives.group_mean({"x": x}, n, axis)["x"]
            for n in list_group_numbers(workers)
        ],
        "gather": collectives.gather({"x": x}, axis)["x"],
        "shift": [
            collectives.shift(x, distance, axis) for distance in list_shifts(workers)
        ],
        "exchange": jax.lax.map(exchange, np.arange(len(permutations))),
        "turned": collectives.all_to_all((rows, codes), axis),
    }


def assert_all_match(result: Any, inputs: Any) -> None:
    """Compares all workers' results with NumPy's."""
    values, rows, codes = inputs
    workers = len(values)
    np.testing.assert_array_equal(result["index"], np.arange(workers))
    np.testing.assert_array_equal(result["size"], np.full(workers, workers))
    means = [result["mean"], result["agreed"], *result["groups"]]
    for mean, groups in zip(means, (1, 1, *list_group_numbers(workers)), strict=True):
        expected = compute_group_means(values, groups)
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)
    for row in result["gather"]:
        np.testing.assert_array_equal(row, values)
    for distance, shifted in zip(list_shifts(workers), result["shift"], strict=True):
        np.testing.assert_array_equal(shifted, np.roll(values, -distance, axis=0))
    for index, sources in enumerate(make_permutations(workers)):
        np.testing.assert_array_equal(result["exchange"][:, index], values[sources])
    received_rows, received_codes = result["turned"]
    np.testing.assert_array_equal(received_rows, rows.swapaxes(0, 1))
    np.testing.assert_array_equal(received_codes, codes.T)
    assert received_codes.dtype == np.uint8


# In layouts of several lanes a group is some lanes of a device, some whole devices, or
# (2 × 3 workers in 3 groups, 3 × 2 in 2) parts of several.
@pytest.mark.parametrize(
    ("backend", "devices", "lanes"),
    [
        ("vmap", 1, 5),
        ("pmap", 2, 3),
        pytest.param("shard_map", 1, 1, marks=pytest.mark.slow),
        pytest.param("shard_map", 3, 1, marks=pytest.mark.slow),
        ("shard_map", 3, 2),
        pytest.param("shard_map", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_collectives_match_numpy(backend, devices, lanes):
    inputs = make_inputs(devices * lanes)
    assert_all_match(
        over_workers(call_all_collectives, inputs, backend, devices), inputs
    )


@pytest.mark.parametrize(
    ("map_workers", "workers"),
    [
        (lambda program: jax.pmap(program, axis_name="batch"), 3),
        (lambda program: jax.jit(jax.vmap(program, axis_name="batch")), 6),
    ],
    ids=["pmap", "vmap"],
)
def test_collectives_take_one_axis_name(map_workers, workers):
    inputs = make_inputs(workers)
    result = map_workers(partial(call_all_collectives, axis="batch"))(inputs)
    assert_all_match(jax.tree.map(np.asarray, result), inputs)


@pytest.mark.parametrize("lanes", [7, 300])  # by a sum, and in a loop
def test_short_floats_of_lanes_are_summed_before_they_are_rounded(lanes):
    """Rounded after each of 300 additions, the sum of ones in bfloat16 stops at 256."""
    normal_values = np.random.default_rng(0).normal(1, 0.3, size=(lanes, 1000))
    values = np.asarray(normal_values.astype(jnp.bfloat16))
    result = over_workers(
        lambda x: (collectives.mean(x), collectives.group_mean(x, 1)), values, "vmap", 1
    )
    exact = np.broadcast_to(values.astype(np.float64).mean(0), values.shape)
    rounded_once = 0.51 * float(jnp.finfo(jnp.bfloat16).eps)
    for means in result:
        np.testing.assert_allclose(np.float64(means), exact, rtol=rounded_once)


@pytest.mark.parametrize(("backend", "devices"), [("vmap", 1), ("pmap", 2)])
def test_a_mean_of_short_floats_fits_where_their_sum_does_not(backend, devices):
    def take_means(x: jax.Array) -> tuple[jax.Array, ...]:
        world_means = (
            collectives.mean(x),
            collectives.agreed(x),
            _topology.mix(x, *exchange),
        )
        return *world_means, collectives.group_mean(x, 2)

    exchange = _topology.check("gossip", "exponential"), 0, collectives.WORKERS
    x = np.repeat(np.float16([[60_000, 1, 60_000]]), 4, 0) * [1, 1, -1]
    x[::2, 2] *= -1  # two of four workers are far apart from the others
    for means in over_workers(take_means, np.float16(x), backend, devices):
        np.testing.assert_array_equal(means, x * np.float16([1, 1, 0]))


def test_lanes_are_summed_in_the_form_of_the_devices_that_will_do_it():
    lanes = jnp.ones((1, 4, collectives.SUMMED))

    def trace(platform: str) -> str:
        device = AbstractDevice("kind", num_cores=1, platform=platform)
        mesh = AbstractMesh((1,), ("devices",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            over_lanes = jax.vmap(collectives.mean, axis_name="lanes")
            over_devices = jax.vmap(over_lanes, axis_name="devices")
            return str(jax.make_jaxpr(lambda x: over_devices(x))(lanes))

    assert "while" in trace("cpu") or "scan" in trace("cpu")
    assert "while" not in trace("tpu") and "scan" not in trace("tpu")


def test_groups_that_do_not_divide_the_workers_are_refused():
    values = np.zeros((6, 1), np.float32)
    with pytest.raises(ValueError, match="6 workers do not divide into 4 groups"):
        over_workers(lambda x: collectives.group_mean(x, 4), values, "vmap", 1)


def test_agreed_value_is_kept_bit_for_bit():
    value = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    values = np.broadcast_to(value, (7, 1000))
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


@pytest.mark.parametrize(
    ("groups", "sizes"), [(4, (4, 2)), (4, (2, 4)), (2, (2, 2, 2))]
)
def test_group_mean_runs_over_vmapped_axes_of_ones_own(groups, sizes):
    names = ("a", "b", "c")[: len(sizes)]

    def function(x):
        return collectives.group_mean((x, jnp.int32(x)), groups, names)

    for name in reversed(names):
        function = jax.vmap(function, axis_name=name)
    values = np.arange(8.0, dtype=np.float32)
    means, integers = jax.jit(function)(values.reshape(sizes))
    expected = np.repeat(values.reshape(groups, -1).mean(1), 8 // groups)
    np.testing.assert_array_equal(np.ravel(means), expected)
    np.testing.assert_array_equal(np.ravel(integers), values)
    assert integers.dtype == jnp.int32
