"""FedDyn: local losses regularised so that their minima agree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._anchors import restart, shipped, start
from syncalgos._combinators.schedule import sync_every
from syncalgos._dtypes import narrow, widen, zeros
from syncalgos.strategy import (
    WORKERS,
    Axis,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class FedDynState(NamedTuple):
    """The anchor x, and the sum h of the worker's moves away from it."""

    anchor: PyTree
    moved: PyTree


@factory
def feddyn(
    period: int = 16, proximal: float = 0.1, *, axis: Axis = WORKERS
) -> Strategy:
    """FedDyn: a pull to the last model, and a linear term that undoes its bias.

    At every local step, for worker i's gradients g, params θ that began at x, and h,
    zero at first; and after every `period` of them:

        g ← g + α (θ - x + h)
        h ← h + θ - x;   x, θ ← mean(θ) + mean(h)

    In the paper's terms h is -∇̂ᵢ / α.

    Args:
        period: local steps of a round, at least 1.
        proximal: α, the strength of the pull, above 0; 0.01 in the authors' code.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, identical on all workers, and h, each worker's own, shaped
        like params, at least float32. A sync sends θ + h once. The center is x.
        opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center 1 / (α · period · lr) times as far as plain
    averaging: with a small α and few local steps, x overshoots. Workers with different
    data converge to the minimum of their mean loss.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, feddyn
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(feddyn(8), model, workers=2, steps=16)
        >>> sent.syncs, sent.bytes_per_worker  # params alone: no variate is sent
        (2, 800.0)

    Source: Acar et al., "Federated learning based on dynamic regularization", ICLR
    2021, algorithm 1, all workers.

    Family: Against drift.
    """
    # The paper's multiplier is -α h; h is in units of params, as in the authors' code.
    proximal = checks.real("feddyn: proximal", proximal, above=0)

    def init(params: PyTree) -> FedDynState:
        return FedDynState(widen(params), zeros(params))

    def pull(g: jax.Array, x: jax.Array, anchor: jax.Array, h: jax.Array) -> jax.Array:
        return g + proximal * (x - anchor + h)

    def reduce(
        grads: PyTree, replica: Replica, state: FedDynState, step: Any
    ) -> tuple[PyTree, FedDynState]:
        params = widen(replica.params)
        round_start = start(state.anchor, replica.params)
        pulled = jax.tree.map(pull, widen(grads), params, round_start, state.moved)
        return narrow(pulled, grads), state

    def sync(
        replica: Replica, state: FedDynState, step: Any
    ) -> tuple[Replica, FedDynState]:
        params = widen(replica.params)
        round_start = start(state.anchor, replica.params)
        moved = jax.tree.map(
            lambda h, x, y: h + x - y, state.moved, params, round_start
        )
        # Sent as one: mean(h) is needed with mean(θ) alone.
        anchor = collectives.mean(jax.tree.map(jnp.add, params, moved), axis)
        return restart(replica, anchor), FedDynState(anchor, moved)

    strategy = Strategy(init, OwnGrads(reduce), sync, shipped("anchor"), axis=axis)
    return sync_every(strategy, period)
