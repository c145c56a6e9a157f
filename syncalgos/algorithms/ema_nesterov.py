"""EMA-Nesterov: gradients are taken ahead of the model, along its average move."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import pseudo_gradient, restart, shipped
from syncalgos._combinators.primitives import reduce_with
from syncalgos._dtypes import narrow, widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class EmaNesterovState(NamedTuple):
    """The model θ, its average move m, the highest rate so far, and y, given out."""

    model: PyTree
    velocity: PyTree
    highest: jax.Array
    ahead: PyTree


@factory
def ema_nesterov(
    decay: float = 0.99,
    lookahead: float = 0.3,
    *,
    learning_rate: checks.LearningRate,
    axis: Axis = WORKERS,
) -> Strategy:
    """EMA-Nesterov: gradients are taken ahead of the model, along its average move.

    At every local step, for workers' gradients g at their params y, which the inner
    optimizer moves to A(y), and β = `lookahead` · the next step's learning rate / the
    highest up to it; θ starts at y, and m at 0:

        g ← mean(g)
        m ← γ m + (1 - γ) (A(y) - θ);   θ ← A(y);   y ← θ + β m

    Args:
        decay: γ, the decay of the average move, at least 0 and below 1.
        lookahead: β at the highest learning rate, at least 0 and below 1; 0.3 and 0.6
            in published runs.
        learning_rate: the inner optimizer's at each local step: a number above 0
            or a schedule.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: θ, m and y, shaped like params, at least float32, and a
        number, identical on all workers. Each step sends gradients once. Replicas stay
        identical. The center is θ.

    Raises:
        ValueError: a parameter outside its range.

    It is meant for one worker (see `as_optimizer`); several workers take the same steps
    as one. A steady drift goes 1 / (1 - β) times as far as in plain training. With a γ
    of 0 and a constant rate, it is Nesterov's momentum β. The paper sets β to 0 during
    warmup and in the last steps; here β is 0 where the schedule is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import as_optimizer, center_of, ema_nesterov
        >>> strategy = ema_nesterov(decay=0.5, lookahead=0.5, learning_rate=1.0)
        >>> optimizer = as_optimizer(strategy, optax.sgd(1.0))
        >>> y = jnp.float32(0)
        >>> state = optimizer.init(y)
        >>> updates, state = optimizer.update(jnp.float32(-1), state, y)
        >>> y = optax.apply_updates(y, updates)
        >>> float(y), float(center_of(strategy, state, y))  # m is 0.5
        (1.25, 1.0)

    Source: Yau et al., "EMA-Nesterov: stabilizing Nesterov's lookahead for accelerated
    deep learning optimization", 2026, arXiv:2605.25395; modded-nanogpt, records 39, 40.

    Family: Gradients at every step.
    """
    decay = checks.real("ema_nesterov: decay", decay, least=0, below=1)
    lookahead = checks.real("ema_nesterov: lookahead", lookahead, least=0, below=1)
    rate = checks.learning_rate("ema_nesterov", learning_rate)

    def init(params: PyTree) -> EmaNesterovState:
        model = widen(params)
        return EmaNesterovState(model, zeros(params), jnp.zeros(()), model)

    def sync(
        replica: Replica, state: EmaNesterovState, step: Any
    ) -> tuple[Replica, EmaNesterovState]:
        highest = jnp.maximum(state.highest, jnp.maximum(rate(step), rate(step + 1)))
        share = rate(step + 1) / jnp.where(highest > 0, highest, 1)

        def step_leaf(
            old_model: jax.Array, m: jax.Array, ahead: jax.Array, move_back: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            model = ahead - move_back
            m = decay * m + (1 - decay) * (model - old_model)
            return model, m, model + lookahead * share * m

        moves_back = pseudo_gradient(state.ahead, replica.params)
        model, m, ahead = over_leaves(
            step_leaf, 3, state.model, state.velocity, state.ahead, moves_back
        )
        new_state = narrow(EmaNesterovState(model, m, highest, ahead), state)
        return restart(replica, new_state.ahead), new_state

    return Strategy(
        init,
        reduce_with("mean", axis=axis).reduce,
        sync,
        shipped("model"),
        axis=axis,
        learning_rate=learning_rate,
    )
