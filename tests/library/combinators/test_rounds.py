"""Rounds of fixed or scheduled length end where a loop in Python says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos
from syncalgos import Replica, Strategy, average, bmuf, communication, every
from syncalgos.combinators.schedule import TABLED

MARK = Strategy(
    sync=lambda replica, state, step: (replica._replace(params=step), state)
)


def ends_seen(strategy, steps, first=0):
    """The local steps from `first` on at which MARK, so combined, is applied."""

    def local_step(replica, step):
        replica, _ = strategy.sync(Replica(jnp.int32(-1)), (), step)
        return replica, replica.params == step

    numbers = jnp.arange(first, first + steps, dtype=jnp.int32)
    _, acted = jax.jit(lambda: jax.lax.scan(local_step, Replica(numbers[0]), numbers))()
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
    assert ends_seen(every(length, MARK), 200) == expected


@pytest.mark.parametrize("endless", [math.inf, math.nan])
def test_round_of_infinite_or_undefined_length_does_not_end(endless):
    schedule = every(lambda s: jnp.where(s < 20, 6.0, endless), MARK)
    assert ends_seen(schedule, 500) == [5, 11, 17, 23]
    assert ends_seen(schedule, 100, first=TABLED + 500) == []


def test_minus_infinity_is_a_round_of_one_step():
    schedule = every(lambda s: jnp.where(s < 6, 3, -jnp.inf), MARK)
    assert ends_seen(schedule, 12) == [2, 5, 6, 7, 8, 9, 10, 11]


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
    assert ends_seen(every(length, MARK), steps, first) == expected


def test_round_longer_than_the_table_ends():
    strategy = every(lambda s: TABLED + 1000, MARK)
    assert ends_seen(strategy, 3000, first=TABLED - 1000) == [TABLED + 999]
    assert ends_seen(strategy, 10, first=2 * TABLED + 1995) == [2 * TABLED + 1999]


def test_rounds_do_not_depend_on_where_training_resumes():
    strategy = every(SCHEDULES["growing"], MARK)
    whole = ends_seen(strategy, 150)
    for first in (1, 37, 38, 100):
        resumed = ends_seen(strategy, 150 - first, first)
        assert resumed == [end for end in whole if end >= first]


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_every_with_an_offset_acts_after_it_and_each_period_later(offset):
    after_steps = range(offset or 5, 31, 5)  # counted from 1
    ends = [step - 1 for step in after_steps]
    assert ends_seen(every(5, MARK, offset=offset), 30) == ends


def test_period_and_schedule_can_be_nested():
    """Every second step that ends a round: those at odd steps."""
    nested = every(2, every(lambda s: 3, MARK))
    assert ends_seen(nested, 20) == [5, 11, 17]


@pytest.mark.parametrize(
    ("period", "offset"),
    [(SCHEDULES["growing"], 0), (SCHEDULES["never ending from a step on"], 0), (5, 2)],
)
def test_communication_counts_the_ends_of_rounds(period, offset):
    params = {"w": np.zeros((4, 4), np.float32)}
    sent = communication(every(period, average(), offset), params, 2, steps=100)
    moved = np.diff(sent.per_step, prepend=0)
    ends = ends_seen(every(period, MARK, offset), 100)
    assert np.flatnonzero(moved).tolist() == ends
    assert set(moved[ends]) == {64}  # a ring of two sends all once
    assert sent.syncs == len(ends)


def test_scheduled_rounds_compile_once():
    """Whatever their lengths, and wherever a dispatch starts."""
    asked = []

    def length(start):
        asked.append(start)
        return 1 + start // 3

    trainer = syncalgos.DataParallel(
        syncalgos.stateless(lambda params, batch: jnp.mean(params["w"] * batch)),
        optax.sgd(0.1),
        every(length, bmuf(1)),
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
        (lambda: every(5, MARK, offset=5), "offset must be below the period of 5"),
        (lambda: every(5, MARK, offset=-1), "every: offset must be .* at least 0"),
        (lambda: every(5, MARK, offset=0.5), "every: offset must be a whole number"),
        (lambda: every(lambda s: 5, MARK, offset=1), "a schedule takes no offset"),
        (lambda: every(lambda s: 5, bmuf), "every: expected a Strategy"),
        (lambda: every(0.5, MARK), "period must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
