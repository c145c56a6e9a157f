"""What each worker sends, counted from the traced program of a step."""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators import decided
from syncalgos.ledger.traced import Walk, add_up
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_params,
    check_strategy,
)


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
    taken: ArrayLike | None = None,
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
        taken: of a strategy that is `decided`, what a run told of each step,
            metrics["decided"]: (steps, decisions) booleans.

    Raises:
        ValueError: a strategy whose sends depend on more than the step and what was
            decided; no decisions where there are some, or of another shape.
    """
    return counter(strategy, replica, workers, steps, axis)(taken)


def counter(
    strategy: Strategy,
    replica: Replica | PyTree,
    workers: int,
    steps: int,
    axis: Axis = WORKERS,
) -> Callable[[ArrayLike | None], Communication]:
    """`communication` as a function of what was decided, traced and compiled once."""
    check_strategy("communication", strategy)
    workers = checks.whole("workers", workers, least=1)
    steps = checks.whole("steps", steps, least=1)
    replica = replica if isinstance(replica, Replica) else Replica(replica)
    replica = jax.tree.map(_shape_of, replica)
    check_params(replica.params)
    outer, *inner = (axis,) if isinstance(axis, str) else axis
    sizes = {outer: workers, **dict.fromkeys(inner, 1)}
    jaxpr, places = _trace(strategy, replica, sizes)
    count = _counted_by_step(jaxpr, places, sizes, steps)
    return lambda taken: _tally(*count(_checked(taken, steps, len(places))))


def _checked(taken: Any, steps: int, decisions: int) -> np.ndarray:
    """The decisions of each step, (steps, decisions) booleans."""
    if taken is None:
        if decisions:
            raise ValueError(
                "what this strategy sends depends on more than the step: count it from "
                "what a run decided, metrics['decided']"
            )
        return np.zeros((steps, 0), bool)
    taken = np.asarray(taken, bool)
    if taken.shape != (steps, decisions):
        raise ValueError(
            f"taken: the decisions of {steps} steps are {(steps, decisions)} booleans, "
            f"got shape {taken.shape}"
        )
    return taken


def _trace(strategy: Strategy, replica: Replica, sizes: dict[str, int]):
    """The jaxpr of (step, replica, state) -> what a step makes of them.

    And the numbers of its inputs that say when it was decided to act.
    """
    trace = {"axis_env": list(sizes.items()), "return_shape": True}

    def program(step, replica, state):
        known = decided.found(state)
        _, state = apply_reduce(strategy, replica.params, replica, state, step)
        # What is known must not be lost where a phase begins with a new state.
        return apply_sync(strategy, replica, decided.put(state, known), step)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        _, state = jax.make_jaxpr(strategy.init, **trace)(replica.params)
        jaxpr, _ = jax.make_jaxpr(program, **trace)(step, replica, state)
        before = 1 + len(jax.tree.leaves(replica))
        return jaxpr, [before + place for place in decided.places(state)]
    except NameError as error:  # jax's, of an axis that is not there
        raise ValueError(
            f"communication: {error}; name the axis that the strategy was made for, "
            "axis=…"
        ) from None


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _counted_by_step(
    jaxpr: Any, places: list[int], sizes: dict[str, int], steps: int
) -> Callable[[np.ndarray], tuple[list[Counter], np.ndarray]]:
    """Returns what was decided -> the kinds of steps, and every step's kind.

    Which branches a step takes is evaluated for all steps at once, from what depends on
    the step and the decisions alone; then one step of each kind is counted.
    """
    walk, numbers = Walk(sizes), jnp.arange(steps, dtype=jnp.int32)

    def branches_at(step, taken):
        walk.choices.clear()
        arguments: list = [step, *[None] * (len(jaxpr.jaxpr.invars) - 1)]
        for place, acts in zip(places, taken, strict=True):
            arguments[place] = jnp.where(acts, step, -1)
        walk.notes, _ = walk.through(jaxpr, arguments)
        return jnp.stack([jnp.int32(0), *walk.choices])

    of_all = jax.jit(jax.vmap(branches_at))

    def count(taken):
        branches = np.asarray(of_all(numbers, taken))
        kinds, kind_of_step = np.unique(branches, axis=0, return_inverse=True)
        sent = [add_up(walk.notes, kind[1:]) for kind in kinds]
        return sent, kind_of_step.reshape(-1)

    return count


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
