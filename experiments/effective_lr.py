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
        params: one plain model; its shapes are cut to at most 4 along each axis.
        optimizer: the inner optimizer, whose state a strategy may touch.
        workers: their number.
        lr: the inner learning rate.

    Returns:
        The effective rate; None where movement is no multiple of the gradient (sign
        methods) or does not become steady within 131,072 steps.
    """
    with jax.enable_x64(True):  # the limit of a sequence loses digits
        small = jax.tree.map(lambda x: jnp.zeros([min(d, 4) for d in x.shape]), params)
        run = partial(_steady_ratio, strategy, small, optimizer, workers, lr)
        ratio = run(gradient=1.0)
        double = None if ratio is None else run(gradient=2.0)
    if ratio is None or double is None or abs(double - ratio) > 1e-2 * abs(ratio):
        return None
    return float(f"{ratio * lr:.4g}")


def _steady_ratio(strategy, params, optimizer, workers, lr, gradient) -> float | None:
    run, carry = _make_runner(strategy, params, optimizer, workers, lr, gradient)
    tracks, steps, last = [], 0, None
    while steps < MOST_STEPS:
        target = max(2 * steps, CHUNK)
        for first in range(steps, target, CHUNK):
            carry, track = run(carry, first)
            tracks.append(np.asarray(track, np.float64))
        steps = target
        track = np.concatenate(tracks)  # (steps, leaves)
        rates = [_limit(leaf) for leaf in track.T]
        if any(rate is None for rate in rates):
            last = None
            continue
        ratio = float(np.mean(np.array(rates, np.float64))) / (-lr * gradient)
        if last is not None and abs(ratio - last) <= 1e-4 * abs(ratio):
            return ratio
        last = ratio
    return None


def _make_runner(strategy, params, optimizer, workers, lr, gradient) -> tuple[Any, Any]:
    """Returns run(carry, first step) -> (carry, center after each step)."""

    def local_step(carry, step):
        replica, state = carry
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), replica.params)
        grads, state = strategy.reduce(grads, replica, state, step)
        stepped = jax.tree.map(lambda p, g: p - lr * g, replica.params, grads)
        replica, state = strategy.sync(replica._replace(params=stepped), state, step)
        center = collectives.agreed(strategy.center(replica.params, state))
        return (replica, state), jnp.stack(
            jax.tree.leaves(jax.tree.map(jnp.mean, center))
        )

    def start(_):
        return Replica(params, optimizer.init(params)), strategy.init(params)

    def mapped(program, in_axes):
        over_lanes = jax.vmap(program, in_axes=in_axes, axis_name=LANES)
        return jax.jit(jax.vmap(over_lanes, in_axes=in_axes, axis_name=DEVICES))

    steps = jnp.arange(CHUNK)
    run = mapped(lambda c, first: jax.lax.scan(local_step, c, first + steps), (0, None))
    carry = mapped(start, 0)(jnp.zeros((1, workers)))

    def first_worker(carry, first):
        carry, track = run(carry, first)
        return carry, track[0, 0]

    return first_worker, carry


def _limit(track: np.ndarray) -> float | None:
    """The rate per step to which a track of positions settles, or None.

    Rates are taken between steps at which it moved, so that blocks do not blur them,
    over three quarters of the track; a geometric approach, as momentum has, is
    continued to its limit (Aitken).
    """
    moved = np.flatnonzero(np.diff(track, prepend=0.0))
    marks = [moved[moved < len(track) * k // 4] for k in (1, 2, 3, 4)]
    if not len(moved) or any(len(m) == 0 for m in marks):
        return None
    at = np.array([m[-1] for m in marks])
    if len(set(at)) < 4:
        return None
    r1, r2, r3 = np.diff(track[at]) / np.diff(at)
    if abs(r3 - r2) <= 1e-9 * abs(r3):
        return float(r3)
    shrink = (r3 - r2) / (r2 - r1) if r2 != r1 else np.inf
    if not 0 < shrink < 1:
        return None
    return float(r3 + (r3 - r2) * shrink / (1 - shrink))
