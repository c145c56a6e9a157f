"""Reducers that a few wrong workers cannot move far, and EDiT's screened mean.

Each worker combines its part of all workers' entries and sends the result to all. This
takes as many bytes as the mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import root, widen
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import _hops
from syncalgos.reducers._reducer import Reducer, count_share, is_sent, leafwise
from syncalgos.strategy import factory


@factory
def median(*, axis: Axis = WORKERS) -> Reducer:
    """The median of the workers' values, entry by entry.

    For an even number of workers it is the mean of the two middle values; for two
    workers, the mean. It tolerates any values, NaN included, from fewer than half of
    the workers.

    Args:
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker sends every entry twice, by all-to-all and by
        all-gather: 2 (N-1)/N times the bytes of the tree.

    Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, its coordinate-wise median.
    """
    return _trimmed_mean(lambda n: (n - 1) // 2, axis)


@factory
def trimmed(share: float = 0.2, *, axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' values without the extreme ones, entry by entry.

    The same number of values is left out at each end. It tolerates any values, NaN
    included, from that many workers. For two workers it is the mean.

    Args:
        share: the share of the workers left out at each end, rounded up as long as
            values are left; above 0 and below 0.5.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. It sends as much as `median`.

    Raises:
        ValueError: a share outside its range.

    Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, its coordinate-wise trimmed mean.
    """
    checks.untraced("trimmed: share", share)
    share = checks.real("trimmed: share", share, above=0, below=0.5)
    return _trimmed_mean(lambda n: min(count_share(share, n), (n - 1) // 2), axis)


@factory
def clipped(
    radius: float = 10.0, *, iterations: int = 1, axis: Axis = WORKERS
) -> Reducer:
    """Centered clipping: the mean of the workers' distances from the last result.

    With v the last result (0 at first) and norms over all leaves, `iterations` times:

        v ← v + mean((x - v) min(1, radius / |x - v|))

    A worker whose distance, or its square, is not finite counts as v.

    Args:
        radius: τ, the largest distance of a worker from v before it is clipped; above
            0, in the units of x. One worker moves v by at most τ / workers in each
            iteration.
        iterations: L, steps towards the mean, at least 1.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. State: v of the part that the worker combines, at least float32. It
        sends as much as `median`, and in each iteration one number per worker by an
        all-reduce.

    Raises:
        ValueError: a parameter outside its range.

    The paper clips workers' momentum, `optax.chain(optax.ema(0.9, False),
    clipped(100.0))`, at τ = 10 / (1 - momentum). Starting at 0, v needs about |x| / τ
    steps to reach x.

    Source: Karimireddy, He and Jaggi, "Learning from history for Byzantine robust
    optimization", ICML 2021, algorithm 2.
    """
    radius = checks.real("clipped: radius", radius, above=0)
    iterations = checks.whole("clipped: iterations", iterations, least=1)

    def init(params: PyTree) -> list[jax.Array]:
        leaves = filter(is_sent, map(jnp.asarray, jax.tree.leaves(widen(params))))
        return [jnp.zeros(_hops.part_size(x.size, axis), x.dtype) for x in leaves]

    def move_center(rows: list[jax.Array], center: list[jax.Array]) -> list[jax.Array]:
        distances = []  # (workers, part) each
        row_is_finite = []
        for x, v in zip(rows, center, strict=True):
            distance = x - v
            is_finite = jnp.isfinite(distance)
            # 0 times infinity would be NaN, in derivatives too.
            distances.append(jnp.where(is_finite, distance, 0))
            row_is_finite.append(is_finite.all(1))
        # In units of the radius: squares of large values overflow later.
        part_squares = sum(
            (jnp.sum((d / radius) ** 2, axis=1) for d in distances), start=0.0
        )
        part_squares = jnp.where(jnp.array(row_is_finite).all(0), part_squares, jnp.inf)
        squares = collectives.mean(part_squares, axis) * collectives.size(axis)
        factor = 1 / jnp.maximum(1, root(squares))[:, None]  # (workers, 1)
        is_far = ~jnp.isfinite(squares)[:, None]
        moves = [jnp.where(is_far, 0, d * factor.astype(d.dtype)) for d in distances]
        return [v + jnp.mean(d, axis=0) for v, d in zip(center, moves, strict=True)]

    def combine(
        updates: PyTree, state: list[jax.Array], step: Any
    ) -> tuple[PyTree, PyTree, list[jax.Array]]:
        collectives.no_mean("clipped")
        leaves, form = jax.tree.flatten(updates)
        sent_leaves = [i for i, x in enumerate(leaves) if is_sent(jnp.asarray(x))]
        rows = widen([_receive_part(leaves[i], axis) for i in sent_leaves])
        if sent_leaves:
            for _ in range(iterations):
                state = move_center(rows, state)
        for i, part in zip(sent_leaves, state, strict=True):
            leaves[i] = _gather_parts(part, leaves[i], axis)
        return form.unflatten(leaves), updates, state

    return Reducer(combine, init, takes_feedback=False)


def _trimmed_mean(count: Callable[[int], int], axis: Axis) -> Reducer:
    """The mean of the values between the extremes, `count(n)` of n at each end."""

    def combine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        collectives.no_mean("a median or trimmed mean")
        workers = collectives.size(axis)
        # NaN is sorted last, among the largest.
        ranked = jnp.sort(_receive_part(x, axis), axis=0)  # (workers, part)
        # The authors' code subtracts the extremes from the sum: then a value of 1e30
        # would round all others away.
        num_extremes = count(workers)
        middle = widen(ranked[num_extremes : workers - num_extremes])
        return _gather_parts(jnp.mean(middle, axis=0), x, axis), x

    return leafwise(combine, takes_feedback=False)


def _receive_part(x: jax.Array, axis: Axis) -> jax.Array:
    """Receives the part that this worker combines, of all workers: (workers, part)."""
    return collectives.all_to_all(_hops.split_into_parts(x, axis), axis)


def _gather_parts(part: jax.Array, like: jax.Array, axis: Axis) -> jax.Array:
    """Gathers the leaf from all workers' parts, in its dtype."""
    return _hops.join_parts(collectives.gather(part.astype(like.dtype), axis), like)


# In units of the mean norm: a smaller difference counts as rounding.
LEAST_DEVIATION = 1e-3


class Norms(NamedTuple):
    """Statistics of each leaf's finite norms so far: number, mean, variance, (leaves,).

    Mean and variance weight a norm by (1 - forgetting) to the power of the number of
    later norms.
    """

    number: jax.Array
    mean: jax.Array
    variance: jax.Array


class Screen(NamedTuple):
    """The rule for usual norms.

    Attributes:
        threshold: a norm is usual up to this many standard deviations above its mean.
        forgetting: the weight of the newest norm in mean and deviation.
        trusted: the number of a leaf's first finite norms that count as usual.
        leaf_clip: the largest norm of a leaf of the mean.
    """

    threshold: float
    forgetting: float
    trusted: int
    leaf_clip: float


def empty_norms(params: PyTree) -> Norms:
    """The statistics before any norm, for params that are at least float32."""
    leaves = jax.tree.leaves(params)
    zeros = jnp.zeros(len(leaves), jnp.result_type(jnp.float32, *leaves))
    return Norms(zeros, zeros, zeros)


def screened_mean(
    tree: PyTree, norms_so_far: Norms, screen: Screen, axis: Axis
) -> tuple[PyTree, PyTree, Norms]:
    """Averages the workers' leaves with weights exp(-norm), or 0 for an unusual norm.

    Args:
        tree: this worker's tree, at least float32.
        norms_so_far: the statistics of its norms.
        screen: the rule for usual norms.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The weighted mean, clipped; a tree of booleans, whether a leaf is usual on any
        worker; and the new statistics. Each worker sends the tree once, and gathers the
        norms.
    """
    collectives.no_mean("EDiT's screened mean")
    leaves, form = jax.tree.flatten(tree)
    # 0 times NaN or infinity would be NaN, in derivatives too.
    is_finite = jnp.array([jnp.isfinite(_norm(x)) for x in leaves], bool)  # (leaves,)
    leaves = [jnp.where(ok, x, 0) for x, ok in zip(leaves, is_finite, strict=True)]
    norms = jnp.array([_norm(x) for x in leaves], norms_so_far.mean.dtype)
    is_usual = is_finite & _find_usual(norms, norms_so_far, screen)
    usual_norms = jnp.where(is_usual, norms, jnp.inf)
    workers_norms = collectives.gather(usual_norms, axis)  # (workers, leaves)
    on_any = jnp.isfinite(workers_norms).any(0)
    # softmax subtracts the smallest norm: exp(-norm) alone would be 0 for all.
    weights = jax.nn.softmax(jnp.where(on_any, -workers_norms, 0), axis=0)
    shares = weights[collectives.index(axis)] * collectives.size(axis)
    weighted_leaves = []
    for x, share, ok in zip(leaves, shares, is_usual, strict=True):
        weighted_leaves.append(jnp.where(ok, share.astype(x.dtype) * x, 0))

    def clip_leaf(g: jax.Array) -> jax.Array:
        return g * jnp.minimum(1, screen.leaf_clip / (_norm(g) + 1e-6))

    mean = collectives.mean(form.unflatten(weighted_leaves), axis)
    clipped_mean = jax.tree.map(clip_leaf, mean)
    updated_norms = _update_norms(norms, norms_so_far, screen.forgetting)
    new_norms = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), updated_norms, norms_so_far
    )
    return clipped_mean, form.unflatten([*on_any]), new_norms


