"""Rounds of fixed or scheduled length end where a loop in Python says."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import syncalgos as sa
from syncalgos._combinators import introspection
from syncalgos.steps import TABLED

MARK = sa.Strategy(
    sync=lambda replica, state, step: (replica._replace(params=step), state)
)


def find_ends(
    strategies: dict[str, sa.Strategy], steps: Iterable[int]
) -> dict[str, list[int]]:
    """Returns the local steps at which MARK, so combined, is applied: by name.

    All in one program, as each would take as long to compile.
    """

    def local_step(nothing: tuple[()], step: jax.Array) -> tuple[Any, Any]:
        is_marked = {}
        for name, strategy in strategies.items():
            unmarked = sa.Replica(jnp.int32(-1))
            state = strategy.init(())
            replica, _ = strategy.sync(unmarked, state, step)
            is_marked[name] = replica.params == step
        return nothing, is_marked

    numbers = np.array([*steps], np.int32)
    _, is_marked = jax.jit(lambda: jax.lax.scan(local_step, (), numbers))()
    return {name: numbers[x].tolist() for name, x in is_marked.items()}


def walk_rounds(length: Callable[[int], Any], steps: Sequence[int]) -> list[int]:
    """The same, by going through all rounds: each is asked for at its first step."""
    ends = []
    start = 0
    while start <= steps[-1]:
        start += max(1, math.floor(length(start)))
        ends.append(start - 1)
    return sorted({*ends} & {*steps})


# All but `growing in jax` are plain arithmetic, for steps of Python and of JAX alike.
SCHEDULES = {
    "of one step": lambda s: 1,
    "growing": lambda s: 1 + s // 5,
    "growing in jax": lambda s: jnp.where(s < 50, 2, jnp.sqrt(s * 1.0) + 0.01),
    "shrinking": lambda s: 20 - s / 8,
    "jumping down": lambda s: 30 - 27 * (s >= 60),
    "not whole": lambda s: 2.75 + s / 64,
    "below one, then growing": lambda s: (s - 20) / 4,
    "never ending from a step on": lambda s: 5 + (s > 50) * 1e30,
    "beyond all integers": lambda s: 5.0 * 2.0 ** (s // 2),
}


BEYOND = {
    "growing slowly": lambda s: 1 + s // 500,
    "shrinking slowly": lambda s: 1000 - s // 100,
    "jumping": lambda s: 2 + 40 * (s >= 65500),
    "a little longer": lambda s: 2.75 + s / 4096,
    "beyond the table": lambda s: 70000 - s // 2,
    "longer than the table": lambda s: TABLED + 1000,
    "varied": lambda s: 1 + s % 7 % 4,
}


@pytest.mark.slow
def test_scheduled_rounds_end_after_as_many_steps_as_asked_at_their_start():
    """Within the table and beyond it."""
    late_steps = [
        *range(TABLED - 200, TABLED + 800),
        *range(TABLED + 4000, TABLED + 5000),
    ]
    for lengths, steps in (SCHEDULES, range(1000)), (BEYOND, late_steps):
        expected = {name: walk_rounds(x, steps) for name, x in lengths.items()}
        strategies = {name: sa.every(MARK, length) for name, length in lengths.items()}
        assert find_ends(strategies, steps) == expected


def test_round_of_infinite_or_undefined_length_does_not_end():
    """A round of minus infinity steps has one, as all that are too short."""
    strategies = {
        name: sa.every(MARK, lambda s, x=float(name): jnp.where(s < 20, 6.0, x))
        for name in ("inf", "nan", "-inf")
    }
    beyond = [*range(TABLED + 500, TABLED + 600)]
    ends = [5, 11, 17, 23]
    assert find_ends(strategies, [*range(500), *beyond]) == {
        "inf": ends,
        "nan": ends,
        "-inf": [*ends, *range(24, 500), *beyond],
    }


def test_conditions_periods_and_phases_act_at_their_steps():
    """On the clock of all local steps, which no phase starts anew."""
    strategies = {
        "every": sa.every(MARK, 7),
        "every step": sa.every(MARK, 1),
        "offset": sa.every(MARK, 5, offset=2),
        "when": sa.when(MARK, lambda step: step % 8 == 1),
        "until": sa.until(MARK, 3),
        "after": sa.after(sa.every(MARK, 4), 3),
        "one in another": sa.every(sa.every(MARK, lambda s: 3), 2),
        "chain": sa.chain(sa.until(MARK, 2), sa.every(MARK, 9)),
    }
    assert find_ends(strategies, range(20)) == {
        "every": [6, 13],
        "every step": [*range(20)],
        "offset": [1, 6, 11, 16],
        "when": [1, 9, 17],
        "until": [0, 1, 2],
        "after": [3, 7, 11, 15, 19],
        "one in another": [5, 11, 17],
        "chain": [0, 1, 8, 17],
    }


def test_a_sync_at_the_end_is_one_more_and_no_other():
    strategies = {
        "period": sa.every(MARK, 7),
        "schedule": sa.every(MARK, lambda s: 1 + s // 5),
        "ends there": sa.every(MARK, 5),
        "offset": sa.every(MARK, 3, offset=1),
        "chain": sa.chain(sa.every(MARK, 9), sa.every(MARK, 16)),
        "condition": sa.chain(sa.when(MARK, lambda s: s < 2), sa.every(MARK, 9)),
        "phase": sa.after(sa.every(MARK, 9), 4),
    }
    ending = {name: sa.at_end(x, 20) for name, x in strategies.items()}
    assert find_ends(ending, range(20)) == {
        "period": [6, 13, 19],
        "schedule": [*range(5), 6, 8, 10, 13, 16, 19],
        "ends there": [4, 9, 14, 19],
        "offset": [0, 3, 6, 9, 12, 15, 18, 19],
        "chain": [8, 15, 17, 19],
        "condition": [0, 1, 8, 17, 19],
        "phase": [8, 17, 19],
    }
    averaged = sa.at_end(sa.ema(sa.every(MARK, 7), 0.5), 20)
    landed = [step for step in range(20) if introspection.lands(averaged, step)]
    assert landed == [6, 13, 19]


@pytest.mark.parametrize("name", ["sync_sgd", "gossip"])
def test_a_strategy_that_acts_at_every_step_needs_no_sync_at_the_end(name):
    strategy = sa.ALGORITHMS[name]()
    assert sa.at_end(strategy, 20) is strategy


def test_an_algorithm_whose_rounds_end_with_the_training_needs_no_other():
    assert sa.at_end(sa.scaffold(8, learning_rate=0.1), 16)


@pytest.mark.parametrize(
    ("period", "offset", "length"),
    [
        pytest.param(SCHEDULES["growing"], 0, SCHEDULES["growing"], id="schedule"),
        # The first round ends with the offset.
        pytest.param(5, 2, lambda step: 5 if step else 2, id="period with an offset"),
    ],
)
def test_communication_counts_the_ends_of_rounds(period, offset, length):
    params = {"w": np.zeros((4, 4), np.float32)}
    counts = sa.communication(
        sa.every(sa.average(), period, offset=offset), params, workers=2, steps=100
    )
    step_bytes = np.diff(counts.per_step, prepend=0)
    ends = walk_rounds(length, range(100))
    assert np.flatnonzero(step_bytes).tolist() == ends
    assert set(step_bytes[ends]) == {64}  # a ring of two sends all once
    assert counts.syncs == len(ends)


def test_scheduled_rounds_compile_once():
    """Whatever their lengths, and wherever a dispatch starts."""
    round_starts = []

    def length(start: jax.Array) -> jax.Array:
        round_starts.append(start)
        return 1 + start // 3

    trainer = sa.DataParallel(
        sa.stateless(lambda params, batch: jnp.mean(params["w"] * batch)),
        optax.sgd(0.1),
        sa.every(sa.bmuf(1), length),
        workers=2,
    )
    state = trainer.init({"w": np.ones(3, np.float32)})
    batches = np.ones((5, 2, 3), np.float32)
    state, _ = trainer.run(state, batches)
    seconds = trainer.compile_seconds
    num_questions = len(round_starts)
    for _ in range(3):
        state, _ = trainer.run(state, batches)
    assert trainer.compile_seconds == seconds
    assert len(round_starts) == num_questions < 20


def test_scheduled_rounds_end_in_a_map_over_some_axes_of_a_set_mesh():
    auto = (AxisType.Auto,) * 2
    rows = PartitionSpec("batch")
    mesh = jax.make_mesh((3, 1), ("batch", "fsdp"), axis_types=auto)
    strategy = sa.every(
        sa.average(axis="batch"), lambda step: jnp.where(step < 4, 2, 3)
    )

    def sync(x: jax.Array, step: jax.Array) -> jax.Array:
        return strategy.sync(sa.Replica(x), (), step)[0].params

    specs = {"in_specs": (rows, PartitionSpec()), "out_specs": rows}
    mapped = jax.shard_map(
        sync, mesh=mesh, axis_names={"batch"}, check_vma=False, **specs
    )
    with jax.set_mesh(mesh):
        params = jax.jit(mapped)(jnp.arange(3.0), 1)
    np.testing.assert_array_equal(params, 1.0)
