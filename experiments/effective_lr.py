"""The effective learning rate of any strategy, found by running it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import Replica, Strategy, collectives
from syncalgos.collectives import PyTree
from syncalgos.layout import DEVICES, LANES

CHUNK, MOST_STEPS = 512, 2**17


def effective_lr(
    strategy: Strategy,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    workers: int,
    lr: float,
) -> float | None:
    """lr times the steady ratio of the center's movement to that of plain SGD.

    All workers get one constant gradient, and step along it with plain SGD at `lr`.
    BMUF comes out at ζ / (1 - μ) times lr, DiLoCo at 7 times lr. Papers that leave this
    out compare learning rates, not algorithms.

    Args:
        strategy: made for a constant learning rate of `lr`.
        params: one plain model.
        optimizer: the inner optimizer, whose state a strategy may touch.
        workers: their number.
        lr: the inner learning rate.

    Returns:
        The effective rate; None where movement is no multiple of the gradient (sign
        methods); NaN where it does not become steady within 131,072 steps.
    """
    probe = partial(_probe, strategy, optimizer, workers, lr)
    try:
        with jax.enable_x64(True):  # the limit of a sequence loses digits
            small = jax.tree.map(
                lambda x: jnp.zeros([min(d, 4) for d in x.shape]), params
            )
            return probe(small, tolerance=1e-9)
    except Exception:  # a strategy may know its own shapes and dtypes
        return probe(jax.tree.map(jnp.zeros_like, params), tolerance=1e-5)


def _probe(strategy, optimizer, workers, lr, params, tolerance) -> float | None:
    ratios = [
        _steady_ratio(strategy, params, optimizer, workers, lr, gradient, tolerance)
        for gradient in (1.0, 2.0)
    ]
    if not np.isfinite(ratios).all():
        return float("nan")
    if not np.isclose(*ratios, rtol=1e-2):
        return None
    return float(f"{ratios[0] * lr:.4g}")


def _steady_ratio(
    strategy, params, optimizer, workers, lr, gradient, tolerance
) -> float:
    run, carry = _make_runner(strategy, params, optimizer, workers, lr, gradient)
    tracks, steps, last = [], 0, np.nan
    while steps < MOST_STEPS:
        target = max(2 * steps, CHUNK)
        for first in range(steps, target, CHUNK):
            carry, track = run(carry, np.int32(first))
            tracks.append(np.asarray(track, np.float64))
        steps = target
        leaves = np.concatenate(tracks).T  # (leaves, steps)
        ratio = np.mean([_limit(leaf, tolerance) for leaf in leaves]) / (-lr * gradient)
        if abs(ratio - last) <= 1e-4 * abs(ratio):
            return float(ratio)
        last = ratio
    return float("nan")


def _make_runner(strategy, params, optimizer, workers, lr, gradient) -> tuple[Any, Any]:
    """Returns run(carry, first step) -> (carry, center after each step)."""

    def local_step(carry, step):
        replica, state = carry
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), replica.params)
        grads, state = strategy.reduce(grads, replica, state, step)
        stepped = jax.tree.map(lambda p, g: p - lr * g, replica.params, grads)
        replica, state = strategy.sync(replica._replace(params=stepped), state, step)
        center = collectives.agreed(strategy.center(replica.params, state))
        moved = jnp.stack([jnp.mean(leaf) for leaf in jax.tree.leaves(center)])
        return (replica, state), moved

    def start(_):
        return Replica(params, optimizer.init(params)), strategy.init(params)

    def mapped(program, in_axes):
        over_lanes = jax.vmap(program, in_axes=in_axes, axis_name=LANES)
        return jax.jit(jax.vmap(over_lanes, in_axes=in_axes, axis_name=DEVICES))

    steps = np.arange(CHUNK, dtype=np.int32)
    run = mapped(lambda c, first: jax.lax.scan(local_step, c, first + steps), (0, None))

    def first_worker(carry, first):
        carry, track = run(carry, first)
        return carry, track[0, 0]

    return first_worker, mapped(start, 0)(jnp.zeros((1, workers)))


def _limit(track: np.ndarray, tolerance: float) -> float:
    """The rate per step to which a track of positions settles, or NaN.

    Rates are taken between steps at which it moved, as many in each of three windows,
    so that blocks do not blur them; a geometric approach, as momentum has, is continued
    to its limit (Aitken).
    """
    moved = np.flatnonzero(np.diff(track, prepend=0.0))
    if len(moved) < 4:
        return np.nan
    at = moved[np.arange(1, 5) * (len(moved) // 4) - 1]
    r1, r2, r3 = np.diff(track[at]) / np.diff(at)
    if abs(r3 - r2) <= tolerance * abs(r3):
        return r3
    shrink = (r3 - r2) / (r2 - r1) if r2 != r1 else np.inf
    return r3 + (r3 - r2) * shrink / (1 - shrink) if 0 < shrink < 1 else np.nan
