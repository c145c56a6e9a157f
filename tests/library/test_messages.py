"""Arrays joined and cut for the way between processes arrive as they were."""

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiers

import syncalgos as sa
from syncalgos import collectives
from syncalgos._keys import uniform
from syncalgos.collectives import _messages

DEVICES = 2
LANES = 3
DTYPES = jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16, jnp.complex64, jnp.uint8


@pytest.fixture
def between_processes(monkeypatch):
    """Has all collectives go as between processes, in small messages."""

    def only(message, bucket):
        monkeypatch.setattr(_messages, "MESSAGE", message)
        monkeypatch.setattr(_messages, "BUCKET", bucket)
        monkeypatch.setattr(_messages, "crosses", lambda names: True)

    return only


def leaves() -> list[jax.Array]:
    """One tree a worker, with leaves of no, one and many entries."""
    rng = np.random.default_rng(0)
    shapes = [(), (0, 3), (1,), (2,), (2, 3), (3,), (5,)]
    return [
        jnp.asarray(rng.integers(0, 2, (DEVICES, LANES, *shape)) * 3, dtype)
        for shape, dtype in zip(shapes, [*DTYPES, DTYPES[0]], strict=True)
    ]


def map_workers(function: Callable, tree: Any, map_devices: Callable = jax.pmap) -> Any:
    over_lanes = jax.vmap(function, axis_name="lanes")
    # Collectives of two programs in flight on CPU devices may wait for each other.
    return jax.block_until_ready(map_devices(over_lanes, axis_name="devices")(tree))


def rows(x: jax.Array) -> jax.Array:
    """A row for each worker, which differ."""
    count = jnp.arange(DEVICES * LANES).reshape(-1, *[1] * x.ndim).astype(x.dtype)
    return x[None] + count


MOVES = {
    "gather": collectives.gather,
    "shift": lambda tree: collectives.shift(tree, by=1),
    "far shift": lambda tree: collectives.shift(tree, by=4),
    "exchange": lambda tree: collectives.exchange(tree, sources=[[1, 2, 3, 4, 5, 0]]),
    "all_to_all": lambda tree: collectives.all_to_all(jax.tree.map(rows, tree)),
    "mean": collectives.mean,
}


# A program each: XLA for CPUs mixed up, rarely, the collectives of one with all.
@pytest.mark.parametrize("name", tiers(MOVES, ["mean"]))
def test_joined_and_cut_arrays_arrive_as_they_were(between_processes, name):
    tree = leaves()
    move = MOVES[name]
    plain = map_workers(move, tree, jax.vmap)
    for message, bucket in [(20, 16), (10_000, 10_000)]:
        between_processes(message, bucket)
        moved = map_workers(move, tree)
        for x, expected in zip(*map(jax.tree.leaves, (moved, plain)), strict=True):
            assert x.dtype == expected.dtype
            np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_moves_of_floats_are_joined_bytes(between_processes, dtype):
    between_processes(10_000, 10_000)
    tree = [jnp.ones((DEVICES, LANES, 3), dtype), jnp.ones((DEVICES, LANES), dtype)]
    over_lanes = jax.vmap(collectives.gather, axis_name="lanes")
    program = str(jax.make_jaxpr(jax.vmap(over_lanes, axis_name="devices"))(tree))
    assert f"u8[{DEVICES},{LANES * 4 * jnp.dtype(dtype).itemsize}]" in program


def test_empty_trees_and_keys_are_moved_between_processes(between_processes):
    between_processes(10_000, 10_000)
    keys = jax.random.split(jax.random.key(0), (DEVICES, LANES))
    moved = map_workers(lambda key: collectives.shift([(), key], 1), keys)[1]
    expected = jnp.roll(keys.reshape(-1), -1).reshape(keys.shape)
    np.testing.assert_array_equal(*map(jax.random.key_data, (moved, expected)))
    assert map_workers(lambda key: collectives.gather(()), keys) == ()


@pytest.mark.parametrize("name", ["sync_sgd", "quantized_sgd", "gossip"])
def test_messages_send_the_same_bytes(between_processes, name):
    params = {"w": jnp.ones((40, 5)), "b": jnp.ones(5)}
    strategy = getattr(sa, name)()
    plain_counts = sa.communication(strategy, params, workers=4, steps=3)
    between_processes(64, 10_000)
    cut_counts = sa.communication(strategy, params, workers=4, steps=3)
    assert cut_counts.bytes_per_worker == plain_counts.bytes_per_worker
    assert set(cut_counts.by_collective) == set(plain_counts.by_collective)
    assert cut_counts.calls != plain_counts.calls


def test_powersgd_calls_twice_between_processes(between_processes):
    params = [jnp.ones((40, 30)), jnp.ones((30, 40)), jnp.ones(5)]
    between_processes(40_000, 2**20)
    assert sa.communication(sa.powersgd(), params, workers=4, steps=3).calls == 2 * 3


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=8)
)
def test_buckets_hold_each_leaf_once_and_one_dtype(sizes_and_dtypes):
    arrays = [np.zeros(size, dtype) for size, dtype in sizes_and_dtypes]
    buckets = _messages.buckets(arrays)
    assert sorted(itertools.chain(*buckets)) == [*range(len(arrays))]
    for bucket in buckets:
        assert len({arrays[i].dtype for i in bucket}) == 1


@pytest.mark.parametrize("count", [0, 1, 5, 1001])
def test_uniform_numbers_are_those_of_jax(count):
    for key in (jax.random.key(3), jax.random.fold_in(jax.random.key(0), 7)):
        expected = jax.random.uniform(key, (count,))
        np.testing.assert_array_equal(
            jax.jit(uniform, static_argnums=1)(key, count), expected
        )


def test_keys_of_another_kind_draw_by_jax():
    key = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(uniform(key, 9), jax.random.uniform(key, (9,)))
