"""HeLoCo: workers never wait; late updates are turned towards the momentum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos._anchors import outer_rates
from syncalgos._dtypes import if_finite, narrow, norm, widen, zeros
from syncalgos.algorithms._asynchrony import asynchronous, even_clocks
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory

TINY = 1e-8
"""ε, the norm below which a leaf has no direction."""

SHRINK_CAP = 0.5  # b, table 3
DOUBT = 3.0  # κ, table 3


class MomentumServer(NamedTuple):
    """The server: the model x, and the momentum m, a mean of updates."""

    params: PyTree
    velocity: PyTree


@factory
def heloco(
    period: int = 16,
    # At the paper's 0.7 the center of a small model oscillates (docs/asynchronous.md).
    outer_lr: float = 0.3,
    outer_momentum: float = 0.9,
    *,
    arrival_weight: float | None = None,
    aligned: float = 0.2,
    shrink: float = 0.5,
    turn: float = 1.0,
    slowest: float = 0.5,
    dynamic_steps: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    axis: Axis = WORKERS,
) -> Strategy:
    """HeLoCo: Async DiLoCo with late updates turned towards the server's momentum.

    A worker that has gone from y to θ in `period` of its local steps sends y - θ to a
    server with a model x and a momentum m, 0 at first. The server applies updates in
    order of arrival, leaf by leaf, with c the cosine between Δ and m, and ε = 1e-8:

        Δ ← y - θ;   f ← |Δ| / (|Δ| + 3 |m| + ε)
        if c < 0: Δ ← Δ - min(-s c f, 1/2) c |Δ| m / |m|
        if 0 ≤ c < a: l ← min(r (1 - c) f, 1);   d ← (1 - l) Δ / |Δ| + l m / |m|
            Δ ← |Δ| d / max(|d|, ε)
        m ← μ m + (1 - μ) ρ Δ;   x ← x - η (ρ Δ + μ m);   y, θ ← x - η μ m

    Δ is kept unchanged where c ≥ a, and where |Δ| or |m| is below ε, as at first.

    Args:
        period: H, a worker's local steps in a round, at least 1.
        outer_lr: η, the outer learning rate, above 0; 0.7 in the paper.
        outer_momentum: μ, the outer momentum, at least 0 and below 1.
        arrival_weight: ρ, the weight of an update, above 0; None means 1 / √workers.
        aligned: a, the cosine from which an update is kept unchanged, at least 0.
        shrink: s, how strongly a part against the momentum is reduced, at least 0.
        turn: r, how far any other update is turned towards the momentum, at least 0.
        slowest: speed of the last worker, above 0 and at most 1; the first has speed 1,
            and speeds fall evenly in between.
        dynamic_steps: whether a worker of speed s makes ⌊s H⌋ local steps a round, at
            least 1, instead of H.
        optimizer: the inner optimizer; if given, its state does not change while its
            worker rests. With None it keeps changing.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x and m, shaped like params, at least float32, identical on
        all workers; each worker's own y, params and opt_state. At an arrival, each
        worker gathers all updates and acts as the server would. The center is x.
        Buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    It runs on the clock of `async_diloco`, and drops updates that are not finite. A
    steady drift moves the center N mean(speed) ρ η (1 + μ) times as far as plain
    averaging, for N workers.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, heloco
        >>> sent = communication(heloco(4), np.ones(9), workers=2, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 12, 16])

    Source: Asif et al., "HeLoCo: efficient asynchronous low-communication training
    under data and device heterogeneity", 2026, algorithm 2; details as in its code.

    Family: Late arrivals.
    """
    make_clock = even_clocks("heloco", period, slowest, dynamic_steps)
    lr, momentum = outer_rates("heloco", outer_lr, outer_momentum)
    if arrival_weight is not None:
        arrival_weight = checks.real("heloco: arrival_weight", arrival_weight, above=0)
    aligned = checks.real("heloco: aligned", aligned, least=0)
    shrink = checks.real("heloco: shrink", shrink, least=0)
    turn = checks.real("heloco: turn", turn, least=0)

    def init_server(params: PyTree) -> MomentumServer:
        return MomentumServer(widen(params), zeros(params))

    def push(
        server: MomentumServer, update: PyTree, worker: jax.Array
    ) -> MomentumServer:
        weight = arrival_weight
        if weight is None:
            weight = collectives.size(axis) ** -0.5
        update = jax.tree.map(
            lambda x, m: weight * turn_update(x, m), update, server.velocity
        )

        def step_leaf(
            x: jax.Array, m: jax.Array, u: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            m = momentum * m + (1 - momentum) * u
            return x - lr * (u + momentum * m), m

        new_server = MomentumServer(*over_leaves(step_leaf, 2, *server, update))
        return if_finite(update, narrow(new_server, server), server)

    def turn_update(x: jax.Array, m: jax.Array) -> jax.Array:
        size = norm(x)
        momentum_size = norm(m)
        u = x / jnp.maximum(size, TINY)
        v = m / jnp.maximum(momentum_size, TINY)
        cosine = jnp.sum(u * v)
        trust = size / (size + DOUBT * momentum_size + TINY)
        shrink_share = jnp.minimum(-shrink * cosine * trust, SHRINK_CAP)
        shrunk = x - shrink_share * cosine * size * v
        turn_share = jnp.minimum(turn * (1 - cosine) * trust, 1)
        mixed = (1 - turn_share) * u + turn_share * v
        rotated = size * mixed / jnp.maximum(norm(mixed), TINY)
        is_unchanged = (cosine >= aligned) | (size < TINY) | (momentum_size < TINY)
        return jnp.where(is_unchanged, x, jnp.where(cosine < 0, shrunk, rotated))

    # A look-ahead: the worker starts from where the momentum alone would lead.
    def read_model(server: MomentumServer, worker: jax.Array) -> PyTree:
        return jax.tree.map(lambda x, m: x - lr * momentum * m, *server)

    return asynchronous(
        "heloco", init_server, push, make_clock, optimizer, axis, read_model
    )
