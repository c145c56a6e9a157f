"""Low-bit means whose rounding, on both hops, is made up for later."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import if_finite, widen
from syncalgos.reducers import dense, hops
from syncalgos.reducers.reducer import Reducer, check_step, is_sent, over_leaves


class LowBitState(NamedTuple):
    """The moving averages of what was lost: e of own leaves, and ē of the own part."""

    residual: PyTree
    of_part: PyTree


def low_bit(
    bits: Literal[8, 4, 2] = 4,
    beta: float = 0.8,
    reset_period: int = 1024,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of values rounded to few bits, with averaged errors fed back.

    On each of two hops, to the worker that averages a part and on to all, Q rounding to
    the nearest of 2^bits - 1 levels at a scale for each 512 entries or less:

        x ← x + e;   q ← Q(x);   e ← β e + (1 - β) (x - q)

    All e are 0 after local steps reset_period, 2 · reset_period, …, if it acts then.

    Args:
        bits: 8, 4 or 2 bits per entry; several share a byte.
        beta: β, the share of the old e that is kept, at least 0 and below 1.
        reset_period: local steps between two resets, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A reducer. State: e, shaped like params, and that of the part which the worker
        averages, its own, at least float32. It sends what `quantized` does.

    Up to a reset all that was sent is all there was, less e / (1 - β).

    Source: Xie, Lin, Toh and Zhou, "LoCo: low-bit communication adaptor for large-scale
    model training", TPAMI 2025.
    """
    dense.check_bits("low_bit", bits)
    beta = checks.real("low_bit: beta", beta, least=0, below=1)
    period = checks.whole("low_bit: reset_period", reset_period, least=1)
    code = hops.Code(
        lambda x, _: dense.encode(bits, x, jnp.full(x.shape, 0.5, x.dtype)),
        partial(dense.decode, bits),
    )

    def init(params):
        residual = jax.tree.map(jnp.zeros_like, widen(params))
        part = jax.tree.map(lambda x: hops.in_parts(x, axis)[0], residual)
        return LowBitState(residual, part)

    def combine(updates, state, step: Any):
        check_step(step)
        kept = (step + 1) % period != 0

        def left(e, lost):
            return jnp.where(kept, beta * e + (1 - beta) * lost, 0)

        def leaf(x, e, part):
            if not is_sent(x):
                return x, x, e, part
            owed = widen(x) + e
            found = hops.all_reduce(owed, code, axis, residual=part)
            own = left(e, owed - found.sent), left(part, found.lost)
            return found.mean.astype(x.dtype), found.sent.astype(x.dtype), *own

        combined, sent, *new = over_leaves(leaf, 4, updates, *state)
        return combined, sent, if_finite(combined, LowBitState(*new), state)

    reducer = Reducer(combine, init)
    reducer.takes_feedback = False
    return reducer
