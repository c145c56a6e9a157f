"""DeMo: decoupled momentum; only its fast components are sent."""

from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.reducers import _dct, _stacking
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory
def demo(
    decay: float = 0.999,
    chunk: int = 64,
    top_k: int = 32,
    *,
    sign: bool = False,
    learning_rate: checks.LearningRate | None = None,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """DeMo: momentum stays on the worker; its largest cosine components are sent.

    At every local step, for worker i's gradients g, its momentum m, 0 at first, and T
    the `top_k` largest of the discrete cosine components of each chunk:

        m ← β m + g;   q ← T(DCT(m));   m ← m - IDCT(q);   g ← IDCT(mean(q))

    where the mean of a component is over the workers that sent it; with `sign`, as in
    the authors' code:

        m ← β m + η g;   …;   g ← sign(IDCT(mean(q)))

    Args:
        decay: β, the decay of the momentum, at least 0 and below 1.
        chunk: the longest side of a chunk, at least 1: rows and columns are cut into
            parts of their largest divisor up to this, or padded (`dct.side`).
        top_k: the number of components of a chunk that are sent, at least 1.
        sign: step along signs, and accumulate η g instead of g.
        learning_rate: η, used with sign: a number above 0 or a schedule; None means 1.
        layered: which leaves hold several layers (see `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m, shaped like params, at least float32, each worker's own. A
        step gathers the chosen components and their indices; chunks of at most `top_k`
        components are averaged. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    A leaf is a matrix (all axes but the last, the last). m takes the place of the inner
    optimizer's momentum. With `sign`, the learning rate must be that of a sign method,
    about a hundred times smaller than SGD's.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, demo
        >>> matrix = np.ones((64, 64), np.float32)
        >>> sent = communication(demo(top_k=32), matrix, workers=2, steps=1)
        >>> round(matrix.nbytes / sent.bytes_per_worker)  # times less than the gradient
        85

    Source: Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024,
    algorithm 1.

    Family: Compressed gradients.
    """
    decay = checks.real("demo: decay", decay, least=0, below=1)
    chunk = checks.whole("demo: chunk", chunk, least=1)
    top_k = checks.whole("demo: top_k", top_k, least=1)
    layered = _stacking.check_layered("demo: layered", layered)
    rate = 1.0 if learning_rate is None else learning_rate
    rate = checks.learning_rate("demo", rate)
    fast = _dct.largest_components(chunk, top_k, layered, axis)

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        scale = rate(step) if sign else 1.0

        def add(m: jax.Array, g: jax.Array) -> jax.Array:
            return decay * m + jnp.asarray(scale, g.dtype) * g

        momentum = jax.tree.map(add, state, widen(grads))
        combined, sent_momentum, _ = fast.combine(momentum, (), step)
        new_momentum = jax.tree.map(jnp.subtract, momentum, sent_momentum)
        # Checked before signs are taken, because signs hide values that are not finite.
        new_momentum = if_finite(combined, new_momentum, state)
        if sign:
            combined = jax.tree.map(jnp.sign, combined)
        return narrow(combined, grads), new_momentum

    return Strategy(
        zeros,
        reduce,
        center=MeanCenter(axis),
        unit_steps=sign,
        learning_rate=learning_rate if sign else None,
    )
