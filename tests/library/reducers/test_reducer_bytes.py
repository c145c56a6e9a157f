"""Bytes of reducers: `communication` against hand counts and XLA's programs.

A ring all-reduce sends 2 (N-1)/N times the array, an all-gather (N-1) times the part
that a worker has, an all-to-all (N-1)/N of the array.
"""

import collections
import functools
import math
import re
from fractions import Fraction

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


def params(dtype=jnp.float32):
    return {k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in SHAPES.items()}


def all_reduce(n, size):
    return {"all_reduce": Fraction(2 * (n - 1), n) * size}


def all_gather(n, part):
    return {"all_gather": Fraction(n - 1) * part}


def all_to_all(n, array):
    return {"all_to_all": Fraction(n - 1, n) * array}


def total(parts):
    """Adds up bytes by collective, without collectives of no bytes."""
    sums = collections.Counter()
    for part in parts:
        sums.update(part)
    return {kind: size for kind, size in sums.items() if size}


def in_parts(n, code):
    """Each worker averages a part of each leaf, coded in so many bytes, for all."""
    for size in SIZES:
        part = math.ceil(size / n)
        yield all_to_all(n, n * code(part))
        yield all_gather(n, code(part))


def plainly(n):
    """Each worker combines a part of each leaf, and sends the result to all."""
    return in_parts(n, lambda entries: 4 * entries)


def clipped_bytes(n):
    yield from plainly(n)
    yield all_reduce(n, 4 * n)  # each worker's distance, squared


def tally_bytes(n):
    for part in (math.ceil(size / n) for size in SIZES):
        yield all_to_all(n, n * math.ceil(part / 8))
        yield all_gather(n, part)  # a count of votes is a byte


def levels(bits, entries):
    """Blocks of at most 512 entries with one float32 scale, in whole bytes."""
    blocks = math.ceil(entries / 512)
    return blocks * (math.ceil(math.ceil(entries / blocks) * bits / 8) + 4)


def chosen(density):
    return [math.ceil(density * size) for size in SIZES]


def row_sparse_bytes(n):
    yield all_gather(n, ROWS * 4)  # their numbers
    yield all_gather(n, ROWS * 12 * 4)
    yield all_reduce(n, (7 + 384 + 1) * 4)


def power_sgd_bytes(n):
    yield all_reduce(n, 4 * 3 * (300 + 12))  # rank 3, float32
    yield all_reduce(n, 4 * 3 * (16 + 24))
    yield all_reduce(n, 4 * (7 + 1))


def table(tree):
    return {name: name == "embedding" and "table" for name in tree}


# The reducer for an axis, and the bytes that each of n workers sends at a step.
CASES = {
    "mean": (reducers.mean, lambda n: [all_reduce(n, 4 * s) for s in SIZES]),
    "mean-bfloat16": (
        functools.partial(reducers.mean, jnp.bfloat16),
        lambda n: [all_reduce(n, 2 * s) for s in SIZES],
    ),
    "bf16": (reducers.bf16, lambda n: in_parts(n, lambda entries: 2 * entries)),
    "int4": (
        functools.partial(reducers.quantized, 4),
        lambda n: in_parts(n, functools.partial(levels, 4)),
    ),
    "sign": (  # and a float32 scale
        reducers.sign,
        lambda n: [all_gather(n, math.ceil(s / 8) + 4) for s in SIZES],
    ),
    "majority": (
        functools.partial(reducers.sign, True),
        lambda n: in_parts(n, lambda entries: math.ceil(entries / 8)),
    ),
    "tally": (reducers.tally, tally_bytes),
    "top_k": (  # float32 values and indices of 16 bits
        functools.partial(reducers.top_k, 0.3),
        lambda n: [all_gather(n, (4 + 2) * k) for k in chosen(0.3)],
    ),
    "top_k-int2": (
        functools.partial(reducers.top_k, 0.3, bits=2),
        lambda n: [all_gather(n, levels(2, k) + 2 * k) for k in chosen(0.3)],
    ),
    "random_k": (
        functools.partial(reducers.random_k, 0.3),
        lambda n: [all_reduce(n, 4 * k) for k in chosen(0.3)],
    ),
    "row_sparse": (
        functools.partial(reducers.row_sparse, ROWS, tables=table),
        row_sparse_bytes,
    ),
    "power_sgd": (functools.partial(reducers.power_sgd, 3), power_sgd_bytes),
    "median": (reducers.median, plainly),
    "clipped": (reducers.clipped, clipped_bytes),
    "low_bit": (reducers.low_bit, lambda n: in_parts(n, functools.partial(levels, 4))),
    "ef21": (
        lambda **axis: reducers.ef21(functools.partial(reducers.random_k, 0.3), **axis),
        lambda n: [all_reduce(n, 4 * k) for k in chosen(0.3)],
    ),
}
UNFED = ("median", "clipped", "low_bit", "ef21")


