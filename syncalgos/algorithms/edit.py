"""EDiT: outer steps along displacements that are screened, weighted and clipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import outer_rates, pseudo_gradient, restart, shipped
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.reducers._robust import Norms, Screen, empty_norms, screened_mean
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class EditState(NamedTuple):
    """The anchor, the outer momentum m, and statistics of this worker's norms."""

    anchor: PyTree
    velocity: PyTree
    seen: Norms


@factory
def edit(
    period: int = 16,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.85,
    *,
    threshold: float = 3.0,
    leaf_clip: float = 10.0,
    forgetting: float = 0.02,
    trusted: int = 10,
    axis: Axis = WORKERS,
) -> Strategy:
    """EDiT: DiLoCo with a penalty on outer gradients of unusual norm.

    After every `period` local steps, for each leaf and worker i's params θ that began
    at the anchor, with M, V and n of that leaf and worker, and m, all 0 at first:

        d ← anchor - θ;   usual: n < `trusted` or ‖d‖ ≤ M + δ max(√V, M / 1000)
        w ← exp(-‖d‖) / Σ exp(-‖d‖);   g ← Σ w d, over workers of usual d
        g ← g min(1, φ / (‖g‖ + 1e-6))
        n ← n + 1;   a ← α / (1 - (1 - α)ⁿ);   V ← (1 - a) (V + a (‖d‖ - M)²)
            M ← M + a (‖d‖ - M)
        m ← μ m + g;   anchor, θ ← anchor - η (g + μ m)

    Args:
        period: local steps between two outer steps, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        threshold: δ, above 0; norms are usual up to their mean M + δ standard
            deviations √V.
        leaf_clip: φ, the largest norm of a leaf of g, above 0.
        forgetting: α, weight of the newest norm in mean and deviation, above 0, at
            most 1.
        trusted: syncs before a norm can be unusual, at least 1; 120 by default in the
            authors' code, 10 in its example.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m, shaped like params, at least float32,
        identical on all workers; three numbers per leaf, each worker's own. A sync
        sends params once, and a norm per leaf to all. The center is the anchor.
        opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A leaf that is unusual on all workers returns to the anchor, and its m stays. NaN
    and infinity are always unusual. Other norms enter mean and variance, as in the
    authors' code: norms that stay large soon become usual. Below the clip, a steady
    drift moves the center η / (1 - μ) times as far as averaging. The paper begins with
    synchronous steps.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, edit
        >>> communication(edit(), jnp.ones(9), workers=8, steps=16).by_collective.keys()
        dict_keys(['all_gather', 'all_reduce'])

    Source: Cheng et al., "EDiT: a local-SGD-based efficient distributed training method
    for large language models", ICLR 2025, the pseudo-gradient penalty.

    Family: Outer momentum.
    """
    lr, mu = outer_rates("edit", outer_lr, outer_momentum)
    screen = Screen(
        threshold=checks.real("edit: threshold", threshold, above=0),
        forgetting=checks.share("edit: forgetting", forgetting),
        trusted=checks.whole("edit: trusted", trusted, least=1),
        leaf_clip=checks.real("edit: leaf_clip", leaf_clip, above=0),
    )

    def init(params: PyTree) -> EditState:
        anchor = widen(params)
        return EditState(anchor, zeros(params), empty_norms(anchor))

    def outer_step(
        x: jax.Array, m: jax.Array, g: jax.Array, on_any: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Where a leaf is unusual on all workers, its momentum does not change either.
        m = jnp.where(on_any, mu * m + g, m)
        return jnp.where(on_any, x - lr * (g + mu * m), x), m

    def sync(
        replica: Replica, state: EditState, step: Any
    ) -> tuple[Replica, EditState]:
        moves = pseudo_gradient(state.anchor, replica.params)
        g, on_any, norms = screened_mean(moves, state.seen, screen, axis)
        anchor, velocity = over_leaves(outer_step, 2, *state[:2], g, on_any)
        return restart(replica, anchor), EditState(anchor, velocity, norms)

    return every(Strategy(init, sync=sync, center=shipped("anchor"), axis=axis), period)
