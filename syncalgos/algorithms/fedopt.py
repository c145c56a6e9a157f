"""FedOpt: an adaptive outer optimizer on the mean displacement."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory

# The second moment v, after the square s of an outer gradient.
SECOND_MOMENTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "adam": lambda v, s, b2: b2 * v + (1 - b2) * s,
    "yogi": lambda v, s, b2: v - (1 - b2) * s * jnp.sign(v - s),
    "adagrad": lambda v, s, b2: v + s,
}


class MomentsState(NamedTuple):
    """The first moment m and the second moment v of the outer gradients."""

    first: PyTree
    second: PyTree


@factory
def fedopt(
    period: int = 16,
    method: Literal["adam", "yogi", "adagrad"] = "adam",
    outer_lr: float = 0.03,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    axis: Axis = WORKERS,
) -> Strategy:
    """FedAdam, FedYogi and FedAdagrad: an adaptive outer step on the mean displacement.

    After every `period` local steps, for workers' params θ that started from x, entry
    by entry, with m that starts at 0 and v that starts at τ²:

        Δ ← mean(θ) - x;   m ← β₁ m + (1 - β₁) Δ
        adam: v ← β₂ v + (1 - β₂) Δ²;   adagrad: v ← v + Δ²
        yogi: v ← v - (1 - β₂) Δ² sign(v - Δ²)
        x, θ ← x + η m / (√v + τ)

    Args:
        period: local steps between two outer steps, at least 1.
        method: how v follows Δ²: adam, yogi or adagrad.
        outer_lr: η, about how far an entry moves in a round, above 0; the paper tunes
            it.
        b1: β₁, the decay of m, at least 0 and below 1; 0 in the paper's FedAdagrad.
        b2: β₂, the decay of v in adam and yogi, at least 0 and below 1.
        tau: τ, above 0: displacements far below it are scaled by η / 2τ at first, and
            as v decays, in adam and yogi, by η / τ.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, m and v, shaped like params, at least float32, identical
        on all workers. A sync sends params once. The center is x. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range.

    The bias of m and v is not corrected, unlike in optax's adam. The step does not grow
    with the inner learning rate: a steady Δ far above τ moves an entry by η per round,
    with adam and yogi.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import fedopt
        >>> fedopt(tau=0.1).init(jnp.zeros(2)).outer.second.round(3)
        Array([0.01, 0.01], dtype=float32)

    Source: Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2.

    Family: Outer momentum.
    """
    checks.one_of("method of fedopt", method, SECOND_MOMENTS)
    lr = checks.real("fedopt: outer_lr", outer_lr, above=0)
    b1 = checks.real("fedopt: b1", b1, least=0, below=1)
    b2 = checks.real("fedopt: b2", b2, least=0, below=1)
    tau = checks.real("fedopt: tau", tau, above=0)

    def init(params: PyTree) -> MomentsState:
        zero = jax.tree.map(jnp.zeros_like, params)
        # As in the paper; Flower's code starts at 0, and corrects for it a round ahead.
        return MomentsState(zero, jax.tree.map(lambda x: x + tau**2, zero))

    # g is -Δ.
    def adapt(
        g: jax.Array, m: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        m = b1 * m - (1 - b1) * g
        v = SECOND_MOMENTS[method](v, g * g, b2)
        return lr * m / (jnp.sqrt(v) + tau), m, v

    def update(
        updates: PyTree, state: Any, params: PyTree = None
    ) -> tuple[PyTree, MomentsState]:
        steps, *moments = over_leaves(adapt, 3, updates, *state)
        return steps, MomentsState(*moments)

    outer = optax.GradientTransformation(init, update)
    return every(outer_step(outer, axis=axis), period)
