"""Counts of what a worker sends at most, from a step's traced program."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import decided
from syncalgos._combinators.introspection import find_axis
from syncalgos._dtypes import weak_floats
from syncalgos._ledger.traced import REQUEST, Branches, Walk, add_up
from syncalgos.collectives import PyTree
from syncalgos.collectives._axes import ANALYZED, COUNTED, mapped_names
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_params,
    check_strategy,
    seeing,
)


class Communication(NamedTuple):
    """The traffic of the worker that sends the most, without metrics and evaluation.

    On a graph with a hub, such as a star, that is the hub. In other collectives all
    workers send the same amount.

    Attributes:
        bytes_per_worker: total bytes sent; a whole number unless a ring cuts arrays
            unevenly.
        calls: collective operations of a device, one for each array.
        syncs: the number of steps at which anything is sent.
        per_step: cumulative bytes after each local step, (steps,) float64.
        by_collective: the same numbers for each kind of collective that occurs:
            all_reduce, all_gather, permute, reduce_scatter, all_to_all.
        calls_per_step: cumulative calls after each local step, (steps,) int64.
        devices: the number of devices of a worker; each sends the same amount. Traffic
            between the devices of one worker, which the compiler adds, is not counted.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, gossip_pga
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(gossip_pga(2), model, workers=8, steps=4)
        >>> sent.per_step
        array([ 400., 1100., 1500., 2200.])
        >>> {kind: x.calls for kind, x in sent.by_collective.items()}
        {'all_reduce': 2, 'permute': 2}
    """

    bytes_per_worker: float
    calls: int
    syncs: int
    per_step: np.ndarray
    by_collective: dict[str, "Communication"]
    calls_per_step: np.ndarray
    devices: int = 1

    def __repr__(self) -> str:
        """Shows the totals in one line.

        The arrays have a number for each step; they would fill pages.
        """
        kinds = {kind: x.bytes_per_worker for kind, x in self.by_collective.items()}
        return (
            f"Communication(bytes_per_worker={self.bytes_per_worker}, "
            f"calls={self.calls}, syncs={self.syncs}, by_collective={kinds}, "
            f"steps={len(self.per_step)}, devices={self.devices})"
        )

    @property
    def bytes_per_device(self) -> float:
        """Total bytes that each device of a worker sends to other workers."""
        return self.bytes_per_worker / self.devices

    def times(self, devices: int) -> "Communication":
        """Returns the traffic of a worker of several devices, given that of one."""
        return self._replace(
            bytes_per_worker=self.bytes_per_worker * devices,
            per_step=self.per_step * devices,
            by_collective={n: x.times(devices) for n, x in self.by_collective.items()},
            devices=devices,
        )


class StepTraffic(NamedTuple):
    """A worker's traffic in a step, by (kind of collective, "bytes" or "calls").

    Attributes:
        always: traffic outside of branches, in every step.
        branched: traffic in branches, each branch counted once.
    """

    always: Counter[Any]
    branched: Counter[Any]


@suggest_arguments
def communication(
    strategy: Strategy,
    replica: Replica | PyTree,
    *,
    workers: int,
    steps: int,
    taken: ArrayLike | None = None,
) -> Communication:
    """Counts exactly the most that any worker sends, from the jaxpr of a step.

    The count assumes ring algorithms: an all-reduce sends 2 (N-1)/N times the array, an
    all-gather (N-1) times the worker's part, and a permutation the array once. On a
    graph, each worker counts as the one with the most peers. A single worker sends
    nothing.

    Args:
        strategy: the strategy to count.
        replica: one worker's replica, or its params alone; arrays or their shapes. If
            the strategy sends opt_state or buffers, the replica must hold them;
            `DataParallel.communication` takes care of that.
        workers: N, the number of workers, at least 1.
        steps: the number of local steps, at least 1.
        taken: the decisions of a run, metrics["decided"], for a strategy that is
            `decided`: (steps, decisions) booleans.

    Returns:
        A Communication for one worker and all steps.

    Raises:
        ValueError: the traffic depends on more than the step and the decisions, or
            decisions are missing or have the wrong shape; or the strategy sends over
            only some of the workers' axes, by an unknown primitive, or where no jaxpr
            shows it (`custom_vmap`, callbacks, kernels).

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, diloco
        >>> model = {"w": np.ones((10, 10), np.float32)}
        >>> sent = communication(diloco(10), model, workers=8, steps=100)
        >>> sent.syncs, sent.calls, sent.bytes_per_worker
        (10, 10, 7000.0)
    """
    check_strategy("communication", strategy)
    count = counter(lambda numbers: strategy, None, replica, workers, steps)
    return count(taken, None)


def counter(
    make: Callable[[PyTree], Strategy],
    hyperparams: PyTree,
    replica: Replica | PyTree,
    workers: int,
    steps: int,
    layout: tuple[int, ...] | None = None,
) -> Callable[[ArrayLike | None, PyTree], Communication]:
    """Makes `communication` a function of decisions and numbers, compiled once.

    Args:
        make: hyperparams -> the strategy to count.
        hyperparams: numbers for `make`, with which the step is traced.
        replica: one worker's replica, or its params alone; arrays or their shapes.
        workers: N, at least 1.
        steps: local steps, at least 1.
        layout: the number of workers along each of the axes where the strategy runs;
            None: all are lanes of one device.

    Returns:
        (decisions, hyperparams) -> a Communication. The decisions are None or
        (steps, decisions) booleans.

    Raises:
        ValueError: as for `communication`.
    """
    workers = checks.whole("workers", workers, least=1)
    steps = checks.whole("steps", steps, least=1)
    names = mapped_names(find_axis(make(hyperparams)))
    inner_axes = len(names) - 1
    counted_layout = (workers, *[1] * inner_axes)
    layout = layout or (*[1] * inner_axes, workers)
    trace = partial(_trace, make, hyperparams, replica)
    count_kinds = _add_up_steps(trace(counted_layout), steps)
    count_run_kinds = None
    if layout != counted_layout:
        # Bytes are those between devices of one worker each. The program that runs may
        # be another, if the strategy looks at the layout.
        with _explained_layout():
            count_run_kinds = _add_up_steps(trace(layout, counts=False), steps)

    def count(decisions: ArrayLike | None, hyperparams: PyTree) -> Communication:
        kinds, kind_of_step = count_kinds(decisions, hyperparams)
        if count_run_kinds is not None:
            with _explained_layout():
                run_kinds, run_kind_of_step = count_run_kinds(decisions, hyperparams)
            pairs = np.stack([kind_of_step, run_kind_of_step], axis=1)
            for kind, run_kind in np.unique(pairs, axis=0):
                if _requests(kinds[kind]) != _requests(run_kinds[run_kind]):
                    raise ValueError(_LAYOUT_ERROR)
        return _tally(kinds, kind_of_step)

    return count


_LAYOUT_ERROR = (
    "communication: what this strategy sends depends on how its workers lie on "
    "devices, as by jax.lax.axis_size('lanes'): use syncalgos.collectives, and "
    "collectives.size() for the number of workers"
)


@contextmanager
def _explained_layout() -> Iterator[None]:
    """Says that only one of two layouts fails."""
    try:
        yield
    except Exception as error:
        raise ValueError(_LAYOUT_ERROR) from error


def _requests(notes: Counter) -> Counter:
    """What a step asks for, without the bytes."""
    return Counter({key: count for key, count in notes.items() if key[1] == REQUEST})


def _add_up_steps(
    walk: Walk, steps: int
) -> Callable[[ArrayLike | None, PyTree], tuple[list[Counter], np.ndarray]]:
    """Makes a function of decisions and numbers that adds up a walk's notes.

    Returns:
        (decisions, hyperparams) -> the notes of each kind of step, and the kind of each
        step, (steps,).
    """
    # One vmapped program evaluates the branches of all steps, from the step and the
    # decisions alone; then one step of each kind, with the same branches, is counted.
    numbers = np.arange(steps, dtype=np.int32)

    def find_branches(
        step: jax.Array, step_decisions: jax.Array, hyperparams: list[Any]
    ) -> jax.Array:
        decisions = [jnp.where(acts, step, -1) for acts in step_decisions]
        walk.take(step, hyperparams, decisions)
        return jnp.stack([jnp.int32(0), *walk.choices])

    find_all_branches = jax.jit(jax.vmap(find_branches, (0, 0, None)))

    def add_up_steps(
        decisions: ArrayLike | None, hyperparams: PyTree
    ) -> tuple[list[Counter], np.ndarray]:
        checked_decisions = _check_decisions(decisions, steps, len(walk.places))
        # (steps, 1 + branches)
        branches = find_all_branches(
            numbers, checked_decisions, jax.tree.leaves(hyperparams)
        )
        kinds, kind_of_step = np.unique(branches, axis=0, return_inverse=True)
        notes_of_kinds = [add_up(walk.notes, kind[1:]) for kind in kinds]
        return notes_of_kinds, kind_of_step.reshape(-1)

    return add_up_steps


def of_branches(
    strategy: Strategy, replica: Replica | PyTree, workers: int
) -> StepTraffic:
    """Counts what a worker sends in a step, with each of its branches taken once.

    Args:
        strategy, replica, workers: as for `communication`.

    Raises:
        ValueError: the strategy sends in a branch that depends on more than the step
            and the decisions of `decided`.
    """
    inner_axes = len(mapped_names(find_axis(strategy))) - 1
    layout = (workers, *[1] * inner_axes)
    walk = _trace(lambda numbers: strategy, None, replica, layout)
    # Decisions count as known values; which ones they are does not matter here.
    walk.take(jnp.int32(0), [], [jnp.int32(0)] * len(walk.places))
    always = [note for note in walk.notes if not isinstance(note, Branches)]
    branched = [note for note in walk.notes if isinstance(note, Branches)]
    return StepTraffic(_traffic(add_up(always, None)), _traffic(add_up(branched, None)))


def _traffic(notes: Counter[Any]) -> Counter[Any]:
    """The bytes and calls of a step, without what it asks for."""
    return Counter({key: count for key, count in notes.items() if key[1] != REQUEST})


def _check_decisions(decisions: Any, steps: int, num_decisions: int) -> np.ndarray:
    """Returns the decisions of each step, (steps, decisions) booleans."""
    if decisions is None and num_decisions:
        raise ValueError(
            "the traffic of this strategy depends on more than the step: pass a run's "
            "decisions, metrics['decided'], as `taken`"
        )
    if decisions is None:
        return np.zeros((steps, 0), bool)
    table = np.asarray(decisions, bool)
    if table.shape != (steps, num_decisions):
        raise ValueError(
            f"taken: {steps} steps need {(steps, num_decisions)} booleans, got shape "
            f"{table.shape}"
        )
    return table


def _trace(
    make: Callable[[PyTree], Strategy],
    hyperparams: PyTree,
    replica: Replica | PyTree,
    layout: tuple[int, ...],
    counts: bool = True,
) -> Walk:
    """Traces a step in a layout, from shapes alone."""
    strategy = make(hyperparams)
    replica = replica if isinstance(replica, Replica) else Replica(replica)
    replica = jax.tree.map(_find_shape, replica)
    check_params(replica.params)
    replica = seeing(strategy, replica)
    names = mapped_names(find_axis(strategy))
    sizes = dict(zip(names, layout, strict=True))
    trace = {"axis_env": list(sizes.items()), "return_shape": True}

    def program(
        step: jax.Array, hyperparams: PyTree, replica: Replica, state: PyTree
    ) -> tuple[Replica, PyTree]:
        strategy = make(weak_floats(hyperparams))
        decisions = decided.find_decisions(state).values()
        _, state = apply_reduce(strategy, replica.params, replica, state, step)
        # A phase that starts with a new state must keep the recorded decisions.
        return apply_sync(
            strategy, replica, decided.put_decisions(state, decisions), step
        )

    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        counted_names = names if math.prod(layout) > 1 else ()
        with ANALYZED.set_to(True), COUNTED.set_to(counted_names):
            _, state = jax.make_jaxpr(strategy.init, **trace)(replica.params)
            inputs = step, hyperparams, replica, state
            jaxpr, _ = jax.make_jaxpr(program, **trace)(*inputs)
        state_start = len(jax.tree.leaves((step, hyperparams, replica)))
        places = [state_start + place for place in decided.find_decisions(state)]
        return Walk(jaxpr, places, sizes, counts)
    except NameError as error:  # from jax, for an axis that is not mapped
        raise ValueError(
            f"communication: {error}; a strategy over another axis than WORKERS must "
            "declare it: Strategy(…, axis=…)"
        ) from None


def _find_shape(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without a weak type."""
    array_type = x
    if not isinstance(x, jax.ShapeDtypeStruct):
        array_type = jax.typeof(x)
    return jax.ShapeDtypeStruct(array_type.shape, array_type.dtype)


