"""Decoupled DiLoCo: a syncer merges fragments of the model from a quorum of workers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.chain import chain
from syncalgos._combinators.masked import masked
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import when
from syncalgos._dtypes import norm
from syncalgos.algorithms import _fragments as cuts
from syncalgos.algorithms._asynchrony import CommonClock, at_own_speeds, even_clocks
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import Reducer
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory


@factory
def decoupled_diloco(
    period: int = 16,
    fragments: int = 4,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    quorum: int = 1,
    grace: int = 1,
    radial: bool = False,
    slowest: float = 0.5,
    optimizer: optax.GradientTransformation | None = None,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Decoupled DiLoCo: workers never wait; a syncer waits for a quorum of them.

    Fragment p of P is due after (p + 1) H / P local steps of the fastest worker, and
    every H from then on. Each worker answers at the end of its current local step, and
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
            paper, those of embeddings do not.
        slowest: speed of the last worker, above 0 and at most 1; the first has speed 1,
            and speeds fall evenly in between.
        optimizer: the inner optimizer; if given, its state does not change while its
            worker rests. With None it keeps changing.
        layered: which leaves hold several layers (see `syncalgos.reducers.Layered`).
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

    Family: Late arrivals.
    """
    outer = nesterov_sgd("decoupled_diloco", outer_lr, outer_momentum)
    make_clock = even_clocks("decoupled_diloco", period, slowest)
    fragments = checks.whole("decoupled_diloco: fragments", fragments, least=1)
    quorum = checks.whole("decoupled_diloco: quorum", quorum, least=1)
    grace = checks.whole("decoupled_diloco: grace", grace, least=0)
    gap = cuts.steps_between(period, fragments, delay=0)
    _stacking.check_layered("decoupled_diloco: layered", layered)

    def make_fragment(number: int) -> Strategy:
        first_step = (number + 1) * gap - 1
        syncer = Syncer(make_clock, first_step, period, quorum, grace, axis)
        merge = outer_step(outer, weighted_mean(syncer, radial), axis=axis)
        mask = partial(cuts.mask, number, fragments, "layers", layered)
        return masked(when(merge, syncer.merges), mask)

    strategy = chain(*map(make_fragment, range(fragments)))
    return at_own_speeds("decoupled_diloco", strategy, make_clock, optimizer)


class Syncer(NamedTuple):
    """The steps at which a syncer merges, and the weights of the workers.

    The syncer asks all workers at one step of the clock, and again every `period`
    steps. Each worker answers when it next ends a local step. After `quorum` answers
    the syncer waits for `grace` further steps, but no longer than until all workers
    have answered, or until it has to ask again.

    Attributes:
        make_clock: workers -> the clock of their local steps.
        first_step: the step, from 0, at which it first asks; below the period.
        period: steps of the clock from one question to the next.
        quorum: the number of answers needed, at least 1; with fewer workers, all.
        grace: steps of the clock to wait for more answers, at least 0.
        axis: the mapped axis or axes over which the workers lie.
    """

    make_clock: Callable[[int], CommonClock]
    first_step: int
    period: int
    quorum: int
    grace: int
    axis: Axis

    def merges(self, step: Any) -> jax.Array:
        """Whether the syncer merges at this step of the clock."""
        waited_steps = (step - self.first_step) % self.period
        merge_wait = self._wait(step - waited_steps)
        return (step >= self.first_step) & (waited_steps == merge_wait)

    def weights(self, step: Any) -> jax.Array:
        """Each worker's share in the merge at this step, (workers,).

        It is proportional to the worker's own local steps since the last merge, and 0
        if the worker has not answered.
        """
        clock = self._clock()
        question = step - (step - self.first_step) % self.period
        last_question = question - self.period
        last_merge = last_question + self._wait(last_question)
        first_step = jnp.where(last_question < 0, 0, last_merge + 1)
        steps = clock.finished_steps(step + 1) - clock.finished_steps(first_step)
        has_answered = clock.waiting_steps(question) <= step - question
        steps = jnp.where(has_answered, steps, 0)  # (workers,)
        return steps / jnp.sum(steps)

    def _clock(self) -> CommonClock:
        return self.make_clock(collectives.size(self.axis))

    def _wait(self, question: Any) -> jax.Array:
        """The steps from a question, at a step of the clock, to the merge."""
        waits = jnp.sort(self._clock().waiting_steps(question))  # (workers,)
        quorum_wait = waits[min(self.quorum, len(waits)) - 1] + self.grace
        return jnp.minimum(jnp.minimum(quorum_wait, waits[-1]), self.period - 1)


def weighted_mean(syncer: Syncer, radial: bool) -> Reducer:
    """Makes a reducer: the mean of the workers' updates, weighted by a syncer.

    Args:
        syncer: the syncer that determines the weights.
        radial: whether a leaf's mean has the mean of the norms as its length, and the
            mean of the directions as its direction. The mean of nearly orthogonal
            updates is then not shorter than they are.
    """

    def mean(tree: PyTree, step: Any) -> PyTree:
        axis = syncer.axis
        weight = syncer.weights(step)[collectives.index(axis)]
        return collectives.mean(tree, axis, weight * collectives.size(axis))

    def combine(
        updates: PyTree, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        if not radial:
            return mean(updates, step), updates, state
        norms = jax.tree.map(norm, updates)
        directions = jax.tree.map(_normalize, updates, norms)
        norms, directions = mean((norms, directions), step)
        rescaled = jax.tree.map(
            lambda n, d: n * _normalize(d, norm(d)), norms, directions
        )
        return rescaled, updates, state

    return Reducer(combine, takes_feedback=False)


def _normalize(x: jax.Array, size: jax.Array) -> jax.Array:
    """The direction of a leaf of this norm; 0 for a norm of 0."""
    return x / jnp.where(size > 0, size, 1)
