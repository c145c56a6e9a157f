"""Sets of local steps against the plain sets of numbers that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiers

from syncalgos.steps import ALWAYS, NEVER, NO_STEP, Every, Lengths, Span, Steps, Where

HORIZON = 120  # beyond the steps that are compared, so that `next` has an answer
COMPARED = 60


def regular(period: int, offset: int = 0) -> set[int]:
    return {step for step in range(HORIZON) if (step + 1 - offset) % period == 0}


# Each set, and the numbers that it holds.
SIMPLE = {
    "always": (ALWAYS, set(range(HORIZON))),
    "never": (NEVER, set()),
    "every 4": (Every(4), regular(4)),
    "every 6, offset 1": (Every(6, 1), regular(6, 1)),
    "every 6, offset 4": (Every(6, 4), regular(6, 4)),
    "span": (Span(5, 31), set(range(5, 31))),
    "from 9 on": (Span(9), set(range(9, HORIZON))),
    "where": (Where(lambda step: step % 7 == 2), {*range(2, HORIZON, 7)}),
    "lengths": (Lengths(lambda start: 2 + start), {1, 5, 13, 29, 61}),
    "equal lengths": (Lengths(lambda start: 1, min_gap=5), regular(5)),
}


Case = tuple[Steps, set[int]]


def alone() -> dict[str, Case]:
    """Each simple set by itself, changed, and some that are nested."""
    cases: dict[str, Case] = {}
    for name, (steps, numbers) in SIMPLE.items():
        shifted = {number + 3 for number in numbers}
        cases[name] = steps, numbers
        cases[f"not {name}"] = ~steps, set(range(HORIZON)) - numbers
        cases[f"{name} + 3"] = steps.shift(3), shifted
        cases[f"{name} + 1 + 2"] = steps.shift(1).shift(2), shifted
        cases[f"{name}, to 40"] = steps.with_last(39), numbers | {39}
    fours, in_fours = SIMPLE["every 4"]
    span, in_span = SIMPLE["span"]
    sixes, in_sixes = SIMPLE["every 6, offset 4"]
    cases["(4 | 6) & span"] = (fours | sixes) & span, (in_fours | in_sixes) & in_span
    cases["(4 & span) | 6"] = (fours & span) | sixes, (in_fours & in_span) | in_sixes
    cases["(4 & span) + 2"] = (
        (fours & span).shift(2),
        {number + 2 for number in in_fours & in_span},
    )
    cases["4 & not 8"] = fours & ~Every(8), in_fours - regular(8)
    return cases


def pairs() -> dict[str, Case]:
    """All pairs of simple sets."""
    cases: dict[str, Case] = {}
    for left_name, (left_steps, left_numbers) in SIMPLE.items():
        for right_name, (right_steps, right_numbers) in SIMPLE.items():
            cases[f"{left_name} | {right_name}"] = (
                left_steps | right_steps,
                left_numbers | right_numbers,
            )
            cases[f"{left_name} & {right_name}"] = (
                left_steps & right_steps,
                left_numbers & right_numbers,
            )
    return cases


GROUPS = tiers(["alone", "pairs"], ["alone"])


def list_cases(group: str) -> dict[str, Case]:
    return alone() if group == "alone" else pairs()


@pytest.mark.parametrize("group", GROUPS)
def test_a_set_holds_its_steps_and_finds_the_next_one(group):
    cases = list_cases(group)

    def ask(step: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        return {
            name: (jnp.asarray(steps(step)), jnp.asarray(steps.next(step)))
            for name, (steps, _) in cases.items()
        }

    answers = jax.jit(jax.vmap(ask))(np.arange(COMPARED, dtype=np.int32))
    for name, (_, numbers) in cases.items():
        belongs, following = answers[name]
        assert set(np.flatnonzero(belongs)) == {x for x in numbers if x < COMPARED}
        for step in range(COMPARED):
            later = [number for number in numbers if number >= step]
            if later:
                assert following[step] == min(later), (name, step)
            else:
                assert following[step] >= HORIZON, (name, step)


@pytest.mark.parametrize("group", GROUPS)
def test_gaps_and_periods_hold(group):
    for name, (steps, numbers) in list_cases(group).items():
        gaps = np.diff(sorted(x for x in numbers if x < HORIZON))
        assert gaps.min(initial=NO_STEP) >= steps.min_gap, name
        if steps.period and gaps.size:
            assert {*gaps.tolist()} == {steps.period}, name


@pytest.mark.parametrize("group", GROUPS)
def test_a_set_that_is_said_to_be_empty_or_full_is_so(group):
    for name, (steps, numbers) in list_cases(group).items():
        assert not (steps == NEVER and numbers), name
        assert not (steps == ALWAYS and len(numbers) < HORIZON), name


def test_regular_sets_are_put_together_by_arithmetic():
    assert Every(4) & Every(6) == Every(12)
    assert Every(4) & Every(6, 1) == NEVER
    assert Every(2) | Every(8) == Every(2)
    assert not Every(4).meets(Every(6, 3)) and Every(4).meets(Every(6, 2))
    assert (Every(4) | Every(6, 3)).min_gap == 1
    assert (Every(8, 4) | Every(8)).min_gap == 4
    assert Every(4).with_last(9).meets(Every(10))


def test_regular_sets_with_offsets_are_put_together_by_arithmetic():
    assert Every(6, 2) & Every(9, 5) == Every(18, 14)
    assert Every(6, 2) & Every(9, 4) == NEVER
    assert Every(3, 2) | Every(12, 5) == Every(3, 2)
    assert (Every(8, 3) | Every(8, 1)).min_gap == 2


def test_the_last_step_is_one_more_and_no_later_one_belongs():
    steps = Every(4).with_last(9)
    assert [step for step in range(16) if steps(step)] == [3, 7, 9, 11, 15]


def test_python_numbers_give_python_results():
    steps = (Every(4) & Span(3, 30)).shift(2) | Span(50, 51)
    assert steps(5) is True and steps(6) is False and steps.next(6) == 9
    assert isinstance(steps.next(6), int)


@pytest.mark.slow
def test_a_far_round_beyond_the_table():
    steps = Lengths(lambda start: 7)
    far = 2**16 + np.arange(50)
    belongs = jax.vmap(steps)(far)
    assert np.array_equal(belongs, (far + 1) % 7 == 0)
    assert np.array_equal(jax.vmap(steps.next)(far), jax.vmap(Every(7).next)(far))
