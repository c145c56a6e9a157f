"""PULSELoCo: DiLoCo that sends what bfloat16 params would show."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import _anchors, checks, reducers
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.collectives import takes_part, unweighted
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class PulseState(NamedTuple):
    """The anchor, the outer optimizer's state, and the residual."""

    anchor: PyTree
    outer: Any
    residual: PyTree


@factory(static=["density"])
def pulseloco(
    period: int = 16,
    density: float = 0.03,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    axis: Axis = WORKERS,
) -> Strategy:
    """PULSELoCo: DiLoCo that sends only entries that change when rounded to bfloat16.

    After every `period` local steps, for worker i's params θ that began at the anchor,
    its residual e, 0 at first as m is, where bf16 rounds to the nearest bfloat16, [·]
    is 1 or 0 for each entry, and TopK keeps the largest magnitudes of each leaf, all
    others being 0:

        s ← e + (anchor - θ);   d ← TopK(s [bf16(anchor) ≠ bf16(anchor - s)])
        e ← s - d;   g ← mean(d);   m ← μ m + g;   anchor, θ ← anchor - η (g + μ m)

    Args:
        period: H, local steps between two outer steps, at least 1; 10 in the
            authors' code.
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1. At 1 the update is the paper's.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m, identical on all workers, and e, each
        worker's own, shaped like params, at least float32. A sync gathers density · n
        values and their indices of 16 or 32 bits for each leaf of n entries. The center
        is the anchor. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center η / (1 - μ) times as far as plain averaging. The
    paper sends all entries that change, however many these are, and has no TopK. Here
    messages have a fixed length: entries beyond it wait in e, and if fewer change,
    zeros are sent. An entry changes once it has moved by about 1/256 of itself. Few do
    if moves are small, as with Adam at a learning rate of 1e-6 in the paper; at usual
    rates, nearly all do.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, pulseloco
        >>> model = np.ones(1000, np.float32)  # 30 values and indices
        >>> communication(pulseloco(8), model, workers=2, steps=8).bytes_per_worker
        180.0

    Source: Miahi and Belilovsky, "Understanding and exploiting weight update sparsity
    for communication-efficient distributed RL", 2026, and the authors' code.

    Family: Little at a time.
    """
    outer = _anchors.nesterov_sgd("pulseloco", outer_lr, outer_momentum)
    largest = reducers.top_k(checks.density("pulseloco", density), axis=axis)

    def init(params: PyTree) -> PulseState:
        anchor = widen(params)
        return PulseState(anchor, outer.init(anchor), zeros(params))

    def is_seen(x: jax.Array, s: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) != (x - s).astype(jnp.bfloat16)

    def sync(
        replica: Replica, state: PulseState, step: Any
    ) -> tuple[Replica, PulseState]:
        moves = _anchors.pseudo_gradient(state.anchor, replica.params)
        participates = takes_part()  # a worker that skips a round sends zeros
        owed = jax.tree.map(jnp.add, state.residual, moves)
        # Whether a change is seen depends on the worker's own moves, not on its weight.
        own_moves = unweighted(owed)
        visible = jax.tree.map(
            lambda x, s, move: jnp.where(is_seen(x, move) & participates, s, 0),
            state.anchor,
            owed,
            own_moves,
        )
        mean, sent_moves, _ = largest.combine(visible, (), step)
        updates, outer_state = outer.update(mean, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        residual = jax.tree.map(jnp.subtract, owed, sent_moves)
        new_state = PulseState(anchor, outer_state, residual)
        return _anchors.restart(replica, anchor), new_state

    center = _anchors.shipped("anchor")
    strategy = Strategy(init, sync=sync, center=center, axis=axis)
    return every(strategy, period)
