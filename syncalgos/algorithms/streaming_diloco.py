"""Streaming DiLoCo: DiLoCo by fragments of the model, one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from syncalgos import checks
from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.chain import chain
from syncalgos._combinators.delayed import delayed
from syncalgos._combinators.masked import masked
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.algorithms import _fragments as cuts
from syncalgos.reducers import AnyReducer, _stacking, resolve
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def streaming_diloco(
    period: int = 16,
    fragments: int = 4,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    delay: int = 0,
    alpha: float = 0.0,
    *,
    reduce: AnyReducer = "mean",
    seed: int = 0,
    cut: Literal["leaves", "bytes", "layers"] | Callable[..., Any] | None = None,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Streaming DiLoCo: fragments of the model take their outer steps in turn.

    Fragment f of F, for workers' params θ of it that began at the anchor, and m, 0 at
    first, is sent after (f + 1) H / F - τ local steps and every H steps from then on:

        g ← reduce(anchor - θ);   m ← μ m + g;   anchor ← anchor - η (g + μ m)
        τ steps later: θ ← (1 - α) anchor + α θ

    Args:
        period: H, local steps between two outer steps of a fragment, at least 1.
        fragments: F, parts of the model; divides period. Some may have no leaves.
        outer_lr: η, the outer learning rate, above 0; 0.4 in the paper.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        delay: τ, local steps on the way, below period / fragments.
        alpha: α, the weight of the local value on arrival, at least 0 and at most 1.
        reduce: how outer gradients are sent: mean, bf16, fp16, int8, int4 or int2; or
            median, trimmed or clipped, robust against wrong workers; in Python also
            your own reducer.
        seed: seeds the random rounding to int8, int4 or int2.
        cut: the parts: leaves, as many consecutive leaves each; bytes, as many bytes
            each, cut between rows; layers, every F-th stacked layer, as in the paper,
            other leaves in the smallest part; in Python also a function of a leaf's
            path and shape, or of params, to numbers of parts. None means leaves.
        layered: which leaves hold several layers (see `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m and, with a delay, the model in transit. In
        `period` steps, params are sent once, a fragment at a time. The center is the
        anchor. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center η / (1 - μ) times as far as plain averaging, without
    `delay` and `alpha`.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, streaming_diloco
        >>> strategy = streaming_diloco(8, fragments=2, delay=1)
        >>> params = [np.ones(9), np.ones(9)]
        >>> sent = communication(strategy, params, workers=8, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 3,  7, 11, 15])

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    algorithm 2; fragments and phases as in torchft.

    Family: Late arrivals.
    """
    outer = nesterov_sgd("streaming_diloco", outer_lr, outer_momentum)
    period = checks.whole("period", period, least=1)
    fragments = checks.whole("streaming_diloco: fragments", fragments, least=1)
    delay = checks.whole("streaming_diloco: delay", delay, least=0)
    gap = cuts.steps_between(period, fragments, delay)
    cut_rule = cuts.check_cut("leaves" if cut is None else cut)
    _stacking.check_layered("streaming_diloco: layered", layered)

    # One outer optimizer each: torchft's example shares one, which moves them all.
    def make_fragment(number: int) -> Strategy:
        reducer = resolve("streaming_diloco", reduce, axis, seed)
        step = outer_step(outer, reducer, axis=axis)
        offset = ((number + 1) * gap - delay) % period
        mask = partial(cuts.mask, number, fragments, cut_rule, layered)
        periodic_step = every(step, period, offset=offset)
        return masked(delayed(periodic_step, delay, alpha=alpha), mask)

    return chain(*map(make_fragment, range(fragments)))
