"""Finds the collectives of a traced program in the branches that it takes."""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos._combinators.decided import BY_DATA
from syncalgos._jaxprs import (
    CALLS,
    SILENT,
    Runs,
    axes,
    follow,
    hides,
    is_of_jax,
    runs,
    within,
)
from syncalgos.collectives._axes import check_whole
from syncalgos.collectives._marks import find_mark

# Bytes that a worker of n sends at most per byte of the operand, by ring algorithms.
_ALL_REDUCE = "all_reduce", lambda n: Fraction(2 * (n - 1), n)
COLLECTIVES: dict[str, tuple[str, Callable[[int], Any]]] = {
    **dict.fromkeys(("psum", "pmax", "pmin"), _ALL_REDUCE),
    "all_gather": ("all_gather", lambda n: Fraction(n - 1)),
    "reduce_scatter": ("reduce_scatter", lambda n: Fraction(n - 1, n)),
    "all_to_all": ("all_to_all", lambda n: Fraction(n - 1, n)),
    "ppermute": ("permute", lambda n: Fraction(1)),
}

REQUEST = "request"
"""Marks the numbers of requests for collectives, which no layout changes."""


class Branches(NamedTuple):
    """A branch in the program: it sends notes[i] if the value choices[choice] is i."""

    choice: int
    notes: list[list[Any]]


