"""Servers for `asynchronous`: how one worker's update changes the model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos.dtypes import if_finite, narrow, norm, select, weak, widen, zeros
from syncalgos.reducers.reducer import over_leaves
from syncalgos.strategy import PyTree


class Server(NamedTuple):
    """The server of `delayed_nesterov`.

    Attributes:
        params: the model θ.
        velocity: the momentum m.
        total: D, the sum of the updates since the momentum last changed.
        arrived: the number of these updates, an int32 scalar.
    """

    params: PyTree
    velocity: PyTree
    total: PyTree
    arrived: jax.Array


def new_server(params: PyTree) -> Server:
    """Makes the server before any update, at least float32."""
    zero = zeros(params)
    return Server(widen(params), zero, zero, jnp.int32(0))


def delayed_nesterov(
    server: Server,
    update: PyTree,
    lr: float,
    momentum: float,
    buffer: int | jax.Array,
    early: float,
) -> Server:
    """Applies an update Δ to the server, unless Δ is not finite.

    With D ← D + Δ, and B updates in a buffer:

        the last of a buffer: m ← β m + D / B;  θ ← θ - η ((1 - c B + c) β m + Δ / B);
                              D ← 0
        any other:            θ ← θ - η (c β m + Δ / B)

    Args:
        server: the server before the update.
        update: Δ, start - end of a worker's round, shaped like params.
        lr: η, above 0.
        momentum: β, at least 0 and below 1.
        buffer: B, at least 1.
        early: c, at least 0 and at most 1 / B.

    Returns:
        The server after the update.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    algorithm 3.
    """
    is_last = (server.arrived + 1) % buffer == 0
    share = jnp.where(is_last, 1 - early * buffer + early, early)
    by = buffer if isinstance(buffer, int) else weak("buffer", buffer)

    def step(x, m, d, u):
        d = d + u
        m = jnp.where(is_last, momentum * m + d / by, m)
        x = x - lr * (share * momentum * m + u / by)
        return x, m, jnp.where(is_last, 0, d)

    x, m, d = over_leaves(step, 3, *server[:3], update)
    new = Server(x, m, d, (server.arrived + 1) % buffer)
    return if_finite(update, narrow(new, server), server)


class Averaging(NamedTuple):
    """The server of `averaging_nesterov`: the model θ, and the momentum m, a mean."""

    params: PyTree
    velocity: PyTree


def new_averaging(params: PyTree) -> Averaging:
    """Makes the server before any update, at least float32."""
    return Averaging(widen(params), zeros(params))


def averaging_nesterov(
    server: Averaging, update: PyTree, lr: float, momentum: float
) -> Averaging:
    """Applies an update Δ to the server, unless Δ is not finite.

    m ← μ m + (1 - μ) Δ;   θ ← θ - η (Δ + μ m)

    Args:
        server: the server before the update.
        update: Δ, start - end of a worker's round, shaped like params.
        lr: η, above 0.
        momentum: μ, at least 0 and below 1.

    Returns:
        The server after the update.
    """

    def step(x, m, u):
        m = momentum * m + (1 - momentum) * u
        return x - lr * (u + momentum * m), m

    new = Averaging(*over_leaves(step, 2, *server, update))
    return if_finite(update, narrow(new, server), server)


TINY = 1e-8
"""The norm below which a leaf has no direction."""

SHRINK_CAP, DOUBT = 0.5, 3.0  # b and κ, table 3


def turned(
    update: PyTree, velocity: PyTree, aligned: float, shrink: float, turn: float
) -> PyTree:
    """Turns each leaf Δ of an update towards the momentum m, unless they are aligned.

    With c the cosine between Δ and m, and f = |Δ| / (|Δ| + κ |m|):

        c ≥ a: Δ;   c < 0: Δ - min(-s c f, b) c |Δ| m / |m|
        else: |Δ| times the direction of (1 - l) Δ / |Δ| + l m / |m|,
              with l = min(r (1 - c) f, 1)

    Args:
        update: Δ.
        velocity: m, shaped like the update.
        aligned: a, the cosine from which a leaf is kept.
        shrink: s, at least 0.
        turn: r, at least 0.

    Returns:
        The turned update. A leaf is kept if it or its momentum is 0.

    Source: Asif et al., "HeLoCo: efficient asynchronous low-communication training
    under data and device heterogeneity", 2026, algorithm 2, with b = 0.5 and κ = 3.
    """

    def leaf(x, m):
        size, along = norm(x), norm(m)
        u, v = x / jnp.maximum(size, TINY), m / jnp.maximum(along, TINY)
        cosine = jnp.sum(u * v)
        trust = size / (size + DOUBT * along + TINY)
        share = jnp.minimum(-shrink * cosine * trust, SHRINK_CAP)
        shrunk = x - share * cosine * size * v
        share = jnp.minimum(turn * (1 - cosine) * trust, 1)
        mixed = (1 - share) * u + share * v
        rotated = size * mixed / jnp.maximum(norm(mixed), TINY)
        kept = (cosine >= aligned) | (size < TINY) | (along < TINY)
        return jnp.where(kept, x, jnp.where(cosine < 0, shrunk, rotated))

    return jax.tree.map(leaf, update, velocity)


class Region(NamedTuple):
    """A server of a region.

    Attributes:
        server: the region's own server.
        merged: the region's model at its last exchange with the global server.
        arrived: the number of updates since that exchange, an int32 scalar.
    """

    server: Server
    merged: PyTree
    arrived: jax.Array


class Levels(NamedTuple):
    """The servers of `two_levels`: the global one, and one for each region."""

    top: Server
    regions: tuple[Region, ...]

    @property
    def params(self) -> PyTree:
        """The global model."""
        return self.top.params

    def of(self, region: jax.Array) -> Region:
        """The server of a region, by its index."""
        chosen = self.regions[0]
        for number, each in enumerate(self.regions):
            chosen = select(region == number, each, chosen)
        return chosen


def new_levels(params: PyTree, regions: int) -> Levels:
    """Makes the servers before any update, at least float32."""
    region = Region(new_server(params), widen(params), jnp.int32(0))
    return Levels(new_server(params), (region,) * regions)


def two_levels(
    levels: Levels,
    update: PyTree,
    region: jax.Array,
    near: tuple[float, float, int | jax.Array],
    far: tuple[float, float, int],
    alpha: float,
    updates: int,
) -> Levels:
    """Applies an update to the server of a region, unless it is not finite.

    After every `updates` updates the region exchanges with the global server x: it
    sends its own move s - z since the last exchange, from its model s then to its model
    z now. It then continues from (1 - α) z + α x.

    Args:
        levels: the servers before the update.
        update: start - end of a worker's round, shaped like params.
        region: the index of the worker's region.
        near: learning rate, momentum and buffer of the region's delayed Nesterov.
        far: the same for the global server.
        alpha: α, the weight of the global model, above 0 and at most 1.
        updates: updates from one exchange to the next, at least 1.

    Returns:
        The servers after the update.

    Source: Kim et al., "HALoS: hierarchical asynchronous local SGD over slow networks
    for geo-distributed large language model training", ICML 2025, algorithm 1.
    """
    own = levels.of(region)
    server = delayed_nesterov(own.server, update, *near, early=0.0)
    exchanges = own.arrived + 1 == updates
    move = jax.tree.map(jnp.subtract, own.merged, server.params)
    top = delayed_nesterov(levels.top, move, *far, early=0.0)
    top = select(exchanges, top, levels.top)
    mixed = jax.tree.map(lambda z, x: z + alpha * (x - z), server.params, top.params)
    server = server._replace(params=select(exchanges, mixed, server.params))
    merged = select(exchanges, mixed, own.merged)
    new = Region(server, merged, jnp.where(exchanges, 0, own.arrived + 1))
    regions = tuple(
        select(region == number, new, each)
        for number, each in enumerate(levels.regions)
    )
    return if_finite(update, narrow(Levels(top, regions), levels), levels)
