"""Servers of `asynchronous`: what an update of one worker does to the model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos.dtypes import if_finite, narrow, widen, zeros
from syncalgos.reducers.reducer import over_leaves
from syncalgos.strategy import PyTree


class Server(NamedTuple):
    """The server of `delayed_nesterov`.

    Attributes:
        params: the model θ.
        velocity: its momentum m.
        total: D, the sum of the updates since the momentum changed.
        arrived: the number of these updates, an int32 scalar.
    """

    params: PyTree
    velocity: PyTree
    total: PyTree
    arrived: jax.Array


def new_server(params: PyTree) -> Server:
    """Makes a server, at least float32, before any update."""
    zero = zeros(params)
    return Server(widen(params), zero, zero, jnp.int32(0))


def delayed_nesterov(
    server: Server,
    update: PyTree,
    lr: float,
    momentum: float,
    buffer: int,
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

    def step(x, m, d, u):
        d = d + u
        m = jnp.where(is_last, momentum * m + d / buffer, m)
        x = x - lr * (share * momentum * m + u / buffer)
        return x, m, jnp.where(is_last, 0, d)

    x, m, d = over_leaves(step, 3, *server[:3], update)
    new = Server(x, m, d, (server.arrived + 1) % buffer)
    return if_finite(update, narrow(new, server), server)
