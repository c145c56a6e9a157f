"""The effective learning rate of a strategy, which is measured by running it."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos._combinators.introspection import find_axis
from syncalgos.collectives import PyTree
from syncalgos.collectives._axes import ANALYZED, mapped_names
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.strategy import Replica, Strategy, check_params, check_strategy, seeing

CHUNK_STEPS = 512
MIN_RANDOM_STEPS = 2**13  # before the mean of a random strategy's rates is believed
MAX_STEPS = 2**17

Track = Iterator[np.ndarray]
"""Positions after each of CHUNK_STEPS steps, (steps, leaves), and then the next."""


class EffectiveRate(NamedTuple):
    """How far a strategy moves the center under a constant gradient.

    Attributes:
        gain: the center's movement, relative to that of plain SGD. None: the movement
            does not grow with the gradient (sign methods). NaN: it does not become
            steady within the steps.
        rate: the gain times the inner learning rate; None and NaN as for the gain.

    Example:
        >>> from syncalgos import EffectiveRate
        >>> EffectiveRate(gain=7.0, rate=0.14).rate
        0.14
    """

    gain: float | None
    rate: float | None


@suggest_arguments
def effective_rate(
    strategy: Strategy | Callable[[PyTree], Strategy],
    optimizer: optax.GradientTransformation
    | Callable[[PyTree], optax.GradientTransformation],
    *,
    workers: int,
    steps: int | None = None,
    learning_rate: float | None = None,
    params: PyTree = None,
    hyperparams: PyTree = None,
) -> EffectiveRate:
    """Measures how much a strategy lengthens steps.

    All workers get the same constant gradient, and step along it with plain SGD at the
    inner learning rate. Once the center moves steadily, its movement is divided by that
    of plain SGD. The gain is ζ / (1 - μ) for BMUF, and 7 for DiLoCo. Without it, a
    comparison of algorithms may only compare learning rates.

    Args:
        strategy: the strategy, made for a constant learning rate; with `hyperparams`, a
            function from these to it, which is compiled once for all their values.
        optimizer: the inner optimizer, or a function from `hyperparams` to it. Its
            state, which a strategy may change, and its learning rate are used; its
            momentum does not count.
        workers: the number of workers.
        steps: the most local steps to follow, at least 512 (more are taken in multiples
            of that); None: 131,072.
        learning_rate: the inner learning rate. None: the strategy's own, else the
            optimizer's first step along a gradient of 1. That is the rate of optax's
            sgd, adam, adamw and lion, but 1 + μ times the rate for an inner Nesterov
            momentum μ.
        params: a model, for a strategy that asks for leaves of its own names or shapes.
            Axes are cut to 4 entries where the strategy allows that, and the gains of
            leaves are weighted by their sizes. None: a matrix and a vector.
        hyperparams: numbers for `strategy` and `optimizer`, as in DataParallel.

    Returns:
        An EffectiveRate. If steps are random, its error is about 1 %. If a rate depends
        on a leaf's size, as with DGC, the result is the rate of small leaves.

    Raises:
        ValueError: an argument that is not a Strategy or not an optimizer, numbers out
            of range, or an inner optimizer whose learning rate is not found.

    Example:
        >>> import optax
        >>> from syncalgos import bmuf, effective_rate
        >>> strategy = bmuf(4, block_momentum=0.8)
        >>> result = effective_rate(strategy, optax.sgd(0.1), workers=2)
        >>> round(result.gain, 3), round(result.rate, 3)
        (5.0, 0.5)
    """
    make_strategy: Any = strategy
    make_optimizer: Any = optimizer
    if hyperparams is None:
        check_strategy("effective_rate", strategy)
        check_optimizer("effective_rate: optimizer", optimizer)
        make_strategy = partial(_ignore_hyperparams, strategy)
        make_optimizer = partial(_ignore_hyperparams, optimizer)
    else:
        checks.called_with("effective_rate: strategy", strategy, ["hyperparams"])
        checks.called_with("effective_rate: optimizer", optimizer, ["hyperparams"])
    parts = _Parts(make_strategy, make_optimizer)
    workers = checks.whole("effective_rate: workers", workers, least=1)
    if steps is None:
        steps = MAX_STEPS
    steps = checks.whole("effective_rate: steps", steps, least=CHUNK_STEPS)
    if params is None:
        params = {"matrix": np.zeros((4, 4), "f4"), "vector": np.zeros(4, "f4")}
    check_params(params)
    if learning_rate is None:
        learning_rate = _find_learning_rate(parts, hyperparams)
    learning_rate = checks.real("learning_rate", learning_rate, above=0)

    # Leaves are weighted by their size: small ones, such as biases, may differ.
    sizes = [x.size for x in jax.tree.leaves(params) if x.size]
    small = jax.tree.map(lambda x: np.zeros([min(d, 4) for d in x.shape]), params)
    plain = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)

    def follow(model: PyTree, gradient: float) -> Track:
        return _follow(
            parts, hyperparams, model, workers, steps, learning_rate, gradient
        )

    try:
        # Computing the limit loses digits, of which float32 has too few.
        with jax.enable_x64(True):
            track = partial(follow, small)
            gain = _find_gain(track, learning_rate, sizes, tolerance=1e-9)
    except Exception:  # a strategy may know its own shapes and dtypes
        track = partial(follow, plain)
        gain = _find_gain(track, learning_rate, sizes, tolerance=1e-5)
    if gain is None:
        return EffectiveRate(None, None)
    return EffectiveRate(gain, gain * learning_rate)


class _Parts(NamedTuple):
    """Functions from hyperparams to the strategy and to the inner optimizer."""

    make_strategy: Callable[[PyTree], Strategy]
    make_optimizer: Callable[[PyTree], optax.GradientTransformation]


def _ignore_hyperparams(part: Any, hyperparams: PyTree) -> Any:
    """Returns a strategy or an optimizer that has its numbers."""
    return part


def _find_learning_rate(parts: _Parts, hyperparams: PyTree) -> float:
    """Returns the strategy's learning rate, else the length of an optimizer's step."""
    rate = parts.make_strategy(hyperparams).learning_rate
    if rate is not None:
        return float(rate(0) if callable(rate) else rate)
    optimizer = parts.make_optimizer(hyperparams)
    position = jnp.zeros(())
    update = optax.with_extra_args_support(optimizer).update
    updates, _ = update(jnp.ones(()), optimizer.init(position), position)
    first_step = -float(jnp.asarray(updates))
    if not (first_step > 0 and math.isfinite(first_step)):
        raise ValueError(
            "effective_rate: the inner optimizer's first step along a gradient of 1 is "
            f"{-first_step:g}, which shows no learning rate: pass learning_rate"
        )
    return first_step


def _find_gain(
    track: Callable[[float], Track],
    learning_rate: float,
    sizes: list[int],
    tolerance: float,
) -> float | None:
    """Returns the gain, from the center's tracks for two gradients."""
    gains = []
    for gradient in (1.0, 2.0):
        movement = _find_steady_movement(track(gradient), sizes, tolerance)
        gains.append(movement / (-learning_rate * gradient))
    if not np.isfinite(gains).all():
        return float("nan")
    # A sign method moves as far with twice the gradient: it has no rate.
    if not np.isclose(*gains, rtol=1e-2):
        return None
    return gains[0]