def _tally(kinds: list[Counter], kind_of_step: np.ndarray) -> Communication:
    """Adds up a run from the traffic of each kind of step."""

    def tally(names: list[str]) -> Communication:
        kind_bytes = []
        kind_calls = []
        for kind in kinds:
            kind_bytes.append(sum((kind[name, "bytes"] for name in names), Fraction()))
            kind_calls.append(sum(kind[name, "calls"] for name in names))
        # Integers in units of the common denominator: exact until the division.
        unit = math.lcm(*(x.denominator for x in kind_bytes))
        kind_units = [int(x * unit) for x in kind_bytes]
        fits_int64 = max(kind_units) * len(kind_of_step) < 2**63
        dtype = np.int64 if fits_int64 else object
        step_units = np.array(kind_units, dtype)[kind_of_step]  # (steps,)
        per_step = (np.cumsum(step_units) / unit).astype(np.float64)
        step_calls = np.array(kind_calls)[kind_of_step]
        calls_per_step = np.cumsum(step_calls, dtype=np.int64)
        return Communication(
            bytes_per_worker=float(per_step[-1]),
            calls=int(calls_per_step[-1]),
            syncs=int((step_units > 0).sum()),
            per_step=per_step,
            by_collective={},
            calls_per_step=calls_per_step,
        )

    names: set[str] = set()
    for kind in kinds:
        names |= {name for name, _ in _traffic(kind)}
    by_collective = {name: tally([name]) for name in sorted(names)}
    return tally(sorted(names))._replace(by_collective=by_collective)