def count(strategy, workers, steps=1, dtype=jnp.float32, **rest):
    return syncalgos.communication(
        strategy, params(dtype), workers=workers, steps=steps, **rest
    )


def by_kind(sent):
    return {kind: part.bytes_per_worker for kind, part in sent.by_collective.items()}


@pytest.mark.parametrize("name", CASES)
def test_bytes_match_a_hand_count_along_an_axis_of_ones_own(name):
    make, expected = CASES[name]
    reducer = make() if name in UNFED else reducers.error_feedback(make())
    a_step = total(expected(3))
    sent = count(syncalgos.reduce_with(reducer, axis="batch"), 3, steps=3)
    assert by_kind(sent) == {kind: float(3 * size) for kind, size in a_step.items()}
    assert sent.bytes_per_worker == float(3 * sum(a_step.values()))
    assert sent.syncs == 3


# Values in their own dtype, but for those that send float32, or levels and scales.
@pytest.mark.parametrize(
    ("reducer", "bytes_sent"),
    [
        (reducers.mean(), all_reduce(2, 2 * sum(SIZES))),
        (reducers.mean(jnp.float32), all_reduce(2, 4 * sum(SIZES))),
        (reducers.bf16(), total(CASES["bf16"][1](2))),
        (reducers.quantized(4), total(CASES["int4"][1](2))),
        (reducers.top_k(0.3), all_gather(2, (2 + 2) * sum(chosen(0.3)))),
        (reducers.random_k(0.3), all_reduce(2, 2 * sum(chosen(0.3)))),
        (reducers.power_sgd(3), all_reduce(2, 4 * 3 * (312 + 40) + 2 * 8)),
        (reducers.error_feedback("mean"), all_reduce(2, 4 * sum(SIZES))),
    ],
    ids=["mean", "wide", "bf16", "int4", "top_k", "random_k", "power_sgd", "feedback"],
)
def test_bfloat16_gradients_are_sent_as(reducer, bytes_sent):
    sent = count(syncalgos.reduce_with(reducer), 2, dtype=jnp.bfloat16)
    assert by_kind(sent) == {kind: float(x) for kind, x in bytes_sent.items()}


def test_outer_step_sends_float32_at_syncs_alone():
    outer = syncalgos.outer_step(optax.sgd(0.7), "mean")
    sent = count(syncalgos.every(outer, 4), 3, steps=9, dtype=jnp.bfloat16)
    at_a_sync = float(2 * sum(SIZES) * Fraction(4, 3) * 2)
    moved = np.diff(sent.per_step, prepend=0)
    np.testing.assert_allclose(moved, at_a_sync * np.isin(np.arange(9), [3, 7]), 1e-12)


def compiled_bytes(reducer):
    """Operand bytes by collective of a step, as XLA compiles it for two CPU devices."""
    layout = make_layout(2, "shard_map", Placement(range(2)))  # a lane on each

    def program(own, shared):
        return reducer.update(own, reducer.init(own), step=3)[0]

    own = {k: np.zeros((2, 1, *shape), np.float32) for k, shape in SHAPES.items()}
    text = spread(layout, program).lower(own, Inputs(())).compile().as_text()
    sums = collections.Counter()
    for line in text.splitlines():
        kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
        found = re.search(rf" = (.*?) ({kinds})[a-z-]*\(", line)
        if found:
            result, kind = found.groups()
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
    counted = by_kind(count(syncalgos.reduce_with(reducer), 2))
    # Of its operand a worker of two sends all, but in an all-to-all half.
    share = {"all_to_all": 2}
    operands = {kind: size * share.get(kind, 1) for kind, size in counted.items()}
    assert compiled_bytes(reducer) == operands
