"""Rounds of fixed or scheduled length end where a loop in Python says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import syncalgos as sa
from syncalgos.combinators import introspection
from syncalgos.combinators.schedule import TABLED

MARK = sa.Strategy(
    sync=lambda replica, state, step: (replica._replace(params=step), state)
)


def ends_seen(strategy, steps, first=0):
    """The local steps from `first` on at which MARK, so combined, is applied."""

    def local_step(replica, step):
        replica, _ = strategy.sync(sa.Replica(jnp.int32(-1)), (), step)
        return replica, replica.params == step

    numbers = jnp.arange(first, first + steps, dtype=jnp.int32)
    _, acted = jax.jit(
        lambda: jax.lax.scan(local_step, sa.Replica(numbers[0]), numbers)
    )()
    return (first + np.flatnonzero(acted)).tolist()


def ends_by_hand(length, steps, first=0):
    """The same, by going through all rounds: each is asked for at its first step."""
    ends, start = [], 0
    while start < first + steps:
        start += max(1, math.floor(length(start)))
        ends.append(start - 1)
    return [end for end in ends if first <= end < first + steps]


# All but `growing in jax` are plain arithmetic, for steps of Python and of JAX alike.
SCHEDULES = {
    "constant": lambda s: 7,
    "of one step": lambda s: 1,
    "growing": lambda s: 1 + s // 5,
    "growing in jax": lambda s: jnp.where(s < 50, 2, jnp.sqrt(s * 1.0) + 0.01),
    "shrinking": lambda s: 20 - s / 8,
    "jumping up": lambda s: 3 + 8 * (s >= 40),
    "jumping down": lambda s: 30 - 27 * (s >= 60),
    "not whole": lambda s: 2.75 + s / 64,
    "below one": lambda s: 0.5 - s,
    "zero, then growing": lambda s: (s - 20) / 4,
    "never ending from a step on": lambda s: 5 + (s > 50) * 1e30,
    "beyond all integers": lambda s: 5.0 * 2.0 ** (s // 2),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("length", SCHEDULES.values(), ids=SCHEDULES)
def test_scheduled_rounds_end_after_as_many_steps_as_asked_at_their_start(length):
    expected = ends_by_hand(length, 200)
    assert len(expected) >= 2
    assert ends_seen(sa.every(MARK, length), 200) == expected


@pytest.mark.parametrize("endless", [math.inf, math.nan])
def test_round_of_infinite_or_undefined_length_does_not_end(endless):
    schedule = sa.every(MARK, lambda s: jnp.where(s < 20, 6.0, endless))
    assert ends_seen(schedule, 500) == [5, 11, 17, 23]
    assert ends_seen(schedule, 100, first=TABLED + 500) == []


@pytest.mark.parametrize(
    ("strategy", "ends"),
    [
        (sa.every(MARK, 7), [6, 13, 19]),
        (sa.every(MARK, lambda s: 1 + s // 5), [*range(5), 6, 8, 10, 13, 16, 19]),
        (sa.every(MARK, 5), [4, 9, 14, 19]),
        (sa.every(MARK, 3, offset=1), [0, 3, 6, 9, 12, 15, 18, 19]),
        (sa.chain(sa.every(MARK, 9), sa.every(MARK, 16)), [8, 15, 17, 19]),
        (
            sa.chain(sa.when(MARK, lambda s: s < 2), sa.every(MARK, 9)),
            [0, 1, 8, 17, 19],
        ),
        (sa.after(sa.every(MARK, 9), 4), [8, 17, 19]),
        (sa.ema(sa.every(MARK, 7), 0.5), [6, 13, 19]),
    ],
)
def test_a_sync_at_the_end_is_one_more_and_no_other(strategy, ends):
    ending = sa.at_end(strategy, 20)
    seen = [step for step in range(20) if introspection.lands(ending, step)]
    assert seen == ends
    if strategy.init({}) == ():
        assert ends_seen(ending, 20) == ends


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "then"),
    [
        (
            sa.bmuf(4, block_momentum=0.5, nesterov=True),
            sa.bmuf(2, block_momentum=0.5, nesterov=True),
        ),
        (sa.diloco(4), sa.diloco(2)),
        (sa.slowmo(4, learning_rate=0.1), sa.slowmo(2, learning_rate=0.1)),
    ],
    ids=["bmuf", "diloco", "slowmo"],
)
def test_a_sync_at_the_end_is_that_of_a_shorter_last_round(strategy, then):
    """10 local steps are two rounds of 4, then one of 2."""
    batches = np.random.default_rng(0).normal(size=(10, 6, 3)).astype(np.float32)
    loss = sa.stateless(lambda p, x: jnp.mean((x @ p["w"] - x.sum(1)) ** 2))

    def trainer(strategy):
        return sa.DataParallel(
            loss, optax.sgd(0.1), strategy, workers=3, backend="vmap"
        )

    def start():
        return trainer(strategy).init({"w": np.zeros(3, np.float32)})

    ending = trainer(sa.at_end(strategy, 10))
    state, _ = ending.run(start(), batches)
    other, _ = trainer(strategy).run(start(), batches[:8])
    other, _ = trainer(then).run(other, batches[8:])
    for x, y in zip(
        jax.tree.leaves(state.own), jax.tree.leaves(other.own), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    counted = ending.communication(state, steps=10)
    before = trainer(strategy).communication(state, steps=10)
    assert (before.syncs, counted.syncs) == (2, 3)
    assert counted.bytes_per_worker == before.bytes_per_worker * 3 / 2


@pytest.mark.parametrize("name", ["sync_sgd", "gossip", "topk_sgd"])
def test_a_strategy_that_acts_at_every_step_needs_no_sync_at_the_end(name):
    strategy = sa.ALGORITHMS[name]()
    assert sa.at_end(strategy, 20) is strategy


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (sa.scaffold(8, learning_rate=0.1), "after step 20: its rounds are not"),
        (
            sa.when(sa.average(), lambda s: s % 8 == 7),
            "after step 20: its rounds are not",
        ),
        (sa.delayed(sa.every(sa.average(), 8), 2), "last sync would not arrive"),
        (sa.dynamic_averaging(), "workers' data decide"),
        (sa.async_diloco(), "acts at every local step, as async_diloco"),
        (sa.every, "at_end: expected a Strategy"),
    ],
    ids=["scaffold", "when", "delayed", "decided", "async", "factory"],
)
def test_a_sync_at_the_end_that_has_no_meaning_is_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        sa.at_end(strategy, 20)
    if strategy is not sa.every and "rounds" in message:  # its own last sync is there
        assert sa.at_end(strategy, 16)


def test_minus_infinity_is_a_round_of_one_step():
    schedule = sa.every(MARK, lambda s: jnp.where(s < 6, 3, -jnp.inf))
    assert ends_seen(schedule, 12) == [2, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "length",
    [
        lambda s: 1 + s // 500,
        lambda s: 1000 - s // 100,
        lambda s: 2 + 40 * (s >= 65500),
        lambda s: 2.75 + s / 4096,
        lambda s: 70000 - s // 2,
        lambda s: 1 + s % 7 % 4,
    ],
    ids=["growing", "shrinking", "jumping", "not whole", "beyond the table", "varied"],
)
@pytest.mark.parametrize("first", [TABLED - 200, TABLED + 4000])
def test_scheduled_rounds_go_on_beyond_the_table(length, first):
    steps = 1000
    expected = ends_by_hand(length, steps, first)
    assert ends_seen(sa.every(MARK, length), steps, first) == expected


def test_round_longer_than_the_table_ends():
    strategy = sa.every(MARK, lambda s: TABLED + 1000)
    assert ends_seen(strategy, 3000, first=TABLED - 1000) == [TABLED + 999]
    assert ends_seen(strategy, 10, first=2 * TABLED + 1995) == [2 * TABLED + 1999]


def test_rounds_do_not_depend_on_where_training_resumes():
    strategy = sa.every(MARK, SCHEDULES["growing"])
    whole = ends_seen(strategy, 150)
    for first in (1, 37, 38, 100):
        resumed = ends_seen(strategy, 150 - first, first)
        assert resumed == [end for end in whole if end >= first]


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_every_with_an_offset_acts_after_it_and_each_period_later(offset):
    after_steps = range(offset or 5, 31, 5)  # counted from 1
    ends = [step - 1 for step in after_steps]
    assert ends_seen(sa.every(MARK, 5, offset=offset), 30) == ends


def test_period_and_schedule_can_be_nested():
    """Every second step that ends a round: those at odd steps."""
    nested = sa.every(sa.every(MARK, lambda s: 3), 2)
    assert ends_seen(nested, 20) == [5, 11, 17]


@pytest.mark.parametrize(
    ("period", "offset"),
    [(SCHEDULES["growing"], 0), (SCHEDULES["never ending from a step on"], 0), (5, 2)],
)
def test_communication_counts_the_ends_of_rounds(period, offset):
    params = {"w": np.zeros((4, 4), np.float32)}
    sent = sa.communication(
        sa.every(sa.average(), period, offset=offset), params, workers=2, steps=100
    )
    moved = np.diff(sent.per_step, prepend=0)
    ends = ends_seen(sa.every(MARK, period, offset=offset), 100)
    assert np.flatnonzero(moved).tolist() == ends
    assert set(moved[ends]) == {64}  # a ring of two sends all once
    assert sent.syncs == len(ends)


def test_scheduled_rounds_compile_once():
    """Whatever their lengths, and wherever a dispatch starts."""
    asked = []

    def length(start):
        asked.append(start)
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
    seconds, questions = trainer.compile_seconds, len(asked)
    for _ in range(3):
        state, _ = trainer.run(state, batches)
    assert trainer.compile_seconds == seconds
    assert len(asked) == questions < 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.every(MARK, 5, offset=5), "offset must be below the period of 5"),
        (lambda: sa.every(MARK, 5, offset=-1), "every: offset must be .* at least 0"),
        (lambda: sa.every(MARK, 5, offset=0.5), "every: offset must be a whole number"),
        (lambda: sa.every(MARK, lambda s: 5, offset=1), "offset must be 0 with"),
        (lambda: sa.every(sa.bmuf, lambda s: 5), "every: expected a Strategy"),
        (lambda: sa.every(MARK, 0.5), "period must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scheduled_rounds_end_in_a_map_over_some_axes_of_a_set_mesh():
    auto, rows = (AxisType.Auto,) * 2, PartitionSpec("batch")
    mesh = jax.make_mesh((3, 1), ("batch", "fsdp"), axis_types=auto)
    strategy = sa.every(
        sa.average(axis="batch"), lambda step: jnp.where(step < 4, 2, 3)
    )

    def sync(x, step):
        return strategy.sync(sa.Replica(x), (), step)[0].params

    specs = {"in_specs": (rows, PartitionSpec()), "out_specs": rows}
    mapped = jax.shard_map(
        sync, mesh=mesh, axis_names={"batch"}, check_vma=False, **specs
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(jnp.arange(3.0), 1)
    np.testing.assert_array_equal(found, 1.0)
