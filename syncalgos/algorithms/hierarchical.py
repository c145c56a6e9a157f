"""Hierarchical local SGD: nearby workers average often, all workers rarely."""

import math

import optax

from syncalgos import checks, collectives
from syncalgos._combinators.chain import chain
from syncalgos._combinators.primitives import average
from syncalgos._combinators.schedule import every, when
from syncalgos.steps import Every
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory


@factory
def hierarchical(
    period: int = 16,
    inner_period: int = 4,
    *,
    groups: int | None = None,
    hosts: int = 1,
    axis: Axis = WORKERS,
) -> Strategy:
    """Hierarchical local SGD: average in groups often, over all workers rarely.

    For workers' params θ:

        after every `inner_period` local steps: θ ← mean over the group (θ)
        after every `period` local steps: θ ← mean(θ)

    Args:
        period: local steps between two averages of all workers, at least 1.
        inner_period: local steps between two averages in a group, at least 1; at
            multiples of both periods, all workers average.
        groups: the number of groups, each of equally many consecutive workers; a
            divisor of the number of workers. None means the largest number up to their
            square root at which no group spans hosts.
        hosts: the number of hosts, which hold equal numbers of consecutive workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A sync sends params once, in a group or to all; over a
        single custom axis, a group's mean gathers params from all workers. The center
        is the mean of the replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range, or groups that would span hosts;
            during tracing, workers that cannot be divided equally into groups or hosts.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from syncalgos import communication, hierarchical
        >>> strategy = hierarchical(8, inner_period=2, groups=4)
        >>> sent = communication(strategy, jnp.ones(1000), workers=16, steps=8)
        >>> np.diff(sent.per_step, prepend=0)
        array([   0., 6000.,    0., 6000.,    0., 6000.,    0., 7500.])

    Source: Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD",
    ICLR 2020 (2018), section 5.

    Family: Averages of models.
    """
    period = checks.whole("period", period, least=1)
    inner_period = checks.whole("inner_period", inner_period, least=1)
    if groups is not None:
        groups = checks.whole("hierarchical: groups", groups, least=1)
    hosts = checks.whole("hierarchical: hosts", hosts, least=1)
    if groups is not None and groups % hosts:
        raise ValueError(
            f"hierarchical: {groups} groups on {hosts} hosts would span hosts: use a "
            f"multiple of {hosts}"
        )

    # Groups follow workers and hosts, never devices or processes: on another layout the
    # same command would give other numbers.
    def average_groups(params: PyTree, state: PyTree) -> PyTree:
        num_groups = groups or _find_groups(collectives.size(axis), hosts)
        return collectives.group_mean(params, num_groups, axis)

    group_average = when(
        average(reduce=optax.stateless(average_groups), axis=axis),
        Every(inner_period) & ~Every(period),
    )
    return chain(group_average, every(average(axis=axis), period))


def _find_groups(workers: int, hosts: int) -> int:
    """The largest number of groups up to the square root, or one for each host."""
    if workers % hosts:
        raise ValueError(
            f"hierarchical: {workers} workers do not divide over {hosts} hosts"
        )
    max_groups = max(math.isqrt(workers), hosts)
    candidates = range(hosts, max_groups + 1, hosts)
    return max(d for d in candidates if workers % d == 0)