def _find_steady_movement(track: Track, sizes: list[int], tolerance: float) -> float:
    """Returns the center's movement per step once it is steady; NaN if it never is."""
    chunks = []
    previous_movement = np.nan
    mean_movements = []
    for chunk_number, positions in enumerate(track, 1):
        chunks.append(positions)
        if chunk_number.bit_count() > 1:  # looked at after 1, 2, 4, … chunks
            continue
        leaf_positions = np.concatenate(chunks).T  # (leaves, steps)
        movements = np.array([_window_movements(leaf) for leaf in leaf_positions])
        limits = [_find_limit(windows, tolerance) for windows in movements]
        movement = np.average(limits, weights=sizes)
        if abs(movement - previous_movement) <= 1e-4 * abs(movement):
            return float(movement)
        previous_movement = movement
        # Movements of random steps have no limit. Their mean converges as the root of
        # the number of steps, so that two digits are reached soon.
        mean_movements.append(np.average(movements.mean(1), weights=sizes))
        is_long = chunk_number * CHUNK_STEPS >= MIN_RANDOM_STEPS
        if is_long and np.ptp(mean_movements[-3:]) <= 0.01 * abs(mean_movements[-1]):
            return float(mean_movements[-1])
    return float("nan")


def _follow(
    parts: _Parts,
    hyperparams: PyTree,
    params: PyTree,
    workers: int,
    steps: int,
    learning_rate: float,
    gradient: float,
) -> Track:
    """Yields the mean of each leaf of the center after each step, chunk by chunk."""
    with ANALYZED.set_to(True):
        carry = _begin(parts, workers, hyperparams, params)
    for first_step in range(0, steps, CHUNK_STEPS):
        with ANALYZED.set_to(True):
            carry, positions = _take_steps(
                parts, hyperparams, learning_rate, gradient, carry, np.int32(first_step)
            )
        # On the host, which needs no program; all workers have the same center.
        positions = np.asarray(positions, np.float64)
        yield positions.reshape(CHUNK_STEPS, -1, positions.shape[-1]).mean(1)


