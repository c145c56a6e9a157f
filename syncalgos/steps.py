"""Sets of local steps: the one answer to the question "when".

A set is a function, local step -> whether the step belongs to it, so that it can be
`Strategy.acts` or the condition of `when`. Beyond that, it tells which of its steps is
the next one, and how far apart its steps are. Combinators derive their sets by

    chain: A | B      when: A & B      until, after: A & Span      at_end: with_last
    delayed: shift

Local steps count from 0; an `Every` with a period of 4 holds steps 3, 7, 11, …, so that
it acts after 4, 8, 12, … local steps.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, use_abstract_mesh

from syncalgos import checks

NO_STEP = 2**31 - 1
"""What `next` returns if no step follows; local steps are below it."""

TABLED = 2**16
"""Local steps whose rounds are in a table; later rounds are found one by one."""

LONGEST = 2**30
"""The length of a round without an end, in local steps."""

WINDOW = 64
"""The number of steps that a search evaluates at once."""

SEARCHED = 2**14
"""The number of steps in which a search looks for the next one."""


class Steps:
    """A set of local steps; a function, step -> whether it belongs to the set.

    Attributes:
        period: the local steps between any two neighbours; None if they differ.
        min_gap: a lower bound of the local steps between two neighbours, at least 1.
    """

    period: int | None = None
    min_gap: int = 1

    def __call__(self, step: Any) -> Any:
        """Whether a local step belongs to the set, a scalar boolean."""
        raise NotImplementedError

    def next(self, step: Any) -> Any:
        """The first step of the set from this one on; NO_STEP if there is none."""
        return _search(self, step)

    @property
    def members(self) -> tuple["Steps", ...]:
        """The sets whose union this is; the set itself for any other."""
        return (self,)

    def meets(self, other: "Steps") -> bool:
        """Whether a step may belong to both sets; False only if surely none does."""
        return (self & other) != NEVER

    def shift(self, delay: int) -> "Steps":
        """The set of steps s + delay, for each step s of this one."""
        if delay == 0 or self == NEVER:
            return self
        if isinstance(self, Shifted):
            return Shifted(self.steps, self.delay + delay)
        return Shifted(self, delay)

    def with_last(self, last: int) -> "Steps":
        """The set with one more step, the last one of a run."""
        return self | Span(last, last + 1)

    def __or__(self, other: "Steps") -> "Steps":
        return _union(self, other)

    def __and__(self, other: "Steps") -> "Steps":
        return _intersection(self, other)

    def __invert__(self) -> "Steps":
        if isinstance(self, Complement):
            return self.steps
        return {ALWAYS: NEVER, NEVER: ALWAYS}.get(self) or Complement(self)


@dataclass(frozen=True)
class Every(Steps):
    """The steps after offset, offset + period, … local steps.

    Attributes:
        period: local steps between two neighbours, at least 1.
        offset: local steps, at least 0 and below the period.
    """

    period: int = field()  # type: ignore[assignment]
    offset: int = 0

    @property
    def min_gap(self) -> int:  # type: ignore[override]
        return self.period

    def __call__(self, step: Any) -> Any:
        return (step + 1 - self.offset) % self.period == 0

    def next(self, step: Any) -> Any:
        return step + (self.offset - 1 - step) % self.period


@dataclass(frozen=True)
class Span(Steps):
    """The steps first, first + 1, …, end - 1."""

    first: int = 0
    end: int = NO_STEP

    def __call__(self, step: Any) -> Any:
        return _and(step >= self.first, step < self.end)

    def next(self, step: Any) -> Any:
        start = _maximum(step, self.first)
        return _select(start < self.end, start, NO_STEP)


@dataclass(frozen=True, eq=False)
class Where(Steps):
    """The steps at which a function holds; `next` has to search for them."""

    function: Callable[[Any], Any]

    def __call__(self, step: Any) -> Any:
        belongs = self.function(step)
        _check_scalar("a condition of local steps must return a boolean", belongs)
        return belongs


@dataclass(frozen=True, eq=False)
class Lengths(Steps):
    """The last steps of rounds whose lengths follow a schedule.

    Attributes:
        length: local step -> the length of a round that starts there, in local steps;
            it is rounded down. NaN and infinity mean a round without an end.
        min_gap: the fewest local steps in a round, to which a length is raised.
    """

    length: Callable[[Any], Any]
    min_gap: int = 1

    def __post_init__(self) -> None:
        # A table of traced numbers must belong to the program in which they are traced,
        # not to a loop or branch inside it that asks first.
        if checks.is_traced(self._length(0)):
            _ = self._table

    def __call__(self, step: Any) -> Any:
        return self.next(step) == step

    def next(self, step: Any) -> Any:
        # The start of a round follows from the lengths of all rounds before it. State
        # could hold it, but state is mapped: under vmap a branch on it would be a
        # select, with collectives in both arms. So a table holds the first steps.
        ends, last_start = self._table
        start = lax.while_loop(
            lambda start: step - start >= self._length(start),
            lambda start: start + self._length(start),
            jnp.where(step < TABLED, step, last_start),
        )
        tabled = ends[jnp.minimum(step, TABLED - 1)]
        return jnp.where(step < TABLED, tabled, start + self._length(start) - 1)

    def _length(self, start: Any) -> jax.Array:
        length = self.length(start)
        _check_scalar("a schedule of periods must return a number", length)
        steps = jnp.floor(jnp.asarray(length, jnp.float32))
        steps = jnp.nan_to_num(steps, nan=LONGEST, posinf=LONGEST)
        return jnp.clip(steps, self.min_gap, LONGEST).astype(jnp.int32)

    @functools.cached_property
    def _table(self) -> tuple[jax.Array, jax.Array]:
        """The end of each early step's round, and the start of the last of them."""
        with while_tracing():
            return jax.jit(self._first_rounds)(np.arange(TABLED, dtype=np.int32))

    def _first_rounds(self, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        lengths = jax.vmap(self._length)(steps)

        def mark_round(
            carry: tuple[jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            _, start, is_last = carry
            stop = start + lengths[start]
            return start, stop, is_last.at[stop - 1].set(True, mode="drop")

        step_0 = jnp.int32(0)
        carry = step_0, step_0, jnp.zeros(TABLED, bool)
        last_start, stop, is_last = lax.while_loop(
            lambda carry: carry[1] < TABLED, mark_round, carry
        )
        # The round of the last tabled step may end beyond the table.
        ends = jnp.where(is_last, steps, stop - 1)
        return lax.cummin(ends, reverse=True), last_start


@dataclass(frozen=True)
class Shifted(Steps):
    """The steps of a set, each some local steps later."""

    steps: Steps
    delay: int

    @property
    def period(self) -> int | None:  # type: ignore[override]
        return self.steps.period

    @property
    def min_gap(self) -> int:  # type: ignore[override]
        return self.steps.min_gap

    def __call__(self, step: Any) -> Any:
        return _and(step >= self.delay, self.steps(step - self.delay))

    def next(self, step: Any) -> Any:
        next_step = self.steps.next(_maximum(step - self.delay, 0))
        has_next = next_step < NO_STEP - self.delay
        return _select(has_next, next_step + self.delay, NO_STEP)


@dataclass(frozen=True)
class Complement(Steps):
    """The steps that are not in a set."""

    steps: Steps

    def __call__(self, step: Any) -> Any:
        belongs = self.steps(step)
        return not belongs if isinstance(belongs, bool) else jnp.logical_not(belongs)

    def next(self, step: Any) -> Any:
        if self.steps.min_gap == 1:
            return super().next(step)
        return _select(self.steps(step), step + 1, step)


@dataclass(frozen=True)
class Union(Steps):
    """The steps of at least one of several sets."""

    parts: tuple[Steps, ...]

    @property
    def members(self) -> tuple[Steps, ...]:
        return self.parts

    @property
    def min_gap(self) -> int:  # type: ignore[override]
        regular = [member for member in self.parts if isinstance(member, Every)]
        if len(regular) < len(self.parts):
            return 1
        gaps = [member.period for member in regular]
        for place, member in enumerate(regular):
            for earlier in regular[:place]:
                common = math.gcd(member.period, earlier.period)
                distance = (member.offset - earlier.offset) % common
                gaps.append(min(distance, common - distance) or common)
        return min(gaps)

    def __call__(self, step: Any) -> Any:
        # A Python number that belongs to one set needs no other one, which may depend
        # on numbers that only the program knows.
        spans_first = sorted(self.members, key=lambda x: not isinstance(x, Span))
        belongs = False
        for member in spans_first:
            belongs = _or(belongs, member(step))
            if belongs is True:
                return True
        return belongs

    def next(self, step: Any) -> Any:
        return functools.reduce(_minimum, [x.next(step) for x in self.members])


@dataclass(frozen=True)
class Intersection(Steps):
    """The steps of two sets alike."""

    left: Steps
    right: Steps

    @property
    def min_gap(self) -> int:  # type: ignore[override]
        return max(self.left.min_gap, self.right.min_gap)

    def __call__(self, step: Any) -> Any:
        return _and(self.left(step), self.right(step))

    def next(self, step: Any) -> Any:
        for span, steps in ((self.left, self.right), (self.right, self.left)):
            if isinstance(span, Span):
                following = steps.next(_maximum(step, span.first))
                return _select(following < span.end, following, NO_STEP)

        # Each set leaps to the other's next step until they agree.
        def leap(
            carry: tuple[jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            candidate, _, leaps = carry
            candidate = jnp.asarray(self.left.next(candidate), jnp.int32)
            following = jnp.asarray(self.right.next(candidate), jnp.int32)
            following = jnp.where(candidate < NO_STEP, following, NO_STEP)
            return following, following == candidate, leaps + 1

        def is_searching(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            candidate, agree, leaps = carry
            return ~agree & (candidate < NO_STEP) & (leaps < SEARCHED)

        begin = jnp.asarray(step, jnp.int32), jnp.bool_(False), jnp.int32(0)
        candidate, agree, _ = lax.while_loop(is_searching, leap, begin)
        return jnp.where(agree, candidate, NO_STEP)


ALWAYS = Every(1)
"""All steps."""

NEVER = Span(0, 0)
"""No step."""


def as_steps(function: Callable[[Any], Any] | None) -> Steps:
    """The set of a declaration such as `Strategy.acts`; None stands for all steps."""
    if function is None:
        return ALWAYS
    return function if isinstance(function, Steps) else Where(function)


def _check_scalar(rule: str, value: Any) -> None:
    """Refuses what a user's function returns for a step, if it is not one value."""
    shape = np.shape(value)
    if shape:
        raise ValueError(
            f"{rule} for the step that it is given, got an array of shape {shape}"
        )


@contextmanager
def while_tracing() -> Iterator[None]:
    """Makes jax compute known values while it traces, as if there were no mesh.

    Inside a map over some axes of a mesh, jax would try to compute a table on the
    devices of that map, and fail.
    """
    with use_abstract_mesh(AbstractMesh((), ())), jax.ensure_compile_time_eval():
        yield


def _union(left: Steps, right: Steps) -> Steps:
    members = [*left.members, *right.members]
    if ALWAYS in members:
        return ALWAYS
    distinct = list(dict.fromkeys(member for member in members if member != NEVER))
    needed = []
    for member in distinct:
        if not any(_includes(other, member) for other in distinct):
            needed.append(member)
    if not needed:
        return NEVER
    return needed[0] if len(needed) == 1 else Union(tuple(needed))


def _includes(left: Steps, right: Steps) -> bool:
    """Whether a regular set surely holds all steps of another, different one."""
    if left == right or not (isinstance(left, Every) and isinstance(right, Every)):
        return False
    is_multiple = right.period % left.period == 0
    return is_multiple and (right.offset - left.offset) % left.period == 0


def _intersection(left: Steps, right: Steps) -> Steps:
    if NEVER in (left, right):
        return NEVER
    if left == right or right == ALWAYS:
        return left
    if left == ALWAYS:
        return right
    if isinstance(left, Every) and isinstance(right, Every):
        return _common(left, right)
    if isinstance(left, Span) and isinstance(right, Span):
        span = Span(max(left.first, right.first), min(left.end, right.end))
        return span if span.first < span.end else NEVER
    for union, steps in ((left, right), (right, left)):
        if isinstance(union, Union):
            return functools.reduce(_union, [x & steps for x in union.members])
    for span, regular in ((left, right), (right, left)):
        if not (isinstance(span, Span) and isinstance(regular, Every)):
            continue
        if regular.next(span.first) >= span.end:
            return NEVER
    return Intersection(left, right)


def _common(left: Every, right: Every) -> Steps:
    """The common steps of two regular sets, by the Chinese remainder theorem."""
    common = math.gcd(left.period, right.period)
    if (right.offset - left.offset) % common:
        return NEVER
    period = left.period // common * right.period
    if period >= NO_STEP:  # step arithmetic is in int32
        return Intersection(left, right)
    rounds = (right.offset - left.offset) // common
    inverse = pow(left.period // common, -1, right.period // common)
    return Every(period, (left.offset + left.period * (rounds * inverse)) % period)


def _search(steps: Steps, step: Any) -> Any:
    """Finds the next step of a set window by window; NO_STEP beyond SEARCHED steps."""
    belongs = jax.vmap(lambda x: jnp.asarray(steps(x), bool))
    search_start = jnp.asarray(step, jnp.int32)

    def look(start: jax.Array) -> jax.Array:
        return belongs(start + jnp.arange(WINDOW, dtype=jnp.int32))  # (steps,)

    def is_searching(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, window = carry
        return ~window.any() & (start < search_start + SEARCHED)

    def look_further(
        carry: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        start = carry[0] + WINDOW
        return start, look(start)

    carry = search_start, look(search_start)
    start, window = lax.while_loop(is_searching, look_further, carry)
    return jnp.where(window.any(), start + jnp.argmax(window), NO_STEP)


# Python numbers give Python results, so that a set can be asked while a strategy is
# being made.


def _and(left: Any, right: Any) -> Any:
    if isinstance(left, bool) and isinstance(right, bool):
        return left and right
    return jnp.logical_and(left, right)


def _or(left: Any, right: Any) -> Any:
    if isinstance(left, bool) and isinstance(right, bool):
        return left or right
    return right if left is False else jnp.logical_or(left, right)


def _minimum(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    return jnp.minimum(left, right)


def _maximum(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return max(left, right)
    return jnp.maximum(left, right)


def _select(condition: Any, left: Any, right: Any) -> Any:
    if isinstance(condition, bool):
        return left if condition else right
    return jnp.where(condition, left, right)
