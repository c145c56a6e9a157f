"""A syncer that merges the workers' updates once enough workers have answered."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import collectives
from syncalgos.combinators.asynchrony import Clock
from syncalgos.dtypes import norm
from syncalgos.reducers.reducer import Reducer
from syncalgos.strategy import Axis, PyTree


class Syncer(NamedTuple):
    """The steps at which a syncer merges, and the weights of the workers.

    The syncer asks all workers at one step of the clock, and again every `period`
    steps. Each worker answers when it next ends a local step. After `quorum` answers
    the syncer waits for `grace` further steps, but no longer than until all workers
    have answered, or until it has to ask again.

    Attributes:
        clock_of: workers -> the clock of their local steps.
        first: the step, from 0, at which it first asks; below the period.
        period: steps of the clock from one question to the next.
        quorum: the number of answers needed, at least 1; with fewer workers, all.
        grace: steps of the clock to wait for more answers, at least 0.
        axis: the mapped axis or axes over which the workers lie.
    """

    clock_of: Callable[[int], Clock]
    first: int
    period: int
    quorum: int
    grace: int
    axis: Axis

    def merges(self, step: Any) -> jax.Array:
        """Whether the syncer merges at this step of the clock."""
        since = (step - self.first) % self.period
        return (step >= self.first) & (since == self._wait(step - since))

    def weights(self, step: Any) -> jax.Array:
        """Each worker's share in the merge at this step, (workers,).

        It is proportional to the worker's own local steps since the last merge, and 0
        if the worker has not answered.
        """
        clock = self._clock()
        asked = step - (step - self.first) % self.period
        last = asked - self.period
        begun = jnp.where(last < 0, 0, last + self._wait(last) + 1)
        steps = clock.done(step + 1) - clock.done(begun)
        steps = jnp.where(clock.waits(asked) <= step - asked, steps, 0)
        return steps / jnp.sum(steps)

    def _clock(self) -> Clock:
        return self.clock_of(collectives.size(self.axis))

    def _wait(self, asked: Any) -> jax.Array:
        """The steps from a question to the merge."""
        answers = jnp.sort(self._clock().waits(asked))
        enough = answers[min(self.quorum, len(answers)) - 1] + self.grace
        return jnp.minimum(jnp.minimum(enough, answers[-1]), self.period - 1)


def merged(syncer: Syncer, radial: bool) -> Reducer:
    """Makes a reducer: the mean of the workers' updates, weighted by a syncer.

    Args:
        syncer: the syncer that determines the weights.
        radial: whether a leaf's mean has the mean of the norms as its length, and the
            mean of the directions as its direction. The mean of nearly orthogonal
            updates is then not shorter than they are.
    """

    def mean(tree: PyTree, step: Any) -> PyTree:
        axis = syncer.axis
        share = syncer.weights(step)[collectives.index(axis)] * collectives.size(axis)

        def counted(x):
            return jnp.where(share > 0, share.astype(x.dtype) * x, 0)

        return collectives.mean(jax.tree.map(counted, tree), axis)

    def combine(updates, state, step):
        if not radial:
            return mean(updates, step), updates, state
        norms = jax.tree.map(norm, updates)
        directions = jax.tree.map(_along, updates, norms)
        norms, directions = mean((norms, directions), step)
        rescaled = jax.tree.map(lambda n, d: n * _along(d, norm(d)), norms, directions)
        return rescaled, updates, state

    return Reducer(combine, takes_feedback=False)


def _along(x: jax.Array, size: jax.Array) -> jax.Array:
    """The direction of a leaf of this norm; 0 for a norm of 0."""
    return x / jnp.where(size > 0, size, 1)
