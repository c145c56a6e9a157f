"""Synchronous data-parallel training."""

from syncalgos import reducers
from syncalgos.base import Strategy
from syncalgos.collectives import WORKERS, Axis
from syncalgos.syncs import reduce_with


def sync_sgd(axis: Axis = WORKERS) -> Strategy:
    """Synchronous SGD: every worker steps along the mean gradient.

    At every local step, for workers' gradients g:

        g ← mean(g)

    Args:
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. Each step sends the gradients once. Replicas stay equal,
        and the result does not depend on the number of workers, up to rounding. Batch
        statistics stay local: the center holds their mean.

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.
    """
    return reduce_with(reducers.mean, axis)
