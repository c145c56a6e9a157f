"""DeMo: decoupled momentum, of which only the fast components are sent."""

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.dtypes import if_finite, narrow, widen
from syncalgos.reducers import dct, stacking
from syncalgos.reducers.hops import index_dtype
from syncalgos.reducers.stacking import Stacked
from syncalgos.strategy import MeanCenter, Strategy


def demo(
    decay: float = 0.999,
    chunk: int = 64,
    top_k: int = 32,
    sign: bool = False,
    learning_rate: checks.LearningRate | None = None,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """DeMo: momentum stays on the worker; its largest cosine components are sent.

    At every local step, for worker i's gradients g, its momentum m, and T the `top_k`
    largest of the discrete cosine components of each chunk:

        m ← β m + g;   q ← T(DCT(m));   m ← m - IDCT(q);   g ← IDCT(mean(q))

    where the mean of a component is over the workers that sent it; with `sign`, as in
    the authors' code:

        m ← β m + η g;   …;   g ← sign(IDCT(mean(q)))

    Args:
        decay: β, of the momentum, at least 0 and below 1.
        chunk: the longest side of a chunk, at least 1: rows and columns are cut into
            parts of their largest divisor up to this, or padded (`dct.side`).
        top_k: components of a chunk that are sent, at least 1.
        sign: step along signs, and accumulate steps instead of gradients.
        learning_rate: η of those steps, a number or schedule; None: 1.
        stacked: which leaves hold several layers (see `syncalgos.reducers.stacking`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m, shaped like params, at least float32, the worker's own. A
        step gathers the chosen components and their indices; chunks of which all would
        be sent are averaged. Replicas stay equal.

    Raises:
        ValueError: a parameter outside its range.

    A leaf is a matrix (all axes but the last, the last). This takes the place of the
    inner optimizer's momentum. With `sign` the learning rate is that of a sign method,
    some hundred times smaller.

    Source: Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024,
    algorithm 1.
    """
    decay = checks.real("demo: decay", decay, least=0, below=1)
    chunk = checks.whole("demo: chunk", chunk, least=1)
    top_k = checks.whole("demo: top_k", top_k, least=1)
    stacked = stacking.check("demo: stacked", stacked)
    if learning_rate is not None:
        learning_rate = checks.learning_rate("demo", learning_rate)

    def init(params):
        return jax.tree.map(jnp.zeros_like, widen(params))

    def extract(m):  # of one layer: (what is left of m, the mean of what is sent)
        parts, back = dct.components(m, chunk)  # (chunks, components)
        if parts.shape[1] <= top_k:  # all are sent, for which no index is needed
            return jnp.zeros_like(m), collectives.mean(m, axis)
        _, chosen = jax.lax.top_k(jnp.abs(parts), top_k)
        q = jnp.take_along_axis(parts, chosen, axis=1)  # (chunks, top_k)
        short = chosen.astype(index_dtype(parts.shape[1]))
        indices, values = collectives.gather((short, q), axis)
        rows, none = jnp.arange(len(parts))[:, None], jnp.zeros_like(parts)
        places = rows, indices.astype(jnp.int32)  # (workers, chunks, top_k)
        senders = none.at[places].add(1.0)
        mean = none.at[places].add(values) / jnp.maximum(senders, 1)
        return m - back(none.at[rows, chosen].set(q)), back(mean)

    def reduce(grads, replica, state, step):
        scale = learning_rate(step) if sign and callable(learning_rate) else 1.0

        def add(m, g):
            return decay * m + jnp.asarray(scale, g.dtype) * g

        leaves, form = jax.tree.flatten(jax.tree.map(add, state, widen(grads)))
        layers = zip(leaves, stacking.counts(stacked, grads), strict=True)
        each = [(stacking.layerwise(extract, count), m) for m, count in layers]
        pairs = [split(m) if m.size else (m, m) for split, m in each]
        left, combined = (form.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        left = if_finite(combined, left, state)
        combined = jax.tree.map(jnp.sign, combined) if sign else combined
        return narrow(combined, grads), left

    return Strategy(init, reduce, center=MeanCenter(axis))
