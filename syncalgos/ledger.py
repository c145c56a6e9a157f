"""What each worker sends, counted from the traced program of a step."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from syncalgos import base, checks, contract, inputs
from syncalgos.base import Replica, Strategy
from syncalgos.collectives import WORKERS, Axis, PyTree

# What a worker of n sends per byte of its operand, by ring algorithms.
_COLLECTIVES = {
    "psum": ("all_reduce", lambda n: Fraction(2 * (n - 1), n)),
    "pmax": ("all_reduce", lambda n: Fraction(2 * (n - 1), n)),
    "pmin": ("all_reduce", lambda n: Fraction(2 * (n - 1), n)),
    "all_gather": ("all_gather", lambda n: Fraction(n - 1)),
    "reduce_scatter": ("reduce_scatter", lambda n: Fraction(n - 1, n)),
    "all_to_all": ("all_to_all", lambda n: Fraction(n - 1, n)),
    "ppermute": ("permute", lambda n: Fraction(1)),
}


class Communication(NamedTuple):
    """What one worker sends in a run; metrics and evaluation are not counted.

    Attributes:
        bytes_per_worker: in all; a whole number unless a ring cuts arrays unevenly.
        calls: collective operations, one per array.
        syncs: steps at which anything is sent.
        per_step: cumulative bytes after each local step, (steps,) float64.
        by_collective: the same for all_reduce, all_gather, permute, reduce_scatter and
            all_to_all, those that occur.
        calls_per_step: cumulative calls after each local step, (steps,) int64.
    """

    bytes_per_worker: float
    calls: int
    syncs: int
    per_step: np.ndarray
    by_collective: dict[str, "Communication"]
    calls_per_step: np.ndarray


def communication(
    strategy: Strategy,
    replica: Replica | PyTree,
    workers: int,
    steps: int,
    axis: Axis = WORKERS,
) -> Communication:
    """Counts what each worker sends, exactly, from the jaxpr with one lane per device.

    Rings: an all-reduce sends 2 (N-1)/N times the array, an all-gather (N-1) times the
    worker's part, a permutation the array once; one worker sends nothing.

    Args:
        strategy: what is counted.
        replica: one worker's replica, or its params alone; arrays or their shapes. A
            strategy that sends opt_state or buffers needs them (or see
            `DataParallel.communication`).
        workers: N, at least 1.
        steps: local steps, at least 1.
        axis: the axis or axes for which the strategy was made.

    Raises:
        ValueError: a strategy whose sends depend on more than the step.
    """
    base.check_strategy("communication", strategy)
    workers = checks.whole("workers", workers, least=1)
    steps = checks.whole("steps", steps, least=1)
    replica = replica if isinstance(replica, Replica) else Replica(replica)
    replica = jax.tree.map(_shape_of, replica)
    inputs.check_params(replica.params)
    outer, *inner = (axis,) if isinstance(axis, str) else axis
    sizes = {outer: workers, **dict.fromkeys(inner, 1)}
    return _tally(*_sent_by_step(_trace(strategy, replica, sizes), sizes, steps))


def _trace(strategy: Strategy, replica: Replica, sizes: dict[str, int]):
    """The jaxpr of (step, replica, state) -> what a step makes of them."""
    trace = {"axis_env": list(sizes.items()), "return_shape": True}

    def program(step, replica, state):
        _, state = contract.apply_reduce(strategy, replica.params, replica, state, step)
        return contract.apply_sync(strategy, replica, state, step)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        _, state = jax.make_jaxpr(strategy.init, **trace)(replica.params)
        return jax.make_jaxpr(program, **trace)(step, replica, state)[0]
    except NameError as error:  # jax's, of an axis that is not there
        raise ValueError(
            f"communication: {error}; name the axis that the strategy was made for, "
            "axis=…"
        ) from None


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _sent_by_step(jaxpr, sizes, steps) -> tuple[list[Counter], np.ndarray]:
    """Returns the kinds of steps there are (what each sends), and every step's kind.

    Which branches a step takes is evaluated for all steps at once, from what depends on
    the step alone; then one step of each kind is counted.
    """
    walk = _Walk(sizes)

    def branches_at(step):
        walk.choices.clear()
        unknown = [None] * (len(jaxpr.jaxpr.invars) - 1)
        walk.notes, _ = walk.through(jaxpr, [step, *unknown])
        return jnp.stack([jnp.int32(0), *walk.choices])

    branches = jax.jit(jax.vmap(branches_at))(jnp.arange(steps, dtype=jnp.int32))
    kinds, kind_of_step = np.unique(np.asarray(branches), axis=0, return_inverse=True)
    return [_total(walk.notes, kind[1:]) for kind in kinds], kind_of_step.reshape(-1)


class _Branches(NamedTuple):
    """What is sent is notes[i], where i is the value of choice number `choice`."""

    choice: int
    notes: list[list]


class _Walk:
    """Goes through a jaxpr: evaluates what follows from the step, notes what is sent.

    A note is a Counter of (kind, "bytes" or "calls"), or _Branches.
    """

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.choices: list[jax.Array] = []
        self.notes: list = []

    def through(self, jaxpr, inputs: list) -> tuple[list, list]:
        """Returns the notes and the outputs; None stands for an unknown value."""
        consts = ()
        if isinstance(jaxpr, core.ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            return atom.val if isinstance(atom, core.Literal) else values.get(atom)

        notes = []
        for equation in jaxpr.eqns:
            noted, outputs = self.equation(equation, [read(v) for v in equation.invars])
            notes += noted
            values.update(zip(equation.outvars, outputs, strict=True))
        return notes, [read(v) for v in jaxpr.outvars]

    def equation(self, equation, inputs: list) -> tuple[list, list]:
        """`through`, for one equation."""
        name, unknown = equation.primitive.name, [None] * len(equation.outvars)
        if name == "axis_index":
            return [], unknown
        if name in _COLLECTIVES:
            return self.collective(equation), unknown
        if name == "cond":
            notes = self.cond(equation, inputs)
        elif name in ("scan", "while"):
            notes = self.loop(equation)
        else:
            notes = []
            for jaxpr in core.jaxprs_in_params(equation.params):
                if len(jaxpr.invars) == len(inputs):  # a call: jit, remat, …
                    return self.through(jaxpr, inputs)
                notes += self.through(jaxpr, [None] * len(jaxpr.invars))[0]
        if notes or any(x is None for x in inputs) or _needs_an_axis(equation):
            return notes, unknown
        return [], _evaluate(equation, inputs)

    def collective(self, equation) -> list[Counter]:
        names = equation.params.get("axes", equation.params.get("axis_name"))
        names = names if isinstance(names, tuple) else (names,)
        groups = equation.params.get("axis_index_groups")
        n = len(groups[0]) if groups else math.prod(self.sizes[x] for x in names)
        if n == 1:
            return []
        kind, share = _COLLECTIVES[equation.primitive.name]
        size = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.invars)
        calls = len(equation.invars)
        return [Counter({(kind, "bytes"): share(n) * size, (kind, "calls"): calls})]

    def cond(self, equation, inputs: list) -> list[_Branches]:
        choice, *operands = inputs
        notes = [self.through(b, operands)[0] for b in equation.params["branches"]]
        if not any(notes):
            return []
        if choice is None:
            raise ValueError(
                "what this strategy sends depends on more than the step, so it cannot "
                "be counted beforehand"
            )
        self.choices.append(choice.astype(jnp.int32))
        return [_Branches(len(self.choices) - 1, notes)]

    def loop(self, equation) -> list:
        notes = []
        for jaxpr in core.jaxprs_in_params(equation.params):
            notes += self.through(jaxpr, [None] * len(jaxpr.invars))[0]
        if notes and "length" not in equation.params:
            raise ValueError(
                "this strategy sends inside a loop of unknown length, so it cannot be "
                "counted beforehand"
            )
        return notes * equation.params.get("length", 1)


def _needs_an_axis(equation) -> bool:
    """Whether it is of the workers' axis, or anything inside of it is."""
    return equation.primitive.name in ("axis_index", *_COLLECTIVES) or any(
        _needs_an_axis(inner)
        for jaxpr in core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def _evaluate(equation, inputs: list) -> list:
    """The outputs of an equation whose inputs are all known."""
    known = {
        v: x
        for v, x in zip(equation.invars, inputs, strict=True)
        if not isinstance(v, core.Literal)
    }
    about = core.DebugInfo("communication", "a step", None, None)
    jaxpr = core.Jaxpr((), list(known), equation.outvars, [equation], debug_info=about)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*known.values())


