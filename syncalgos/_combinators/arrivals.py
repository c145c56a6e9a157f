"""The steps at which the center can change, and what it then includes.

A sync that is sent after local step s includes the steps up to s. Its result may come
later: after a delay of some local steps, or at a later sync, as with `reducers.late`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos._combinators import introspection
from syncalgos._combinators.introspection import Arrival
from syncalgos.collectives import WORKERS, Axis
from syncalgos.collectives._axes import ANALYZED, mapped_names
from syncalgos.steps import ALWAYS, Steps
from syncalgos.strategy import Strategy

Part = tuple[Arrival, ...]
"""Arrivals of the same leaves: the last one decides, of one step the last in order."""


def arrivals(strategy: Strategy, undeclared: Steps = ALWAYS) -> list[Part]:
    """The steps at which the center of a strategy can change.

    Args:
        strategy: a strategy; if the workers' data decide, it is taken to act whenever
            it may.
        undeclared: the steps of a strategy that has its own center but does not declare
            at which steps it acts.

    Returns:
        The arrivals, for each part of the model that has a center of its own.
    """
    if not introspection.has_center(strategy):
        return [_list_replica_arrivals(strategy)]
    combination = introspection.combination(strategy)
    if not combination.members:
        steps = introspection.landing_steps(strategy)
        is_decided = combination.follow is not None
        if strategy.acts is None and (combination.landing is None or is_decided):
            steps = undeclared
        return [_limit_steps(steps, combination.arrives)]
    if combination.clock is not None and combination.clock.averages:
        # A mean of earlier replicas includes what these include.
        [member] = combination.members
        is_averaged = introspection.combination(member).clock == combination.clock
        if is_averaged:
            return arrivals(member, undeclared)
        return [_list_replica_arrivals(member)]
    parts: list[Part] = []
    for member in reversed(combination.members):
        if introspection.has_center(member):
            parts += arrivals(member, undeclared)
        elif introspection.combination(member).partial and _combines(member):
            parts.append(_list_replica_arrivals(member))
        if introspection.mean_center(member) is None:
            break  # its center replaces those of all members before it
    return [_change_part(strategy, part) for part in parts]


def _limit_steps(steps: Steps, part: Part) -> Part:
    """The arrivals at these steps alone."""
    return tuple(x._replace(steps=x.steps & steps) for x in part)


def _combines(strategy: Strategy) -> bool:
    """Whether a strategy ever combines gradients or replicas."""
    return introspection.reduces(strategy) or introspection.ever_syncs(strategy)


def _list_replica_arrivals(strategy: Strategy) -> Part:
    """The arrivals of a mean of replicas: each local step, unless it is replaced."""
    return _change_part(
        strategy, (Arrival(ALWAYS), *_list_replacements(strategy)), of_member=False
    )


def _list_replacements(strategy: Strategy) -> Part:
    """The arrivals that replace local steps of the replicas, or their gradients."""
    combination = introspection.combination(strategy)
    delay = combination.delay
    if delay is not None:
        part = ()
        if introspection.reduces(strategy):
            rounds = introspection.rounds_late(strategy)
            part += (Arrival(ALWAYS, delay.steps, rounds),)
        if combination.landing is not None and delay.replaces:
            part += (Arrival(combination.landing, delay.steps),)
        return part
    if not combination.members:
        arrive_at_once = combination.arrives == (Arrival(ALWAYS),)
        if arrive_at_once or not introspection.reduces(strategy):
            return ()
        return combination.arrives
    if combination.partial:  # other leaves keep their local steps
        return ()
    part = ()
    for member in combination.members:
        part += _list_replacements(member)
    return (
        part if combination.gate is None else _limit_steps(combination.gate.steps, part)
    )


def _change_part(strategy: Strategy, part: Part, of_member: bool = True) -> Part:
    """The arrivals at a combinator, given those of its member or of its replicas."""
    combination = introspection.combination(strategy)
    clock = combination.clock
    if clock is not None and clock.quota is not None:
        ends = introspection.landing_steps(strategy)
        return tuple(x._replace(ends=ends, quota=clock.quota) for x in part)
    if not of_member:
        return part
    gate = combination.gate
    if gate is not None:
        part = _limit_steps(gate.steps, part)
    if gate is not None and gate.is_phase:  # outside, the center is the replica
        part += (Arrival(~gate.steps),)
    delay = combination.delay
    if delay is not None:
        part = tuple(
            arrival._replace(
                steps=arrival.steps.shift(delay.steps),
                delay=arrival.delay + delay.steps,
            )
            for arrival in part
        )
    return part


def included(
    parts: Iterable[Part], steps: int, workers: int | None, axis: Axis = WORKERS
) -> np.ndarray:
    """The last local step that the center includes after 0, 1, …, `steps` local steps.

    Args:
        parts: as `arrivals` returns them.
        steps: the number of local steps.
        workers, axis: as for `table`.

    Returns:
        (steps + 1,) whole numbers; 0 stands for the initial model.
    """
    parts = list(parts)
    tables: dict[Steps, np.ndarray] = {}
    for part in parts:
        for arrival in part:
            for arrival_steps in (arrival.steps, arrival.ends):
                if arrival_steps not in tables:
                    tables[arrival_steps] = trace_table(
                        arrival_steps, steps, workers, axis
                    )
    return np.max([_find_part_steps(part, steps, tables) for part in parts], axis=0)


def trace_table(
    steps: Steps, count: int, workers: int | None, axis: Axis = WORKERS
) -> np.ndarray:
    """Whether each of the first local steps belongs to a set.

    Args:
        steps: the set.
        count: the number of local steps.
        workers: the number of workers; None: the set does not depend on it.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        (count,) booleans.

    Raises:
        NameError: the set depends on the number of workers, which was not given.
    """

    def check_steps(step_numbers: Any) -> jax.Array:
        return jax.vmap(lambda step: jnp.asarray(steps(step), bool))(step_numbers)

    step_numbers = np.arange(count, dtype=np.int32)
    if workers is None:
        return np.asarray(jax.jit(check_steps)(step_numbers))

    # Some sets depend on the number of workers, which the axes tell.
    def check_worker_steps(_: Any, step_numbers: Any) -> jax.Array:
        return check_steps(step_numbers)

    axes = mapped_names(axis)
    check_all: Callable[..., jax.Array] = check_worker_steps
    for name in reversed(axes):
        check_all = jax.vmap(check_all, (0, None), axis_name=name)
    shape = workers, *[1] * (len(axes) - 1)
    with ANALYZED.set_to(True):
        is_member = np.asarray(jax.jit(check_all)(np.zeros(shape), step_numbers))
    return is_member[(0,) * len(axes)]  # all workers have the same


def _find_part_steps(
    part: Part, steps: int, tables: dict[Steps, np.ndarray]
) -> np.ndarray:
    """As `included`, for one part of the model."""
    values = np.zeros(steps, int)
    changes = np.zeros(steps, bool)
    for arrival in part:  # of one step, the last arrival decides
        rows = np.flatnonzero(tables[arrival.steps])
        values[rows] = _find_included_steps(arrival, rows, tables)
        changes[rows] = True
    # Between two arrivals the center stays.
    latest = np.maximum.accumulate(np.where(changes, np.arange(steps), -1))
    return np.concatenate([[0], np.where(latest >= 0, values[latest], 0)])


def _find_included_steps(
    arrival: Arrival, rows: np.ndarray, tables: dict[Steps, np.ndarray]
) -> np.ndarray:
    """The last local step that each arrival brings."""
    included_steps = np.zeros(len(rows), int)
    num_arrived = len(rows) - arrival.rounds
    included_steps[arrival.rounds :] = rows[: max(num_arrived, 0)] - arrival.delay + 1
    if arrival.quota is not None:
        round_starts = np.concatenate([[0], np.flatnonzero(tables[arrival.ends]) + 1])
        start = round_starts[np.searchsorted(round_starts, included_steps, "left") - 1]
        included_steps = np.minimum(included_steps, start + arrival.quota)
        if arrival.quota == 0:  # no worker makes a step in any round
            included_steps[:] = 0
    return np.maximum(included_steps, 0)
