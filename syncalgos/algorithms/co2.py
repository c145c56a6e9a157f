"""CO2: outer momentum on averages that have a whole round to arrive."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks
from syncalgos._anchors import outer_rates
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import norm
from syncalgos.reducers import late
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory


class MomentumState(NamedTuple):
    """The outer momentum m."""

    momentum: PyTree


@factory
def co2(
    period: int = 16,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    *,
    entry_clip: float | None = None,
    penalty: bool = True,
    axis: Axis = WORKERS,
) -> Strategy:
    """CO2: outer momentum on the pseudo-gradient of the round before.

    After every `period` local steps, for workers' params θ that started from x, G the
    pseudo-gradient that was sent a round ago, and s the last step of x; G, s and m are
    0 at first, and Λ is 1 where G is 0:

        Λ ← 1 + ‖s‖ / ‖G‖;   m ← β m + G / Λ;   s ← α clip(m);   x, θ ← x - s
        G ← mean(x - θ), of the old x, used a round later

    Args:
        period: τ, local steps between two outer steps, at least 1; the authors' is 48.
        outer_lr: α, above 0.
        outer_momentum: β, at least 0 and below 1; the authors' code has 0 up to 16
            workers, then 0.2 to 0.6.
        entry_clip: φ, the largest magnitude of an entry of m in a step, above 0; None
            means no clipping.
        penalty: divide by Λ, which is large if x has moved far since G was measured.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, m and G, shaped like params, at least float32, identical
        on all workers. A sync sends params once, with a whole round to arrive. The
        center is x. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    When the first round ends, nothing has arrived: the workers restart from x. A steady
    drift moves the center α / ((1 - β) Λ) times as far as plain averaging, once Λ has
    settled: 0.62 times as far with the defaults. With β = 0.5, small models oscillate.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import co2, communication
        >>> sent = communication(co2(8), jnp.ones(1000), workers=8, steps=32)
        >>> co2(8).late, sent.syncs, sent.bytes_per_worker
        (8, 4, 28000.0)

    Source: Sun et al., "CO2: efficient distributed training with full
    communication-computation overlap", ICLR 2024, algorithm 1. Λ, with norms over all
    params, is this library's reading of the staleness gap penalty: see
    docs/differences.toml.

    Family: Late arrivals.
    """
    lr, beta = outer_rates("co2", outer_lr, outer_momentum)
    bound = jnp.inf
    if entry_clip is not None:
        bound = checks.real("co2: entry_clip", entry_clip, above=0)

    def step_along(momentum: PyTree) -> PyTree:
        return jax.tree.map(lambda m: -lr * jnp.clip(m, -bound, bound), momentum)

    def compute_gap(arrived: PyTree, momentum: PyTree) -> float | jax.Array:  # Λ
        if not penalty:
            return 1.0
        # Without the penalty two rounds step along one update, and training may
        # oscillate. The authors' code has a constant penalty of 1.
        step_norm = norm(step_along(momentum))
        arrived_norm = norm(arrived)
        divisor = jnp.where(arrived_norm > 0, arrived_norm, 1)
        return 1 + jnp.where(arrived_norm > 0, step_norm / divisor, 0)

    def init(params: PyTree) -> MomentumState:
        return MomentumState(jax.tree.map(jnp.zeros_like, params))

    # The updates are what has arrived, G.
    def update(
        updates: PyTree, state: Any, params: PyTree = None
    ) -> tuple[PyTree, MomentumState]:
        scale = compute_gap(updates, state.momentum)
        momentum = jax.tree.map(
            lambda m, g: beta * m + (g / scale).astype(m.dtype), *state, updates
        )
        return step_along(momentum), MomentumState(momentum)

    outer = optax.GradientTransformation(init, update)
    return every(outer_step(outer, late(), axis=axis), period)