class Walk:
    """A walk through a step that evaluates known values and notes what is sent.

    A note is a Counter of (kind, "bytes" or "calls") and (request, REQUEST), or it is
    Branches.
    A value is known if it follows from the step, the hyperparameters and the decisions
    alone. Traffic that depends on another value is refused, not guessed.

    Attributes:
        jaxpr: the step's jaxpr; its first inputs are the step number and hyperparams.
        places: the numbers of the jaxpr's inputs that hold decisions.
        sizes: the number of workers along each mapped axis.
        counts: whether bytes are counted; they are where each worker is a device. In
            another layout only what the strategy asks for is noted.
        choices: the known values that choose between branches that send, in order.
        notes: the traffic of the step.
    """

    def __init__(
        self,
        jaxpr: Any,
        places: list[int],
        sizes: dict[str, int],
        counts: bool = True,
    ):
        self.jaxpr: Any = jaxpr
        self.places: list[int] = places
        self.sizes: dict[str, int] = sizes
        self.counts: bool = counts
        self._is_in_mark = False
        self.choices: list[jax.Array] = []
        self.notes: list[Any] = []

    def take(
        self, step: jax.Array, hyperparams: list[Any], decisions: list[Any]
    ) -> None:
        """Walks through the step of this number, with these decisions."""
        inputs: list[Any] = [None] * len(self.jaxpr.jaxpr.invars)
        inputs[: 1 + len(hyperparams)] = [step, *hyperparams]
        for place, decision in zip(self.places, decisions, strict=True):
            inputs[place] = decision
        self.choices.clear()
        self.notes = self.note_sends(self.jaxpr, inputs)

    def note_sends(self, jaxpr: Any, inputs: list[Any]) -> list[Any]:
        """Returns the notes of a jaxpr, given its inputs, None for unknown values."""
        outer_notes = self.notes
        self.notes = []
        follow(jaxpr, inputs, self.equation)
        notes = self.notes
        self.notes = outer_notes
        return notes

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Notes what an equation sends; returns its results, None for unknown ones."""
        name = equation.primitive.name
        unknown = [None] * len(equation.outvars)
        # A vote is not known; its second argument is the recorded decision.
        if equation.primitive is BY_DATA:
            return inputs[1:]
        if name in CALLS:
            mark = find_mark(equation)
            if mark is None or self._is_in_mark:
                return follow(*runs(equation, inputs).arms[0], self.equation)
            self.notes.append(Counter({(mark, REQUEST): 1}))
            self._is_in_mark = True
            results = follow(*runs(equation, inputs).arms[0], self.equation)
            self._is_in_mark = False
            return results
        is_foreign = not is_of_jax(equation.primitive)
        if is_foreign or axes(equation, self.sizes) or hides(equation):
            self.notes += self.collective(equation)
            return unknown
        if name == "cond":
            notes = self.cond(runs(equation, inputs), inputs[0])
        else:
            notes = self.loop(runs(equation, [None] * len(inputs)))
        self.notes += notes
        if notes or any(x is None for x in inputs) or _needs_an_axis(equation):
            return unknown
        results = equation.primitive.bind(*inputs, **equation.params)
        return results if equation.primitive.multiple_results else [results]

    def collective(self, equation: Any) -> list[Counter[Any]]:
        """Returns the note of a collective; a single worker sends nothing.

        Raises:
            ValueError: its traffic is not known.
        """
        name = equation.primitive.name
        names = axes(equation, self.sizes)
        if math.prod(self.sizes.values()) == 1:
            return []
        if self._is_in_mark and not self.counts:
            return []
        if not is_of_jax(equation.primitive):
            raise ValueError(
                f"the traffic of {name} cannot be counted: it is not one of jax's own "
                "primitives; send by syncalgos.collectives, or write it in jax.numpy"
            )
        check_whole(name, {*names}, (*self.sizes,))
        if name not in COLLECTIVES or not {*names} <= {*self.sizes}:
            raise ValueError(
                f"the traffic of {name} cannot be counted; send by "
                "syncalgos.collectives"
            )
        groups = equation.params.get("axis_index_groups")
        n = max(map(len, groups)) if groups else math.prod(self.sizes[x] for x in names)
        if n == 1:
            return []
        kind, share = COLLECTIVES[name]
        size = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.invars)
        calls = len(equation.invars)
        note = Counter({(kind, "bytes"): share(n) * size, (kind, "calls"): calls})
        if not self._is_in_mark:
            shapes = [v.aval.str_short() for v in equation.invars]
            note[f"{name} of {n}: {shapes}", REQUEST] = 1
        return [note]

    def cond(self, branch_runs: Runs, choice: jax.Array | None) -> list[Branches]:
        """Returns the note of a branch; none if no arm sends anything."""
        notes = [self.note_sends(*arm) for arm in branch_runs.arms]
        if not any(notes):
            return []
        if choice is None:
            raise ValueError(
                "the traffic of this strategy depends on more than the step, so it "
                "cannot be counted; let the workers vote with syncalgos.decided"
            )
        self.choices.append(choice.astype(jnp.int32))
        return [Branches(len(self.choices) - 1, notes)]

    def loop(self, loop_runs: Runs) -> list[Any]:
        """Returns the notes of a scan, once per pass; other loops must not send."""
        notes = []
        for arm in loop_runs.arms:
            notes += self.note_sends(*arm)
        if notes and loop_runs.passes is None:
            raise ValueError(
                "this strategy sends inside a loop of unknown length, so its traffic "
                "cannot be counted"
            )
        return notes * (loop_runs.passes or 0)


def _needs_an_axis(equation: Any) -> bool:
    """Whether an equation, or one inside it, needs a mapped axis."""
    return any(x.primitive.name in SILENT or axes(x) for x, _ in within(equation))


def add_up(notes: list[Any], choices: np.ndarray | None) -> Counter[Any]:
    """Adds up the traffic of a step.

    Args:
        notes: the notes of a walk.
        choices: the branch that each choice takes; None: every branch, once.

    Returns:
        A Counter of (kind, "bytes" or "calls") and (request, REQUEST).
    """
    total: Counter[Any] = Counter()
    for note in notes:
        if not isinstance(note, Branches):
            total.update(note)
            continue
        branches = note.notes
        if choices is not None:
            branches = [note.notes[choices[note.choice]]]
        for branch in branches:
            total.update(add_up(branch, choices))
    return total
