"""Blockwise model-update filtering."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.schedule import every
from syncalgos.dtypes import narrow, widen
from syncalgos.strategy import Strategy


class BMUFState(NamedTuple):
    """The center w and the velocity Δ."""

    center: PyTree
    velocity: PyTree


def bmuf(
    period: int = 16,
    block_momentum: float | None = None,
    block_lr: float = 1.0,
    nesterov: bool = False,
    axis: Axis = WORKERS,
) -> Strategy:
    """Blockwise model-update filtering: momentum on the average of the models.

    After every `period` local steps, for workers' params θ that started from y:

        Δ ← μ Δ + ζ (mean(θ) - y);   w ← w + Δ;   y, θ ← w (nesterov: w + μ Δ)

    Args:
        period: local steps in a block, at least 1.
        block_momentum: μ, at least 0 and below 1; none means 1 - 1/workers.
        block_lr: ζ, the factor on a block's mean update, above 0.
        nesterov: restart the workers from the look-ahead point w + μ Δ.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: w and Δ, shaped like params, at least float32, equal on all
        workers (y follows from them). A block sends params once. The center is w, with
        nesterov too. opt_state and buffers stay local (see `average`, `reset`).

    Raises:
        ValueError: a parameter outside its range.

    A steady drift goes ζ / (1 - μ) times as far as plain averaging takes it. With
    nesterov the block's update is measured from the look-ahead point: measured from w
    it diverges for μ ≥ 1/2. Published codes differ from the paper here: see
    docs/algorithms.md.

    Source: Chen and Huo, "Scalable training of deep learning machines by incremental
    block training with intra-block parallel optimization and blockwise model-update
    filtering", ICASSP 2016.
    """
    if block_momentum is not None:
        label = "bmuf: block_momentum"
        block_momentum = checks.real(label, block_momentum, least=0, below=1)
    block_lr = checks.real("bmuf: block_lr", block_lr, above=0)

    def start(state, momentum):  # y, from where the workers start a block
        if not nesterov:
            return state.center
        return jax.tree.map(lambda w, d: w + momentum * d, *state)

    def init(params):
        center = widen(params)
        return BMUFState(center, jax.tree.map(jnp.zeros_like, center))

    def sync(replica, state, step):
        workers = collectives.size(axis)
        momentum = 1 - 1 / workers if block_momentum is None else block_momentum
        velocity = jax.tree.map(
            lambda d, average, y: momentum * d + block_lr * (average - y),
            state.velocity,
            collectives.mean(widen(replica.params), axis),
            narrow(start(state, momentum), replica.params),
        )
        state = BMUFState(jax.tree.map(jnp.add, state.center, velocity), velocity)
        params = narrow(start(state, momentum), replica.params)
        return replica._replace(params=params), state

    block = Strategy(
        init, sync=sync, center=lambda params, state: narrow(state.center, params)
    )
    return every(period, block)
