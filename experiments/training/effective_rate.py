"""The effective learning rate of any strategy, found by running it."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.tasks.task import over_workers
from syncalgos import Replica, Strategy
from syncalgos.collectives import PyTree

CHUNK, DRAWN_STEPS, MOST_STEPS = 512, 2**13, 2**17

Make = Callable[[PyTree], tuple[Strategy, optax.GradientTransformation]]
Track = Iterator[np.ndarray]
"""Positions after each of CHUNK steps, (steps, leaves), and then after the next."""


def effective_lr(
    make: Make, params: PyTree, workers: int
) -> Callable[[PyTree, float], float | None]:
    """Finds lr times the steady ratio of the center's movement to plain SGD's.

    All workers get the same constant gradient, and step along it with plain SGD at
    `lr`. The result is ζ / (1 - μ) times lr for BMUF, and 7 times lr for DiLoCo.
    Without it, a comparison of algorithms may only compare learning rates. Axes are cut
    to 4 entries: if a rate depends on a leaf's size, as with DGC, the result is the
    rate of small leaves.

    Args:
        make: maps hyperparams to the strategy, made for a constant learning rate, and
            the inner optimizer, whose state a strategy may change.
        params: one plain model.
        workers: the number of workers.

    Returns:
        A function of (hyperparams, inner learning rate) that returns the effective
        rate, compiled once. It is None if movement is not proportional to the gradient
        (sign methods), and NaN if it does not become steady within 131,072 steps. If
        steps are random, its error is about 1 %.
    """
    # Running the strategy gives a rate for any strategy, without a table of formulas.
    # Leaves are weighted by their size: small ones, such as biases, may differ.
    sizes = [x.size for x in jax.tree.leaves(params) if x.size]
    small = jax.tree.map(lambda x: np.zeros([min(d, 4) for d in x.shape]), params)
    plain = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    of_small, of_plain = (_tracker(make, x, workers) for x in (small, plain))

    def rate(hyperparams: PyTree, lr: float) -> float | None:
        given = hyperparams, lr
        try:
            # Computing the limit loses digits, of which float32 has too few.
            with jax.enable_x64(True):
                return _probe(partial(of_small, *given), lr, sizes, tolerance=1e-9)
        except Exception:  # a strategy may know its own shapes and dtypes
            return _probe(partial(of_plain, *given), lr, sizes, tolerance=1e-5)

    return rate


def first_replica(
    strategy: Strategy, optimizer: optax.GradientTransformation, params: PyTree
) -> Replica:
    """Returns a worker's replica before its first step, with a loss of 0 to be seen."""
    replica = Replica(params, optimizer.init(params))
    if not strategy.sees_loss:
        return replica
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    return replica._replace(loss=jnp.zeros((), jnp.result_type(jnp.float32, *dtypes)))


def _probe(
    track: Callable[[float], Track], lr: float, sizes: list[int], tolerance: float
) -> float | None:
    """Returns the effective rate, from the center's tracks for two gradients."""
    ratios = [_steady_rate(track(g), sizes, tolerance) / (-lr * g) for g in (1.0, 2.0)]
    if not np.isfinite(ratios).all():
        return float("nan")
    # A sign method moves as far with twice the gradient: it has no rate.
    if not np.isclose(*ratios, rtol=1e-2):
        return None
    return float(f"{ratios[0] * lr:.4g}")


def _steady_rate(track: Track, sizes: list[int], tolerance: float) -> float:
    """Returns the center's movement per step once it is steady; NaN if it never is."""
    tracks, last, means = [], np.nan, []
    for number, positions in enumerate(track, 1):
        tracks.append(positions)
        if number.bit_count() > 1:  # looked at after 1, 2, 4, … chunks
            continue
        # (leaves, windows)
        rates = np.array([_rates(leaf) for leaf in np.concatenate(tracks).T])
        rate = np.average([_limit(leaf, tolerance) for leaf in rates], weights=sizes)
        if abs(rate - last) <= 1e-4 * abs(rate):
            return float(rate)
        last = rate
        # Rates of random steps have no limit. Their mean converges as the root of the
        # number of steps, so that two digits are reached soon.
        means.append(np.average(rates.mean(1), weights=sizes))
        is_long = number * CHUNK >= DRAWN_STEPS
        if is_long and np.ptp(means[-3:]) <= 0.01 * abs(means[-1]):
            return float(means[-1])
    return float("nan")


def _tracker(make: Make, params: PyTree, workers: int) -> Callable[..., Track]:
    """Returns a function of (hyperparams, lr, gradient) that follows the center.

    It yields the mean of each leaf after each of CHUNK steps, and then of the next.
    """

    def start(hyperparams, _):
        strategy, optimizer = make(hyperparams)
        own = jax.tree.map(jnp.asarray, params)
        return first_replica(strategy, optimizer, own), strategy.init(own)

    def local_step(strategy, lr, gradient, carry, step):
        replica, state = carry
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), replica.params)
        grads, state = strategy.reduce(grads, replica, state, step)
        stepped = jax.tree.map(lambda p, g: p - lr * g, replica.params, grads)
        replica, state = strategy.sync(replica._replace(params=stepped), state, step)
        center = strategy.center(replica.params, state)
        leaves = [leaf for leaf in jax.tree.leaves(center) if leaf.size]
        return (replica, state), jnp.stack([jnp.mean(leaf) for leaf in leaves])

    def steps(hyperparams, lr, gradient, carry, first):
        numbers = first + np.arange(CHUNK, dtype=np.int32)
        step = partial(local_step, make(hyperparams)[0], lr, gradient)
        return jax.lax.scan(over_workers(step, (0, None)), carry, numbers)

    begin, run = jax.jit(over_workers(start, (None, 0))), jax.jit(steps)

    def track(hyperparams, lr, gradient):
        carry = begin(hyperparams, np.zeros((1, workers)))
        for first in range(0, MOST_STEPS, CHUNK):
            carry, moved = run(hyperparams, lr, gradient, carry, np.int32(first))
            # On the host, which needs no program.
            yield np.asarray(moved, np.float64).mean((1, 2))

    return track


def _rates(track: np.ndarray) -> np.ndarray:
    """Returns the rates per step of a track of positions in three windows, or NaN."""
    # Windows begin and end at steps with movement, and have equally many of them, so
    # that rounds are not cut. The first quarter is left out.
    moved = np.flatnonzero(np.diff(track, prepend=0.0))
    if len(moved) < 4:
        return np.full(3, np.nan)
    at = moved[np.arange(1, 5) * (len(moved) // 4) - 1]
    return np.diff(track[at]) / np.diff(at)


def _limit(rates: np.ndarray, tolerance: float) -> float:
    """Returns the limit of the rates in three windows, or NaN."""
    r1, r2, r3 = rates
    # A geometric sequence, as from momentum, is continued to its limit (Aitken).
    if abs(r3 - r2) <= tolerance * abs(r3):
        return r3
    shrink = (r3 - r2) / (r2 - r1) if r2 != r1 else np.inf
    return r3 + (r3 - r2) * shrink / (1 - shrink) if 0 < shrink < 1 else np.nan
