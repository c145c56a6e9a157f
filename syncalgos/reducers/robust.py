"""Reducers that a few wrong workers cannot move far.

Each worker combines its part of all workers' entries and sends that on: as many bytes
as the mean takes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import widen
from syncalgos.reducers import hops
from syncalgos.reducers.reducer import Reducer, is_sent, leafwise, share_of


def median(axis: Axis = WORKERS) -> Reducer:
    """The median of the workers' values, entry by entry.

    For an even number of workers it is the mean of the two middle values. Fewer than
    half of the workers may send anything, NaN included. Of two workers it is the mean.

    Args:
        axis: the mapped axis or axes over which the workers lie.

    Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, its coordinate-wise median.
    """
    return _middle(lambda n: (n - 1) // 2, axis)


def trimmed(share: float = 0.2, axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' values without the extreme ones, entry by entry.

    As many of the largest as of the smallest are left out. As many workers may send
    anything, NaN included. Of two workers it is the mean.

    Args:
        share: of the workers, left out at each end, rounded up as far as values are
            left; above 0 and below 0.5.
        axis: the mapped axis or axes over which the workers lie.

    Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, its coordinate-wise trimmed mean.
    """
    share = checks.real("trimmed: share", share, above=0, below=0.5)
    return _middle(lambda n: min(share_of(share, n), (n - 1) // 2), axis)


def clipped(radius: float = 10.0, iterations: int = 1, axis: Axis = WORKERS) -> Reducer:
    """Centered clipping: the mean of the workers' distances from the last result.

    With v the last result, 0 at first, and norms over all leaves, `iterations` times:

        v ← v + mean((x - v) min(1, radius / |x - v|))

    What is not finite, or so far away that its square is not, counts as v.

    Args:
        radius: τ, the most that a worker moves v by, times the number of workers;
            above 0, in the units of x.
        iterations: L, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A reducer. State: v of the part that the worker combines, at least float32. A
        step sends each entry as often as the mean does, and in each iteration one
        number for each worker by an all-reduce.

    The paper clips workers' momentum, `optax.chain(optax.ema(0.9, False),
    clipped(100.0))`, at τ = 10 / (1 - momentum). From 0 it takes |x| / τ steps until v
    has caught up.

    Source: Karimireddy, He and Jaggi, "Learning from history for Byzantine robust
    optimization", ICML 2021, algorithm 2.
    """
    radius = checks.real("clipped: radius", radius, above=0)
    iterations = checks.whole("clipped: iterations", iterations, least=1)

    def init(params):
        leaves = filter(is_sent, map(jnp.asarray, jax.tree.leaves(widen(params))))
        return [jnp.zeros(hops.part_size(x.size, axis), x.dtype) for x in leaves]

    def nearer(rows: list[jax.Array], center: list[jax.Array]) -> list[jax.Array]:
        apart = [x - v for x, v in zip(rows, center, strict=True)]  # (workers, part)
        own = sum((jnp.sum((d / radius) ** 2, axis=1) for d in apart), start=0.0)
        squares = collectives.mean(own, axis) * collectives.size(axis)
        factor = 1 / jnp.maximum(1, jnp.sqrt(squares))[:, None]
        far = ~jnp.isfinite(squares)[:, None]  # 0 times infinity would be NaN
        moves = [jnp.where(far, 0, d * factor.astype(d.dtype)) for d in apart]
        return [v + jnp.mean(d, axis=0) for v, d in zip(center, moves, strict=True)]

    def combine(updates, state, step):
        leaves, form = jax.tree.flatten(updates)
        places = [i for i, x in enumerate(map(jnp.asarray, leaves)) if is_sent(x)]
        rows = widen([_arrived(leaves[i], axis) for i in places])
        for _ in range(iterations if places else 0):
            state = nearer(rows, state)
        for i, part in zip(places, state, strict=True):
            leaves[i] = _sent_on(part, leaves[i], axis)
        return form.unflatten(leaves), updates, state

    return _robust(Reducer(combine, init))


def _middle(count: Callable[[int], int], axis: Axis) -> Reducer:
    """The mean of the values between the extremes: so many of n at each end."""

    def combine(x):
        n = collectives.size(axis)
        ranked = jnp.sort(_arrived(x, axis), axis=0)  # NaN is last
        # Not the sum less the extremes, which one large value would cancel.
        kept = widen(ranked[count(n) : n - count(n)])
        return _sent_on(jnp.mean(kept, axis=0), x, axis), x

    return _robust(leafwise(combine))


def _arrived(x: jax.Array, axis: Axis) -> jax.Array:
    """All workers' entries of the part that this worker combines, (workers, part)."""
    return collectives.all_to_all(hops.in_parts(x, axis), axis)


def _sent_on(part: jax.Array, like: jax.Array, axis: Axis) -> jax.Array:
    """The leaf that all workers' parts make, in its dtype."""
    return hops.whole(collectives.gather(part.astype(like.dtype), axis), like)


def _robust(reducer: Reducer) -> Reducer:
    reducer.takes_feedback = False
    return reducer


LEAST_DEVIATION = 1e-3  # of the mean: norms that differ by rounding are alike


class Norms(NamedTuple):
    """The usual norms of each leaf so far: their number, mean and variance, (leaves,).

    Mean and variance weigh a norm by (1 - rate) to the power of how many came after it.
    """

    number: jax.Array
    mean: jax.Array
    variance: jax.Array


class Screen(NamedTuple):
    """What is usual.

    Attributes:
        threshold: standard deviations above its mean up to which a norm is usual.
        rate: the weight of the newest norm in mean and deviation.
        trusted: how many finite norms of a leaf are taken as usual at first.
        clip: the largest norm of a leaf of the mean.
    """

    threshold: float
    rate: float
    trusted: int
    clip: float


def none_seen(params: PyTree) -> Norms:
    """No norms yet, of params that are at least float32."""
    leaves = jax.tree.leaves(params)
    zeros = jnp.zeros(len(leaves), jnp.result_type(jnp.float32, *leaves))
    return Norms(zeros, zeros, zeros)


def screened_mean(
    tree: PyTree, seen: Norms, screen: Screen, axis: Axis
) -> tuple[PyTree, PyTree, Norms]:
    """Weighs the workers' leaves by exp(-norm), those of unusual norm by 0.

    Args:
        tree: this worker's, at least float32.
        seen: its norms so far.
        screen: what is usual.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The weighted mean, clipped; whether a leaf is usual on any worker, a tree of
        booleans; and the norms seen. All send the tree once, and gather the norms.
    """
    leaves, form = jax.tree.flatten(tree)
    norms = jnp.array([_norm(x) for x in leaves], seen.mean.dtype)
    usual = _are_usual(norms, seen, screen)
    of_all = collectives.gather(jnp.where(usual, norms, jnp.inf), axis)
    weights = jax.nn.softmax(-of_all, axis=0)[collectives.index(axis)]
    shares = weights * collectives.size(axis)
    sent = [
        jnp.where(ok, share.astype(x.dtype) * x, 0)  # 0 times NaN would be NaN
        for x, share, ok in zip(leaves, shares, usual, strict=True)
    ]
    mean = jax.tree.map(
        lambda g: g * jnp.minimum(1, screen.clip / (_norm(g) + 1e-6)),
        collectives.mean(form.unflatten(sent), axis),
    )
    on_any = form.unflatten([*jnp.isfinite(of_all).any(0)])
    return mean, on_any, _with_usual(norms, usual, seen, screen.rate)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))


def _are_usual(norms: jax.Array, seen: Norms, screen: Screen) -> jax.Array:
    least = LEAST_DEVIATION * seen.mean
    deviation = jnp.maximum(jnp.sqrt(seen.variance), least)
    is_near = norms <= seen.mean + screen.threshold * deviation
    return jnp.isfinite(norms) & ((seen.number < screen.trusted) | is_near)


def _with_usual(norms: jax.Array, usual: jax.Array, seen: Norms, rate: float) -> Norms:
    """Notes the norms that are usual."""
    number = seen.number + 1
    share = rate / (1 - (1 - rate) ** number)  # 1 for the first: no zeros weigh in
    apart = norms - seen.mean
    mean = seen.mean + share * apart
    variance = (1 - share) * (seen.variance + share * apart**2)
    noted = Norms(number, mean, variance)
    return jax.tree.map(lambda new, old: jnp.where(usual, new, old), noted, seen)
