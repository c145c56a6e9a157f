"""Blockwise model-update filtering."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks, collectives
from syncalgos._anchors import restart, shipped
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class BMUFState(NamedTuple):
    """The center w and the velocity Δ."""

    center: PyTree
    velocity: PyTree


@factory
def bmuf(
    period: int = 16,
    block_momentum: float | None = None,
    block_lr: float = 1.0,
    nesterov: bool = False,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """Blockwise model-update filtering: momentum on the average of the models.

    After every `period` local steps, for workers' params θ that started from y, w that
    starts there too, and Δ, 0 at first:

        Δ ← μ Δ + ζ (mean(θ) - y);   w ← w + Δ;   y, θ ← w (nesterov: w + μ Δ)

    Args:
        period: local steps in a block, at least 1.
        block_momentum: μ, at least 0 and below 1; None means 1 - 1/workers.
        block_lr: ζ, the factor on a block's mean update, above 0.
        nesterov: restart workers from the look-ahead point w + μ Δ; the center stays w.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: w and Δ, shaped like params, at least float32, identical on
        all workers. A block sends params once. The center is w. opt_state and buffers
        stay local (see `average`, `reset`).

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center ζ / (1 - μ) times as far as plain averaging. With
    nesterov, a block's update is measured from the look-ahead point; if measured from
    w, the recursion diverges for μ ≥ 1/2. Published code differs: see
    docs/differences.toml.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, bmuf
        >>> def drift(w, x):
        ...     return -w * x.mean()
        >>> for strategy in (bmuf(4, block_momentum=0.0), bmuf(4, block_momentum=0.5)):
        ...     trainer = DataParallel(drift, optax.sgd(0.1), strategy, workers=4)
        ...     state, _ = trainer.run(trainer.init(jnp.float32(0)), jnp.ones((40, 4)))
        ...     print(round(float(trainer.center(state).params), 2))
        4.0
        7.2

    Source: Chen and Huo, "Scalable training of deep learning machines by incremental
    block training with intra-block parallel optimization and blockwise model-update
    filtering", ICASSP 2016.

    Family: Outer momentum.
    """
    if block_momentum is not None:
        block_momentum = checks.real(
            "bmuf: block_momentum", block_momentum, least=0, below=1
        )
    # CNTK's "learning rate" is N (1 - μ) lr in these units; Caffe2 trains at lr / N.
    block_lr = checks.real("bmuf: block_lr", block_lr, above=0)

    def init(params: PyTree) -> BMUFState:
        return BMUFState(widen(params), zeros(params))

    def sync(
        replica: Replica, state: BMUFState, step: Any
    ) -> tuple[Replica, BMUFState]:
        workers = collectives.size(axis)
        momentum = block_momentum
        if momentum is None:
            momentum = 1 - 1 / workers

        # y follows from w and Δ: a third copy of the params would be the largest part
        # of the state.
        def look_ahead(w: jax.Array, d: jax.Array) -> jax.Array:
            return w + momentum * d if nesterov else w

        def update_block(
            w: jax.Array, d: jax.Array, mean: jax.Array, x: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # From y as the workers had it, in their dtype. fairseq and CNTK never take
            # the look-ahead back; Caffe2 has its sign flipped.
            d = momentum * d + block_lr * (mean - look_ahead(w, d).astype(x.dtype))
            return w + d, d

        mean = collectives.mean(widen(replica.params), axis)
        new_state = BMUFState(
            *over_leaves(update_block, 2, *state, mean, replica.params)
        )
        return restart(replica, jax.tree.map(look_ahead, *new_state)), new_state

    return every(Strategy(init, sync=sync, center=shipped("center"), axis=axis), period)
