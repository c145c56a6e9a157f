"""The effective learning rate of any strategy, found by running it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.tasks.contract import over_workers
from syncalgos import Replica, Strategy
from syncalgos.collectives import PyTree
from syncalgos.strategy import seeing

CHUNK, DRAWN_STEPS, MOST_STEPS = 512, 2**13, 2**17


Make = Callable[[PyTree], tuple[Strategy, optax.GradientTransformation]]


def effective_lr(
    make: Make, params: PyTree, workers: int
) -> Callable[[PyTree, float], float | None]:
    """Finds lr times the steady ratio of the center's movement to plain SGD's.

    All workers get one constant gradient, and step along it with plain SGD at `lr`.
    BMUF comes out at ζ / (1 - μ) times lr, DiLoCo at 7 times lr. Papers that leave this
    out compare learning rates, not algorithms. Axes are cut to 4 entries: where a rate
    depends on a leaf's size, as that of DGC does, it is that of small leaves.

    Args:
        make: hyperparams -> the strategy, made for a constant learning rate, and the
            inner optimizer, whose state a strategy may touch.
        params: one plain model.
        workers: their number.

    Returns:
        (hyperparams, the inner learning rate) -> the effective rate, compiled once;
        None where movement is no multiple of the gradient (sign methods); NaN where it
        does not become steady within 131,072 steps. Where steps are drawn it is right
        to about 1 %.
    """
    # By running it nothing has to be looked up: any strategy has a rate so.
    # Leaves count by their entries: small ones, as biases, may move at other rates.
    sizes = [x.size for x in jax.tree.leaves(params) if x.size]
    small = jax.tree.map(lambda x: np.zeros([min(d, 4) for d in x.shape]), params)
    plain = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    of_small, of_plain = (_make_runner(make, x, workers) for x in (small, plain))

    def rate(hyperparams: PyTree, lr: float) -> float | None:
        given = hyperparams, lr, sizes
        try:
            # The limit of a sequence loses digits: float32 has too few.
            with jax.enable_x64(True):
                return _probe(*of_small, *given, tolerance=1e-9)
        except Exception:  # a strategy may know its own shapes and dtypes
            return _probe(*of_plain, *given, tolerance=1e-5)

    return rate


def _probe(start, run, hyperparams, lr, sizes, tolerance) -> float | None:
    first = start(hyperparams)
    ratios = [
        _steady_ratio(partial(run, hyperparams, lr, gradient), first, sizes, tolerance)
        / (-lr * gradient)
        for gradient in (1.0, 2.0)
    ]
    if not np.isfinite(ratios).all():
        return float("nan")
    # A sign method moves as far under a gradient twice as large: it has no rate.
    if not np.isclose(*ratios, rtol=1e-2):
        return None
    return float(f"{ratios[0] * lr:.4g}")


def _steady_ratio(run, carry, sizes, tolerance) -> float:
    """Returns the center's movement per step once it is steady; NaN if it never is."""
    tracks, steps, last, means = [], 0, np.nan, []
    while steps < MOST_STEPS:
        target = max(2 * steps, CHUNK)
        for first in range(steps, target, CHUNK):
            carry, track = run(carry, np.int32(first))
            tracks.append(track)
        steps = target
        # (leaves, windows)
        rates = np.array([_rates(leaf) for leaf in np.concatenate(tracks).T])
        limits = [_limit(leaf, tolerance) for leaf in rates]
        rate = np.average(limits, weights=sizes)
        if abs(rate - last) <= 1e-4 * abs(rate):
            return float(rate)
        last = rate
        # Rates of steps that are drawn have no limit: their mean settles as the root of
        # the number of steps, and two digits of it are soon had.
        means.append(np.average(rates.mean(1), weights=sizes))
        if steps >= DRAWN_STEPS and np.ptp(means[-3:]) <= 0.01 * abs(means[-1]):
            return float(means[-1])
    return float("nan")


def _make_runner(make, params, workers) -> tuple[Any, Any]:
    """Returns the functions that make a carry, and that take local steps.

    The second: (hyperparams, lr, gradient, carry, step) -> (carry, center of each
    step).
    """

    def local_step(strategy, lr, gradient, carry, step):
        replica, state = carry
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), replica.params)
        grads, state = strategy.reduce(grads, replica, state, step)
        stepped = jax.tree.map(lambda p, g: p - lr * g, replica.params, grads)
        replica, state = strategy.sync(replica._replace(params=stepped), state, step)
        center = strategy.center(replica.params, state)
        leaves = [leaf for leaf in jax.tree.leaves(center) if leaf.size]
        moved = jnp.stack([jnp.mean(leaf) for leaf in leaves])
        return (replica, state), moved

    def start(hyperparams, _):
        strategy, optimizer = make(hyperparams)
        own = jax.tree.map(jnp.asarray, params)
        replica = seeing(strategy, Replica(own, optimizer.init(own)))
        return replica, strategy.init(own)

    def steps(hyperparams, lr, gradient, carry, first):
        numbers = first + np.arange(CHUNK, dtype=np.int32)
        step = partial(local_step, make(hyperparams)[0], lr, gradient)
        return jax.lax.scan(over_workers(step, (0, None)), carry, numbers)

    run, begin = jax.jit(steps), jax.jit(over_workers(start, (None, 0)))

    def mean_of_workers(hyperparams, lr, gradient, carry, first):
        carry, track = run(hyperparams, lr, gradient, carry, first)
        # On the host: no program of its own.
        return carry, np.asarray(track, np.float64).mean((1, 2))

    def of_workers(hyperparams):
        return begin(hyperparams, np.zeros((1, workers)))

    return of_workers, mean_of_workers


def _rates(track: np.ndarray) -> np.ndarray:
    """Returns the rates per step of a track of positions in three windows, or NaN."""
    # Between steps at which it moved, as many in each window, so that blocks do not
    # blur them; the first quarter is left out.
    moved = np.flatnonzero(np.diff(track, prepend=0.0))
    if len(moved) < 4:
        return np.full(3, np.nan)
    at = moved[np.arange(1, 5) * (len(moved) // 4) - 1]
    return np.diff(track[at]) / np.diff(at)


def _limit(rates: np.ndarray, tolerance: float) -> float:
    """Returns the rate to which those of three windows settle, or NaN."""
    r1, r2, r3 = rates
    # A geometric approach, as momentum has, is continued to its limit (Aitken).
    if abs(r3 - r2) <= tolerance * abs(r3):
        return r3
    shrink = (r3 - r2) / (r2 - r1) if r2 != r1 else np.inf
    return r3 + (r3 - r2) * shrink / (1 - shrink) if 0 < shrink < 1 else np.nan
