"""DeMo: decoupled momentum, of which only the fast components are sent."""

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives, cosine
from syncalgos.base import MeanCenter, Strategy
from syncalgos.collectives import WORKERS, Axis
from syncalgos.precision import if_finite, narrow, widen


def demo(
    decay: float = 0.999,
    chunk: int = 64,
    top_k: int = 32,
    sign: bool = False,
    axis: Axis = WORKERS,
) -> Strategy:
    """DeMo: momentum stays on the worker; its largest cosine components are sent.

    At every local step, for worker i's gradients g, its momentum m, and T the `top_k`
    largest of the discrete cosine components of each chunk:

        m ← β m + g;   q ← T(DCT(m));   m ← m - IDCT(q);   g ← IDCT(mean(q))

    where the mean of a component is over the workers that sent it.

    Args:
        decay: β, of the momentum, at least 0 and below 1.
        chunk: the longest side of a chunk: each axis of a leaf is cut into parts of its
            largest divisor up to this; at least 1.
        top_k: components of a chunk that are sent, at least 1.
        sign: step along the signs of what comes out, as the authors' code does.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m, shaped like params, at least float32, the worker's own. A
        step gathers the chosen components and their int32 indices from all workers.
        Replicas stay equal.

    Raises:
        ValueError: a parameter outside its range.

    It takes the place of the inner optimizer's momentum: let that be 0. With `sign` the
    learning rate is that of a sign method, some hundred times smaller.

    Source: Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024,
    algorithm 1.
    """
    decay = checks.real("demo: decay", decay, least=0, below=1)
    chunk = checks.whole("demo: chunk", chunk, least=1)
    top_k = checks.whole("demo: top_k", top_k, least=1)

    def init(params):
        return jax.tree.map(jnp.zeros_like, widen(params))

    def extract(m):  # (what is left of m, the mean over workers of what is sent)
        parts, back = cosine.components(m, chunk)  # (chunks, components)
        _, chosen = jax.lax.top_k(jnp.abs(parts), min(top_k, parts.shape[1]))
        q = jnp.take_along_axis(parts, chosen, axis=1)  # (chunks, top_k)
        indices, values = collectives.gather((chosen, q), axis)
        rows, none = jnp.arange(len(parts))[:, None], jnp.zeros_like(parts)
        total = none.at[rows, indices].add(values)
        senders = none.at[rows, indices].add(1.0)
        own = none.at[rows, chosen].set(q)
        return m - back(own), back(total / jnp.maximum(senders, 1))

    def reduce(grads, replica, state, step):
        momentum = jax.tree.map(lambda m, g: decay * m + g, state, widen(grads))
        leaves, form = jax.tree.flatten(momentum)
        pairs = [extract(m) if m.size else (m, m) for m in leaves]
        left, combined = (form.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        left = if_finite(combined, left, state)
        combined = jax.tree.map(jnp.sign, combined) if sign else combined
        return narrow(combined, grads), left

    return Strategy(init, reduce, center=MeanCenter(axis))
