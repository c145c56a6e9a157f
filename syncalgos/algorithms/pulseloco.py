"""PULSELoCo: DiLoCo that sends what bfloat16 params would show."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos.algorithms._anchors import (
    nesterov_sgd,
    pseudo_gradient,
    restart,
    shipped,
)
from syncalgos.collectives import takes_part
from syncalgos.combinators.chosen import mean_of_chosen, undecided
from syncalgos.combinators.decided import Decision
from syncalgos.combinators.schedule import every
from syncalgos.dtypes import widen, zeros
from syncalgos.reducers.stacking import shards
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy


class PulseState(NamedTuple):
    """The anchor, the outer optimizer's state, the residual, and the sizes sent."""

    anchor: PyTree
    outer: Any
    residual: PyTree
    decisions: tuple[Decision, ...]


def pulseloco(
    period: int = 16,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    axis: Axis = WORKERS,
) -> Strategy:
    """PULSELoCo: DiLoCo that sends only entries that change when rounded to bfloat16.

    After every `period` local steps, for worker i's params θ that began at the anchor
    and its residual e, where bf16 rounds to bfloat16 and [·] is 1 or 0 for each entry:

        s ← e + (anchor - θ);   d ← s [bf16(anchor) ≠ bf16(anchor - s)];   e ← s - d
        g ← mean(d);   m ← μ m + g;   anchor, θ ← anchor - η (g + μ m)

    Args:
        period: H, local steps between two outer steps, at least 1; 10 in the
            authors' code.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m, identical on all workers, and e, each
        worker's own, shaped like params, at least float32. A sync gathers a count from
        all workers, then as many values and indices as the worker with the most chosen
        entries has, rounded up to a multiple of a 1024th of params; or it sends d once,
        if that is less. The metric "decided" of a run tells which, and the length in
        binary digits. The center is the anchor. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    An entry is sent once it has moved by about 1/256 of itself. It sends little if
    moves are small, as with Adam at a learning rate of 1e-6 in the paper. At usual
    rates nearly all entries are sent, and it sends as much as `diloco`. The authors'
    code never sends d whole. It gathers as many entries as the worker with the most
    chosen entries has. If a worker spans several devices, each sends as much as the
    device with the most chosen entries.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, pulseloco
        >>> model, decided = np.ones(2048, np.float32), np.zeros((8, 12), bool)
        >>> decided[7, [1, 2]] = True  # 1 + 2 units of 2 entries: 6 values and indices
        >>> count = dict(workers=2, steps=8, taken=decided)
        >>> communication(pulseloco(8), model, **count).bytes_per_worker
        40.0

    Source: Miahi and Belilovsky, "Understanding and exploiting weight update sparsity
    for communication-efficient distributed RL", 2026, and the authors' code.
    """
    outer = nesterov_sgd("pulseloco", outer_lr, outer_momentum)

    def init(params):
        wide, leaves = widen(params), jax.tree.leaves(shards.whole_shapes(params))
        first = undecided(sum(x.size for x in leaves))
        return PulseState(wide, outer.init(wide), zeros(params), first)

    def is_seen(x, s):
        return x.astype(jnp.bfloat16) != (x - s).astype(jnp.bfloat16)

    def sync(replica, state, step):
        moves = pseudo_gradient(state.anchor, replica.params)
        takes = takes_part()
        owed = jax.tree.map(jnp.add, state.residual, moves)
        seen = jax.tree.map(lambda x, s: is_seen(x, s) & takes, state.anchor, owed)
        mean, decisions = mean_of_chosen(owed, seen, state.decisions, step, axis)
        updates, velocity = outer.update(mean, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        residual = jax.tree.map(lambda s, on: jnp.where(on, 0, s), owed, seen)
        state = PulseState(anchor, velocity, residual, decisions)
        return restart(replica, anchor), state

    whole = Strategy(init, sync=sync, center=shipped("anchor"), axis=axis)
    return every(whole, period)