def _total(notes: list, choices: np.ndarray) -> Counter:
    """What a step sends that takes these branches."""
    total = Counter()
    for note in notes:
        if isinstance(note, _Branches):
            note = _total(note.notes[choices[note.choice]], choices)
        total.update(note)
    return total


def _tally(kinds: list[Counter], kind_of_step: np.ndarray) -> Communication:
    def tally(names):
        sent = [sum((k[name, "bytes"] for name in names), Fraction()) for k in kinds]
        calls = np.array([sum(k[name, "calls"] for name in names) for k in kinds])
        unit = math.lcm(*(x.denominator for x in sent))  # exact until the division
        whole = [int(x * unit) for x in sent]
        fits = max(whole) * len(kind_of_step) < 2**63
        parts = np.array(whole, np.int64 if fits else object)[kind_of_step]
        per_step = (np.cumsum(parts) / unit).astype(np.float64)
        calls_per_step = np.cumsum(calls[kind_of_step], dtype=np.int64)
        return Communication(
            bytes_per_worker=float(per_step[-1]),
            calls=int(calls_per_step[-1]),
            syncs=int((parts > 0).sum()),
            per_step=per_step,
            by_collective={},
            calls_per_step=calls_per_step,
        )

    names = sorted({name for kind in kinds for name, _ in kind})
    return tally(names)._replace(by_collective={n: tally([n]) for n in names})
