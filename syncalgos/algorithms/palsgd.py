"""PALSGD: DiLoCo with some local steps back towards the anchor."""

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks
from syncalgos.anchors import nesterov_sgd
from syncalgos.combinators.local_steps import changed_steps
from syncalgos.combinators.primitives import outer_step
from syncalgos.combinators.schedule import every
from syncalgos.dtypes import narrow, select, widen
from syncalgos.keys import common_key
from syncalgos.reducers.reducer import check_optimizer
from syncalgos.strategy import WORKERS, Axis, Strategy


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
    """
    rate = checks.learning_rate("palsgd", learning_rate)
    chance = checks.real("palsgd: chance", chance, above=0, below=1)
    proximal = checks.real("palsgd: proximal", proximal, above=0)
    outer = nesterov_sgd("palsgd", outer_lr, outer_momentum)
    seed = checks.seed(seed)
    if optimizer is not None:
        check_optimizer("palsgd: optimizer", optimizer)

    def change(before, after, center, step):
        pulls = jax.random.uniform(common_key(seed, step), (), jnp.float32) < chance
        share = rate(step) * proximal / chance

        def leaf(x, new, c):
            u = widen(new) - widen(x.astype(new.dtype))  # from where it began
            return jnp.where(pulls, x - share * (x - c), x + u / (1 - chance))

        params = jax.tree.map(leaf, before.params, after.params, center)
        return after._replace(
            params=narrow(params, before.params),
            opt_state=select(pulls, before.opt_state, after.opt_state),
        )

    synced = every(outer_step(outer, axis=axis), period)
    made = changed_steps("palsgd", synced, change, optimizer)
    return made._replace(learning_rate=learning_rate)
