"""Quantized SGD: gradients rounded at random to few bits."""

from typing import Literal

from syncalgos import reducers
from syncalgos._combinators.primitives import reduce_with
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def quantized_sgd(
    bits: Literal[8, 4, 2] = 8, *, seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Quantized SGD (QSGD): gradients rounded at random to 8, 4 or 2 bits.

    At every local step, for workers' gradients g, and Q of x: floor(L x / s + u) s / L
    with L = 2^(bits-1) - 1, s the largest |x| of a block of at most 512 entries, and u
    uniform on [0, 1):

        g ← Q(mean(Q(g)))

    Args:
        bits: 8, 4 or 2 bits per entry.
        seed: seeds u, which differs between workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A step sends every entry twice, in `bits` bits, as an
        all-reduce does: to the worker that averages it, and from there to all. Replicas
        stay identical.

    Raises:
        ValueError: bits other than 8, 4 or 2.

    Both roundings are unbiased.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, quantized_sgd
        >>> model = np.ones(8000, np.float32)
        >>> for bits in (8, 4, 2):
        ...     strategy = quantized_sgd(bits=bits)
        ...     sent = communication(strategy, model, workers=2, steps=1)
        ...     print(bits, sent.bytes_per_worker)
        8 8064.0
        4 4064.0
        2 2064.0

    Source: Alistarh et al., "QSGD: communication-efficient SGD via gradient
    quantization and encoding", NeurIPS 2017; 2 bits: Wen et al., "TernGrad", NeurIPS
    2017.

    Family: Compressed gradients.
    """
    # Two hops: codes cannot be summed on the way, and gathering all of them costs more
    # than float32 by ring from 8 workers on, at 8 bits.
    return reduce_with(reducers.quantized(bits, seed=seed), axis=axis)