# The functions are static: another call with the same ones compiles nothing again.
@partial(jax.jit, static_argnums=(0, 1))
def _begin(parts: _Parts, workers: int, hyperparams: PyTree, params: PyTree) -> PyTree:
    """Makes the replicas and states of all workers."""
    strategy = parts.make_strategy(hyperparams)
    optimizer = parts.make_optimizer(hyperparams)

    def begin_worker(_: Any) -> tuple[Replica, PyTree]:
        start_params = jax.tree.map(jnp.asarray, params)
        replica = seeing(strategy, Replica(start_params, optimizer.init(start_params)))
        return replica, strategy.init(start_params)

    axes = _axis_names(strategy)
    shape = [1] * (len(axes) - 1) + [workers]
    return _over_workers(begin_worker, axes)(np.zeros(shape))


@partial(jax.jit, static_argnums=0)
def _take_steps(
    parts: _Parts,
    hyperparams: PyTree,
    learning_rate: Any,
    gradient: Any,
    carry: PyTree,
    first_step: Any,
) -> tuple[PyTree, jax.Array]:
    """Takes a chunk of steps of all workers."""
    strategy = parts.make_strategy(hyperparams)

    def take_step(carry: PyTree, step: Any) -> tuple[PyTree, jax.Array]:
        replica, state = carry
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), replica.params)
        grads, state = strategy.reduce(grads, replica, state, step)
        params = jax.tree.map(lambda p, g: p - learning_rate * g, replica.params, grads)
        replica, state = strategy.sync(replica._replace(params=params), state, step)
        center = strategy.center(replica.params, state)
        leaves = [leaf for leaf in jax.tree.leaves(center) if leaf.size]
        return (replica, state), jnp.stack([jnp.mean(leaf) for leaf in leaves])

    step_numbers = first_step + np.arange(CHUNK_STEPS, dtype=np.int32)
    mapped = _over_workers(take_step, _axis_names(strategy), (0, None))
    return jax.lax.scan(mapped, carry, step_numbers)


def _axis_names(strategy: Strategy) -> tuple[str, ...]:
    return mapped_names(find_axis(strategy))


def _over_workers(
    program: Callable[..., Any], axes: tuple[str, ...], in_axes: Any = 0
) -> Callable[..., Any]:
    """Maps a worker's program over the axes of a strategy."""
    for axis in reversed(axes):
        program = jax.vmap(program, in_axes=in_axes, axis_name=axis)
    return program


def _window_movements(track: np.ndarray) -> np.ndarray:
    """Returns the movements per step of a track in three windows, or NaN."""
    # Windows begin and end at steps with movement, and have equally many of them, so
    # that rounds are not cut. The first quarter is left out.
    moving_steps = np.flatnonzero(np.diff(track, prepend=0.0))
    if len(moving_steps) < 4:
        return np.full(3, np.nan)
    ends = moving_steps[np.arange(1, 5) * (len(moving_steps) // 4) - 1]
    return np.diff(track[ends]) / np.diff(ends)


def _find_limit(movements: np.ndarray, tolerance: float) -> float:
    """Returns the limit of the movements in three windows, or NaN."""
    r1, r2, r3 = movements
    # A geometric sequence, as from momentum, is continued to its limit (Aitken).
    if abs(r3 - r2) <= tolerance * abs(r3):
        return r3
    shrink = (r3 - r2) / (r2 - r1) if r2 != r1 else np.inf
    return r3 + (r3 - r2) * shrink / (1 - shrink) if 0 < shrink < 1 else np.nan
