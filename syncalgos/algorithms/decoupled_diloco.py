"""Decoupled DiLoCo: a syncer merges fragments of the model from a quorum of workers."""

from functools import partial

import optax

from syncalgos import checks
from syncalgos.anchors import nesterov_sgd
from syncalgos.combinators import asynchrony
from syncalgos.combinators import fragments as cuts
from syncalgos.combinators.chain import chain
from syncalgos.combinators.masked import masked
from syncalgos.combinators.primitives import outer_step
from syncalgos.combinators.quorum import Syncer, merged
from syncalgos.combinators.schedule import when
from syncalgos.reducers import stacking
from syncalgos.strategy import WORKERS, Axis, Strategy


def decoupled_diloco(
    period: int = 16,
    *,
    fragments: int = 4,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    quorum: int = 1,
    grace: int = 1,
    radial: bool = False,
    slowest: float = 0.5,
    optimizer: optax.GradientTransformation | None = None,
    stacked: stacking.Stacked = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Decoupled DiLoCo: workers never wait; a syncer waits for a quorum of them.

    Fragment p of P is due after (p + 1) H / P local steps of the fastest worker, and
    every H from then on. Each worker answers as it ends a local step, then or next, and
    continues. Once K have answered, the syncer waits `grace` steps for others, but no
    longer than until all have, or until the fragment is due again. Then it merges the
    present params θ of the workers that have answered:

        g ← Σ c (x - θ) / Σ c
        n ← Σ c |x - θ| / Σ c;   d ← Σ c (x - θ) / |x - θ| / Σ c   if radial
        g ← n d / |d|, leaf by leaf                                if radial
        m ← μ m + g;   x ← x - η (g + μ m);   all θ ← x

    where c counts a worker's local steps since the fragment's last merge, x starts at
    the first params, and m at 0.

    Args:
        period: H, steps of the fastest worker between two merges of a fragment, at
            least 1.
        fragments: P, parts of the model; divides period. Some may have no leaves. They
            are cut as by `layers` in `streaming_diloco`.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        quorum: K, answers the syncer waits for, at least 1; with fewer workers, all.
        grace: steps of the fastest worker to wait for more answers, at least 0.
        radial: whether each leaf of g has the mean norm and the mean direction; in the
            paper embeddings have not.
        slowest: speed of the last worker, above 0 and at most 1; the first has speed 1,
            and speeds fall evenly in between.
        optimizer: the inner optimizer; if given, its state does not change while its
            worker rests. With None it keeps changing.
        stacked: which leaves hold several layers (see `syncalgos.reducers.stacking`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x and m, shaped like params, at least float32, identical on
        all workers; each worker's own params and opt_state. A merge sends its fragment
        once. The center is x. Buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    If a worker has not answered, its steps since the last merge are lost. A steady
    drift moves the center η / (1 - μ) times as far as plain averaging, at equal speeds.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, decoupled_diloco
        >>> strategy = decoupled_diloco(8, fragments=2, slowest=0.4, quorum=2)
        >>> params = [np.ones(9), np.ones(9)]
        >>> sent = communication(strategy, params, workers=2, steps=18)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 5,  8, 13, 18])

    Source: Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training",
    2026, with equal batches, so that tokens² / steps is in proportion to steps.
    """
    outer = nesterov_sgd("decoupled_diloco", outer_lr, outer_momentum)
    clock_of = asynchrony.even_clocks("decoupled_diloco", period, slowest)
    fragments = checks.whole("decoupled_diloco: fragments", fragments, least=1)
    quorum = checks.whole("decoupled_diloco: quorum", quorum, least=1)
    grace = checks.whole("decoupled_diloco: grace", grace, least=0)
    apart = cuts.steps_between(period, fragments, delay=0)
    stacking.check("decoupled_diloco: stacked", stacked)

    def fragment(number: int) -> Strategy:
        first = (number + 1) * apart - 1
        syncer = Syncer(clock_of, first, period, quorum, grace, axis)
        step = outer_step(outer, merged(syncer, radial), axis=axis)
        own = partial(cuts.mask, number, fragments, "layers", stacked)
        return masked(when(step, syncer.merges), own)

    whole = chain(*map(fragment, range(fragments)))
    return asynchrony.at_own_speeds("decoupled_diloco", whole, clock_of, optimizer)
