"""PALSGD: DiLoCo with some local steps back towards the anchor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks
from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.introspection import Clock, Combination, inner_center
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import narrow, select, widen
from syncalgos._keys import common_key
from syncalgos.algorithms._asynchrony import require_inner
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.strategy import (
    WORKERS,
    Axis,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class PalsgdState(NamedTuple):
    """State of `palsgd`.

    Attributes:
        strategy: the state of `outer_step`.
        before: params, at least float32 and not rounded to their own dtype, and
            opt_state before the local step.
    """

    strategy: PyTree
    before: tuple[PyTree, PyTree]


@factory
def palsgd(
    period: int = 16,
    *,
    learning_rate: checks.LearningRate,
    chance: float = 0.2,
    proximal: float = 0.5,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    seed: int = 0,
    optimizer: optax.GradientTransformation | None = None,
    axis: Axis = WORKERS,
) -> Strategy:
    """PALSGD (pseudo-asynchronous local SGD): DiLoCo with random pulls to the anchor.

    At local steps drawn with probability p, identical on all workers, params θ are
    pulled to the anchor, from which the round began. With the step's learning rate γ,
    the inner optimizer's update u, and m, 0 at first:

        at a step that is drawn: θ ← θ - (γ κ / p) (θ - anchor)
        at any other step: θ ← θ + u / (1 - p)
        after every `period` steps: g ← anchor - mean(θ);   m ← μ m + g
            anchor, θ ← anchor - η (g + μ m)

    Args:
        period: H, local steps between two outer steps, at least 1.
        learning_rate: γ, the inner optimizer's at each local step: a number above 0
            or a schedule.
        chance: p, the probability that a local step is a pull, above 0 and below 1.
        proximal: κ, the strength of the pull, above 0.
        outer_lr: η, the outer learning rate, above 0; 0.1 in the authors' example.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        seed: seeds the draws, identical on all workers.
        optimizer: the inner optimizer; if given, its state, with the count of its
            schedule, does not change at pulls. With None it keeps changing.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: that of `outer_step`, with the anchor and m, identical on all
        workers; each worker's params, at least float32, and opt_state from before the
        local step. A sync sends params once. The center is the anchor.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center η (1 - (1 - κ γ)^H) / ((1 - μ) H κ γ) times as far
    as plain averaging, on average. As in the authors' code, all workers draw from one
    seed, and a pull is not a step of the inner optimizer. That code computes no
    gradient at a pull; the engine computes one but does not use it.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, palsgd
        >>> model = np.ones(10, np.float32)
        >>> sent = communication(palsgd(learning_rate=0.1), model, workers=2, steps=64)
        >>> sent.syncs, sent.bytes_per_worker  # as of diloco
        (4, 160.0)

    Source: Naganuma et al., "Pseudo-asynchronous local SGD: robust and efficient
    data-parallel training", TMLR 2025.

    Family: Outer momentum.
    """
    rate = checks.learning_rate("palsgd", learning_rate)
    chance = checks.real("palsgd: chance", chance, above=0, below=1)
    proximal = checks.real("palsgd: proximal", proximal, above=0)
    outer = nesterov_sgd("palsgd", outer_lr, outer_momentum)
    seed = checks.seed(seed)
    if optimizer is not None:
        check_optimizer("palsgd: optimizer", optimizer)

    def keep_values(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        return widen(params), () if optimizer is None else opt_state

    def pull_around(synced: Strategy) -> Strategy:
        def init(params: PyTree) -> PalsgdState:
            opt_state = () if optimizer is None else optimizer.init(params)
            inner_state = synced.init(widen(params))
            return PalsgdState(inner_state, keep_values(params, opt_state))

        def store_replica(
            grads: PyTree, replica: Replica, state: PalsgdState, step: Any
        ) -> tuple[PyTree, PalsgdState]:
            unrounded, _ = state.before
            new_values = keep_values(replica.params, replica.opt_state)
            require_inner("palsgd", state.before, new_values)
            params, opt_state = new_values
            # What rounding took from the replica stays, unless others changed it.
            is_unchanged = jax.tree.map(
                jnp.equal, narrow(unrounded, replica.params), replica.params
            )
            params = jax.tree.map(jnp.where, is_unchanged, unrounded, params)
            return grads, state._replace(before=(params, opt_state))

        def sync(
            replica: Replica, state: PalsgdState, step: Any
        ) -> tuple[Replica, PalsgdState]:
            draw = jax.random.uniform(common_key(seed, step), (), jnp.float32)
            pulls = draw < chance
            share = rate(step) * proximal / chance
            old_params, old_opt_state = state.before
            anchor = synced.center(old_params, state.strategy)

            def move_leaf(x: jax.Array, new_x: jax.Array, c: jax.Array) -> jax.Array:
                # The inner update, from the rounded params on.
                u = widen(new_x) - widen(x.astype(new_x.dtype))
                return jnp.where(pulls, x - share * (x - c), x + u / (1 - chance))

            params = jax.tree.map(move_leaf, old_params, replica.params, anchor)
            moved = replica._replace(params=narrow(params, old_params))
            if optimizer is not None:
                opt_state = select(pulls, old_opt_state, replica.opt_state)
                moved = moved._replace(opt_state=opt_state)
            synced_replica, inner_state = synced.sync(moved, state.strategy, step)
            new_values = synced_replica.params, old_opt_state
            rounded = narrow(synced_replica.params, replica.params)
            new_state = PalsgdState(inner_state, new_values)
            return synced_replica._replace(params=rounded), new_state

        return synced._replace(
            init=init,
            reduce=OwnGrads(store_replica),
            sync=Combination(sync, (synced,), pull_around, clock=Clock(pulls=True)),
            center=inner_center(synced),
            acts=None,
            learning_rate=learning_rate,
        )

    return pull_around(every(outer_step(outer, axis=axis), period))