def _norm(x: jax.Array) -> jax.Array:
    return root(jnp.sum(x * x))


def _find_usual(norms: jax.Array, norms_so_far: Norms, screen: Screen) -> jax.Array:
    least_deviation = LEAST_DEVIATION * norms_so_far.mean
    # Checkpoints of former versions may hold variances below 0.
    deviation = jnp.maximum(
        jnp.sqrt(jnp.maximum(norms_so_far.variance, 0)), least_deviation
    )
    is_near = norms <= norms_so_far.mean + screen.threshold * deviation
    return (norms_so_far.number < screen.trusted) | is_near


def _update_norms(norms: jax.Array, norms_so_far: Norms, forgetting: float) -> Norms:
    """Updates the statistics with norms."""
    number = norms_so_far.number + 1
    # The share is 1 for the first norm, so statistics are exact from there on. The
    # authors' statistics start at 0, and need 120 syncs. Rounding may put the share
    # above 1, and then the variance below 0.
    share = jnp.minimum(1, -forgetting / jnp.expm1(number * jnp.log1p(-forgetting)))
    deviation = norms - norms_so_far.mean
    mean = norms_so_far.mean + share * deviation
    variance = (1 - share) * (norms_so_far.variance + share * deviation**2)
    # Unusual norms are included, as in the authors' code. Otherwise a leaf whose norms
    # have grown permanently would never move again.
    return Norms(number, mean, variance)
