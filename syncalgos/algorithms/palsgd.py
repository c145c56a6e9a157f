"""PALSGD: DiLoCo with some local steps back towards the anchor."""

from typing import NamedTuple

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
from syncalgos.strategy import WORKERS, Axis, OwnGrads, PyTree, Strategy, factory


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

    def held(params, opt_state):
        return widen(params), () if optimizer is None else opt_state

    def around(synced: Strategy) -> Strategy:
        def init(params):
            opt_state = () if optimizer is None else optimizer.init(params)
            return PalsgdState(synced.init(widen(params)), held(params, opt_state))

        def note(grads, replica, state, step):
            kept, _ = state.before
            before = params, opt_state = held(replica.params, replica.opt_state)
            require_inner("palsgd", state.before, before)
            # What rounding took from the replica stays, unless others changed it.
            same = jax.tree.map(jnp.equal, narrow(kept, replica.params), replica.params)
            params = jax.tree.map(jnp.where, same, kept, params)
            return grads, state._replace(before=(params, opt_state))

        def sync(replica, state, step):
            drawn = jax.random.uniform(common_key(seed, step), (), jnp.float32)
            pulls, share = drawn < chance, rate(step) * proximal / chance
            params, opt_state = state.before
            anchor = synced.center(params, state.strategy)

            def leaf(x, new, c):
                u = widen(new) - widen(x.astype(new.dtype))  # from where it began
                return jnp.where(pulls, x - share * (x - c), x + u / (1 - chance))

            new = jax.tree.map(leaf, params, replica.params, anchor)
            moved = replica._replace(params=narrow(new, params))
            if optimizer is not None:
                taken = select(pulls, opt_state, replica.opt_state)
                moved = moved._replace(opt_state=taken)
            new, own = synced.sync(moved, state.strategy, step)
            rounded = new._replace(params=narrow(new.params, replica.params))
            return rounded, PalsgdState(own, (new.params, opt_state))

        return synced._replace(
            init=init,
            reduce=OwnGrads(note),
            sync=Combination(sync, (synced,), around, clock=Clock(pulls=True)),
            center=inner_center(synced),
            acts=None,
            learning_rate=learning_rate,
        )

    return around(every(outer_step(outer, axis=axis), period))
