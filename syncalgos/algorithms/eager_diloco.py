"""DiLoCo with eager updates: the others' outer gradients are one round old."""

from typing import Any, NamedTuple

import jax
import optax

from syncalgos import _anchors, collectives
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class EagerState(NamedTuple):
    """This worker's anchor and outer momentum; its last outer gradient and the mean."""

    anchor: PyTree
    outer: PyTree
    own: PyTree
    mean: PyTree


@factory
def eager_diloco(
    period: int = 16,
    outer_lr: float = 0.4,
    # The largest value that is stable with a round of delay at this rate
    # (docs/studies/atlas.md). The paper's 0.9 makes small models oscillate.
    outer_momentum: float = 0.4,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """DiLoCo with eager updates: own outer gradients at once, the others' a round late.

    After every `period` local steps, for N workers, worker i's params θ that began at
    its own anchor, and G and D the mean and its own outer gradient of the last round,
    0 at first as m is:

        d ← anchor - θ;   g ← G + (d - D) / N;   m ← μ m + g
        anchor, θ ← anchor - η (g + μ m);   D ← d;   G ← mean(d), used a round later

    Args:
        period: H, local steps between two outer steps, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1; 0.9 in
            the paper.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: each worker's own anchor, m and D, and G, identical on all,
        shaped like params, at least float32. A sync sends params once, with a whole
        round to arrive. The center is the mean of the anchors. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree: each is ahead by its own gradient. When the first round ends,
    nothing has arrived from the others. A steady drift moves the center η / (1 - μ)
    times as far as plain averaging.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, diloco, eager_diloco
        >>> for strategy in (diloco(16), eager_diloco(16)):
        ...     sent = communication(strategy, jnp.ones(1000), workers=8, steps=32)
        ...     print(strategy.late, sent.bytes_per_worker)
        0 14000.0
        16 14000.0

    Source: Kale, Douillard and Donchev, "Eager updates for overlapped communication and
    computation in DiLoCo", 2025, algorithm 3.

    Family: Late arrivals.
    """
    outer = _anchors.nesterov_sgd("eager_diloco", outer_lr, outer_momentum)

    def init(params: PyTree) -> EagerState:
        anchor = widen(params)
        zero = zeros(params)
        return EagerState(anchor, outer.init(anchor), zero, zero)

    def sync(
        replica: Replica, state: EagerState, step: Any
    ) -> tuple[Replica, EagerState]:
        collectives.no_mean("a mean with today's own part")
        workers = collectives.size(axis)
        own_grads = _anchors.pseudo_gradient(state.anchor, replica.params)
        # The mean is a round old; only this worker's own part is replaced by the
        # current one.
        eager = jax.tree.map(
            lambda g, d, old_d: g + (d - old_d) / workers,
            state.mean,
            own_grads,
            state.own,
        )
        updates, outer_state = outer.update(eager, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        mean = collectives.mean(own_grads, axis)
        new_state = EagerState(anchor, outer_state, own_grads, mean)
        return _anchors.restart(replica, anchor), new_state

    center = _anchors.shipped("anchor", axis)
    strategy = Strategy(init, sync=sync, center=center, axis=axis, late=period)
    return every(strategy, period)
