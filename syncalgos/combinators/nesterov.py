"""Delayed Nesterov: momentum over the updates of workers that do not wait."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos.collectives import PyTree
from syncalgos.dtypes import if_finite, widen


class Server(NamedTuple):
    """The model θ, its momentum m, the updates D since it moved, and their number."""

    params: PyTree
    velocity: PyTree
    total: PyTree
    arrived: jax.Array


def fresh(params: PyTree) -> Server:
    """A server to which nothing has come."""
    params = widen(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Server(params, zeros, zeros, jnp.int32(0))


def pushed(
    server: Server,
    update: PyTree,
    lr: float,
    momentum: float,
    buffer: int,
    early: float,
) -> Server:
    """The server after an update Δ has come; it stays as it is if Δ is not finite.

    With D ← D + Δ, and B updates in a buffer:

        the last of a buffer: m ← β m + D / B;  θ ← θ - η ((1 - c B + c) β m + Δ / B);
                              D ← 0
        any other:            θ ← θ - η (c β m + Δ / B)

    Args:
        server: before.
        update: Δ, start - end of a worker's round.
        lr: η.
        momentum: β.
        buffer: B.
        early: c.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    algorithm 3.
    """
    is_last = (server.arrived + 1) % buffer == 0
    share = jnp.where(is_last, 1 - early * buffer + early, early)
    total = jax.tree.map(jnp.add, server.total, update)
    velocity = jax.tree.map(
        lambda m, d: jnp.where(is_last, momentum * m + d / buffer, m),
        server.velocity,
        total,
    )
    params = jax.tree.map(
        lambda x, m, u: x - lr * (share * momentum * m + u / buffer),
        server.params,
        velocity,
        update,
    )
    total = jax.tree.map(lambda d: jnp.where(is_last, 0, d), total)
    new = Server(params, velocity, total, (server.arrived + 1) % buffer)
    new = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), new, server)
    return if_finite(update, new, server)
