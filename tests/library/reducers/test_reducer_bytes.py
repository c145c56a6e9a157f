"""Bytes of reducers: `communication` against hand counts and XLA's programs.

A ring all-reduce sends 2 (N-1)/N times the array, an all-gather (N-1) times the part
that a worker has, an all-to-all (N-1)/N of the array.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.mapped_workers import spread
from support.tiers import tiers

import syncalgos
from syncalgos import reducers
from syncalgos._engine.placement.make_layout import Placement, make_layout
from syncalgos._engine.program import Inputs

SHAPES = {"bias": (7,), "embedding": (300, 12), "kernel": (16, 24), "scale": ()}
SIZES = [7, 3600, 384, 1]
ROWS = 20  # of the embedding
# Bytes that a worker sends, by collective.
Bytes = Mapping[str, Fraction | int]


def make_params(dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in SHAPES.items()}


def count_all_reduce(n: int, size: int) -> Bytes:
    return {"all_reduce": Fraction(2 * (n - 1), n) * size}


def count_all_gather(n: int, part: int) -> Bytes:
    return {"all_gather": Fraction(n - 1) * part}


def count_all_to_all(n: int, array: int) -> Bytes:
    return {"all_to_all": Fraction(n - 1, n) * array}


def add_up(parts: Iterable[Bytes]) -> Bytes:
    """Adds up bytes by collective, without collectives of no bytes."""
    sums = collections.Counter()
    for part in parts:
        sums.update(part)
    return {kind: size for kind, size in sums.items() if size}


def count_in_parts(n: int, code: Callable[[int], int]) -> Iterator[Bytes]:
    """Each worker averages a part of each leaf, coded in so many bytes, for all."""
    for size in SIZES:
        part = math.ceil(size / n)
        yield count_all_to_all(n, n * code(part))
        yield count_all_gather(n, code(part))


def count_plain_parts(n: int) -> Iterator[Bytes]:
    """Each worker combines a part of each leaf, and sends the result to all."""
    return count_in_parts(n, lambda entries: 4 * entries)


def count_clipped(n: int) -> Iterator[Bytes]:
    yield from count_plain_parts(n)
    yield count_all_reduce(n, 4 * n)  # each worker's distance, squared


def count_tally(n: int) -> Iterator[Bytes]:
    for part in (math.ceil(size / n) for size in SIZES):
        yield count_all_to_all(n, n * math.ceil(part / 8))
        yield count_all_gather(n, part)  # a count of votes is a byte


def count_block_bytes(bits: int, entries: int) -> int:
    """Blocks of at most 512 entries with one float32 scale, in whole bytes."""
    blocks = math.ceil(entries / 512)
    return blocks * (math.ceil(math.ceil(entries / blocks) * bits / 8) + 4)


def count_chosen(density: float) -> list[int]:
    return [math.ceil(density * size) for size in SIZES]


def count_row_sparse(n: int) -> Iterator[Bytes]:
    yield count_all_gather(n, ROWS * 4)  # their numbers
    yield count_all_gather(n, ROWS * 12 * 4)
    yield count_all_reduce(n, (7 + 384 + 1) * 4)


def count_power_sgd(n: int) -> Iterator[Bytes]:
    yield count_all_reduce(n, 4 * 3 * (300 + 12))  # rank 3, float32
    yield count_all_reduce(n, 4 * 3 * (16 + 24))
    yield count_all_reduce(n, 4 * (7 + 1))


def name_tables(tree: Any) -> dict[str, str | bool]:
    return {name: name == "embedding" and "table" for name in tree}


# The reducer for an axis, and the bytes that each of n workers sends at a step.
CASES = {
    "mean": (reducers.mean, lambda n: [count_all_reduce(n, 4 * s) for s in SIZES]),
    "mean-bfloat16": (
        functools.partial(reducers.mean, jnp.bfloat16),
        lambda n: [count_all_reduce(n, 2 * s) for s in SIZES],
    ),
    "bf16": (reducers.bf16, lambda n: count_in_parts(n, lambda entries: 2 * entries)),
    "int4": (
        functools.partial(reducers.quantized, 4),
        lambda n: count_in_parts(n, functools.partial(count_block_bytes, 4)),
    ),
    "sign": (  # and a float32 scale
        reducers.sign,
        lambda n: [count_all_gather(n, math.ceil(s / 8) + 4) for s in SIZES],
    ),
    "majority": (
        functools.partial(reducers.sign, True),
        lambda n: count_in_parts(n, lambda entries: math.ceil(entries / 8)),
    ),
    "tally": (reducers.tally, count_tally),
    "top_k": (  # float32 values and indices of 16 bits
        functools.partial(reducers.top_k, 0.3),
        lambda n: [count_all_gather(n, (4 + 2) * k) for k in count_chosen(0.3)],
    ),
    "top_k-int2": (
        functools.partial(reducers.top_k, 0.3, bits=2),
        lambda n: [
            count_all_gather(n, count_block_bytes(2, k) + 2 * k)
            for k in count_chosen(0.3)
        ],
    ),
    "random_k": (
        functools.partial(reducers.random_k, 0.3),
        lambda n: [count_all_reduce(n, 4 * k) for k in count_chosen(0.3)],
    ),
    "row_sparse": (
        functools.partial(reducers.row_sparse, ROWS, tables=name_tables),
        count_row_sparse,
    ),
    "power_sgd": (functools.partial(reducers.power_sgd, 3), count_power_sgd),
    "median": (reducers.median, count_plain_parts),
    "clipped": (reducers.clipped, count_clipped),
    "low_bit": (
        reducers.low_bit,
        lambda n: count_in_parts(n, functools.partial(count_block_bytes, 4)),
    ),
    "ef21": (
        lambda **axis: reducers.ef21(functools.partial(reducers.random_k, 0.3), **axis),
        lambda n: [count_all_reduce(n, 4 * k) for k in count_chosen(0.3)],
    ),
}
WITHOUT_FEEDBACK = ("median", "clipped", "low_bit", "ef21")


def count_bytes(
    strategy: syncalgos.Strategy,
    workers: int,
    steps: int = 1,
    dtype: Any = jnp.float32,
    **settings: Any,
) -> syncalgos.Communication:
    return syncalgos.communication(
        strategy, make_params(dtype), workers=workers, steps=steps, **settings
    )


def list_bytes_by_kind(counts: syncalgos.Communication) -> dict[str, float]:
    return {kind: part.bytes_per_worker for kind, part in counts.by_collective.items()}


@pytest.mark.parametrize("name", CASES)
def test_bytes_match_a_hand_count_along_an_axis_of_ones_own(name):
    make, expected = CASES[name]
    reducer = make() if name in WITHOUT_FEEDBACK else reducers.error_feedback(make())
    step_bytes = add_up(expected(3))
    counts = count_bytes(syncalgos.reduce_with(reducer, axis="batch"), 3, steps=3)
    assert list_bytes_by_kind(counts) == {
        kind: float(3 * size) for kind, size in step_bytes.items()
    }
    assert counts.bytes_per_worker == float(3 * sum(step_bytes.values()))
    assert counts.syncs == 3


# Values in their own dtype, but for those that send float32, or levels and scales.
@pytest.mark.parametrize(
    ("reducer", "bytes_sent"),
    [
        (reducers.mean(), count_all_reduce(2, 2 * sum(SIZES))),
        (reducers.mean(jnp.float32), count_all_reduce(2, 4 * sum(SIZES))),
        (reducers.bf16(), add_up(CASES["bf16"][1](2))),
        (reducers.quantized(4), add_up(CASES["int4"][1](2))),
        (reducers.top_k(0.3), count_all_gather(2, (2 + 2) * sum(count_chosen(0.3)))),
        (reducers.random_k(0.3), count_all_reduce(2, 2 * sum(count_chosen(0.3)))),
        (reducers.power_sgd(3), count_all_reduce(2, 4 * 3 * (312 + 40) + 2 * 8)),
        (reducers.error_feedback("mean"), count_all_reduce(2, 4 * sum(SIZES))),
    ],
    ids=["mean", "wide", "bf16", "int4", "top_k", "random_k", "power_sgd", "feedback"],
)
def test_bfloat16_gradients_have_these_bytes(reducer, bytes_sent):
    counts = count_bytes(syncalgos.reduce_with(reducer), 2, dtype=jnp.bfloat16)
    assert list_bytes_by_kind(counts) == {
        kind: float(x) for kind, x in bytes_sent.items()
    }


def test_outer_step_sends_float32_at_syncs_alone():
    outer_step = syncalgos.outer_step(optax.sgd(0.7), "mean")
    counts = count_bytes(syncalgos.every(outer_step, 4), 3, steps=9, dtype=jnp.bfloat16)
    sync_bytes = float(2 * sum(SIZES) * Fraction(4, 3) * 2)
    step_bytes = np.diff(counts.per_step, prepend=0)
    np.testing.assert_allclose(
        step_bytes, sync_bytes * np.isin(np.arange(9), [3, 7]), 1e-12
    )


def read_compiled_bytes(reducer: Any) -> dict[str, int]:
    """Operand bytes by collective of a step, as XLA compiles it for two CPU devices."""
    layout = make_layout(2, "shard_map", Placement(range(2)))  # a lane on each

    def program(worker_values: Any, shared: Any) -> Any:
        return reducer.update(worker_values, reducer.init(worker_values), step=3)[0]

    worker_values = {
        k: np.zeros((2, 1, *shape), np.float32) for k, shape in SHAPES.items()
    }
    text = spread(layout, program).lower(worker_values, Inputs(())).compile().as_text()
    sums = collections.Counter()
    for line in text.splitlines():
        kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
        match = re.search(rf" = (.*?) ({kinds})[a-z-]*\(", line)
        if match:
            result, kind = match.groups()
            for bits, shape in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", result):
                entries = math.prod(int(x) for x in shape.split(",") if x)
                sums[kind.replace("-", "_")] += entries * int(bits) // 8
    sums["all_gather"] //= 2  # its operand is the half of its result
    return {kind: size for kind, size in sums.items() if size}


# Each collective and kind of message; arrays of one kind may travel in one instruction,
# but all travel. On a CPU bfloat16 sums are widened to float32.
@pytest.mark.parametrize(
    "name", tiers(["mean", "int4", "row_sparse"], ["mean", "row_sparse"])
)
def test_compiled_collectives_have_the_operands_that_are_counted(name):
    reducer = CASES[name][0]()
    counted = list_bytes_by_kind(count_bytes(syncalgos.reduce_with(reducer), 2))
    # Of its operand a worker of two sends all, but in an all-to-all half.
    operand_ratio = {"all_to_all": 2}
    operands = {
        kind: size * operand_ratio.get(kind, 1) for kind, size in counted.items()
    }
    assert read_compiled_bytes(reducer) == operands
