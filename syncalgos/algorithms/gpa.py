"""GPA: gradients between a fast model and its moving average, which is evaluated."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks
from syncalgos._anchors import pseudo_gradient, restart, shipped
from syncalgos._combinators.primitives import reduce_with
from syncalgos._dtypes import narrow, widen
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class GpaState(NamedTuple):
    """The average x, the fast model z, and y, which the workers got."""

    average: PyTree
    fast: PyTree
    ahead: PyTree


@factory
def gpa(decay: float = 0.98, mixing: float = 0.7, *, axis: Axis = WORKERS) -> Strategy:
    """GPA (generalized primal averaging): smoothed DiLoCo for one worker.

    At every local step, for workers' gradients g at their params y, which the inner
    optimizer moves by d, with x and z that start at y:

        g ← mean(g)
        z ← z + d;   x ← μx x + (1 - μx) z;   y ← μy x + (1 - μy) z

    Args:
        decay: μx, the decay of the average x, at least 0 and below 1: it averages over
            about 1 / (1 - μx) steps. The paper takes 0.9967, for long runs.
        mixing: μy, the share of x in the params y, above 0 and at most 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, z and y, shaped like params, at least float32, identical
        on all workers. Each step sends gradients once. Replicas stay identical. The
        center is x.

    Raises:
        ValueError: a parameter outside its range.

    It is meant for one worker, whose optimizer it smooths (see `as_optimizer`); several
    workers take the same steps as one. At μx = 0 it is plain training. DiLoCo of one
    worker with momentum μ and period H corresponds to μx = μ^(1/H): 0.9967 corresponds
    to μ = 0.9 and H = 32. In the paper, weight decay shrinks z; here the inner
    optimizer applies it to y.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import as_optimizer, center_of, gpa
        >>> strategy = gpa(decay=0.5, mixing=0.5)
        >>> optimizer = as_optimizer(strategy, optax.sgd(1.0))
        >>> y = jnp.float32(0)
        >>> state = optimizer.init(y)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update(jnp.float32(-1), state, y)
        ...     y = optax.apply_updates(y, updates)
        >>> float(y), float(center_of(strategy, state, y))  # z is 2
        (1.625, 1.25)

    Source: Defazio et al., "Smoothing DiLoCo with primal averaging for faster training
    of LLMs", 2025, arXiv:2512.17131, and its authors' code.

    Family: Gradients at every step.
    """
    decay = checks.real("gpa: decay", decay, least=0, below=1)
    mixing = checks.share("gpa: mixing", mixing)
    mean = reduce_with("mean", axis=axis)

    def init(params: PyTree) -> GpaState:
        model = widen(params)
        return GpaState(model, model, model)

    def sync(replica: Replica, state: GpaState, step: Any) -> tuple[Replica, GpaState]:
        def step_leaf(
            x: jax.Array, z: jax.Array, move_back: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            z = z - move_back
            x = z + decay * (x - z)
            return x, z, z + mixing * (x - z)

        moves_back = pseudo_gradient(state.ahead, replica.params)
        models = over_leaves(step_leaf, 3, state.average, state.fast, moves_back)
        new_state = narrow(GpaState(*models), state)
        return restart(replica, new_state.ahead), new_state

    return Strategy(init, mean.reduce, sync, shipped("average"), axis=axis)
