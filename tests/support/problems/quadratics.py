"""Workers with quadratic losses of their own, trained in one compiled program.

Worker i's gradient is hᵢ (x - bᵢ) + noise, entry by entry, with curvatures h, minima b
and noise of its own: nothing to differentiate, so that a strategy's training compiles
in half a second. NumPy oracles hold all workers' models as float64 (workers, SIZE).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from support.plain_loop import local_steps
from support.problems import relative_error
from syncalgos import WORKERS, Replica

SHAPES = {"body": {"bias": (4,), "kernel": (3, 4)}, "head": {"scale": ()}}
LR = 0.1
STEPS = 12
ROUNDING = 1e-12  # of float64, relative
SGD = optax.sgd(LR)

_SHAPES, _FORM = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
_STOPS = np.cumsum([int(np.prod(shape)) for shape in _SHAPES])
SIZE = int(_STOPS[-1])
_RNG = np.random.default_rng(0)
START = _RNG.normal(size=SIZE)
CURVATURE = _RNG.uniform(0.2, 2.0, size=(8, SIZE))
MINIMUM = _RNG.normal(size=(8, SIZE))
NOISE = _RNG.normal(size=(40, 8, SIZE))


def flatten(tree, lead=0):
    """Joins the leaves behind their `lead` leading axes: (*lead, size)."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)


def unflatten(vectors):
    """The tree of vectors (*lead, SIZE)."""
    lead = np.shape(vectors)[:-1]
    pairs = zip(np.split(vectors, _STOPS[:-1], axis=-1), _SHAPES, strict=True)
    return _FORM.unflatten([part.reshape((*lead, *shape)) for part, shape in pairs])


class ByHand:
    """Every worker's own heavy-ball steps in NumPy, and what a test makes of them.

    Going through it gives (step, θ, m) after each local step. The caller may write to θ
    and m, (workers, SIZE): the next step starts from them.

    Args:
        workers: at most 8.
        steps: local steps.
        momentum: of the heavy balls.
        combine: makes of the workers' gradients those that they step along.
        lr: step -> the learning rate.
    """

    def __init__(
        self,
        workers=4,
        steps=STEPS,
        momentum=0.0,
        combine=lambda grads, step: grads,
        lr=lambda step: LR,
    ):
        self._steps = self._walk(workers, steps, momentum, combine, lr)
        self._models = []

    def _walk(self, workers, steps, momentum, combine, lr):
        theta = np.tile(START, (workers, 1))
        velocity = np.zeros_like(theta)
        for step in range(steps):
            distances = theta - MINIMUM[:workers]
            grads = CURVATURE[:workers] * distances + NOISE[step, :workers]
            velocity[:] = momentum * velocity + combine(grads, step)
            theta -= lr(step) * velocity
            yield step, theta, velocity
            self._models.append(theta.copy())

    def __iter__(self):
        return self._steps

    def ends(self, period=4):
        """Gives the last step of each period; those between are taken too."""
        return (local_step for local_step in self if (local_step[0] + 1) % period == 0)

    @property
    def replicas(self):
        """The models that all steps leave, (steps, workers, SIZE)."""
        for _ in self:
            pass
        return np.array(self._models)


class TrainedQuadratics(NamedTuple):
    """The models after each step.

    Attributes:
        centers: the mean of the workers' centers, (steps, SIZE).
        replicas: all workers' params, (steps, workers, SIZE).
        replica: all of it: leaves (steps, workers, …).
        disagreement: the widest gap between two workers' centers.
    """

    centers: np.ndarray
    replicas: np.ndarray
    replica: Replica
    disagreement: float


def program(strategy, optimizer=SGD, axis: Any = WORKERS):
    """The training, to be compiled: `make_worker_inputs` -> replicas and centers.

    Args:
        strategy: made for this axis.
        optimizer: the inner one.
        axis: a name or two.
    """

    def worker(worker_inputs):
        params, curvature, minimum, noise = worker_inputs

        def gradient(params, noise):
            def leaf(h, x, b, n):
                return h * (x - b) + n

            return jax.tree.map(leaf, curvature, params, minimum, noise)

        # buffers count, for strategies that mark what they do there.
        replica = Replica(params, optimizer.init(params), jnp.int32(0))
        start = replica, strategy.init(params)
        return local_steps(strategy, optimizer, gradient, start, noise)

    mapped = worker
    for name in reversed((axis,) if isinstance(axis, str) else axis):
        mapped = jax.vmap(mapped, axis_name=name)
    return mapped


def make_worker_inputs(
    workers=4,
    steps=STEPS,
    axis: Any = WORKERS,
    start=START,
    noise=NOISE,
    dtype: Any = float,
):
    """Each worker's params, curvature, minimum and noise, laid over the axis."""
    arrays = (
        np.broadcast_to(start, (workers, SIZE)),
        CURVATURE[:workers],
        MINIMUM[:workers],
        np.moveaxis(noise[:steps, :workers], 1, 0),  # (workers, steps, SIZE)
    )
    placed = [x.reshape(*_shape(workers, axis), *x.shape[1:]) for x in arrays]
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), [*map(unflatten, placed)])


def _shape(workers, axis):
    if isinstance(axis, str):
        return (workers,)
    return (1, workers) if workers % 2 else (2, workers // 2)


def train(
    strategy,
    optimizer=None,
    workers=4,
    steps=STEPS,
    axis: Any = WORKERS,
    start=START,
    noise=NOISE,
    dtype: Any = float,
):
    """Trains in a loop of its own, under vmap over one axis or two.

    Args:
        strategy: made for this axis.
        optimizer: the inner one; none means plain SGD.
        workers: at most 8.
        steps: local steps.
        axis: a name; or two, the workers laid over 2 × workers/2 if they are even.
        start: one model, or each worker's own.
        noise: in the gradients, (at least steps, 8, SIZE).
        dtype: of params.
    """
    alone = {"": (strategy, SGD if optimizer is None else optimizer)}
    worker_inputs = make_worker_inputs(workers, steps, axis, start, noise, dtype)
    return train_all(alone, worker_inputs, axis)[""]


def train_all(pairs, worker_inputs, axis: Any = WORKERS):
    """Trains with each of {name: (strategy, inner optimizer)}, in one program.

    Args:
        pairs: strategies made for this axis, and their inner optimizers.
        worker_inputs: what `make_worker_inputs` makes.
        axis: a name or two.
    """
    programs = {name: program(*pair, axis) for name, pair in pairs.items()}
    compiled = jax.jit(
        lambda worker_inputs: {
            name: run(worker_inputs) for name, run in programs.items()
        }
    )
    lead = 1 if isinstance(axis, str) else len(axis)

    def by_step(x):  # (*shape, steps, …) -> (steps, workers, …)
        return np.moveaxis(np.reshape(x, (-1, *x.shape[lead:])), 1, 0)

    results = jax.tree.map(by_step, compiled(worker_inputs))
    return {name: _trained(*pair) for name, pair in results.items()}


def _trained(replica, center):
    centers = flatten(center, lead=2)  # (steps, workers, SIZE)
    return TrainedQuadratics(
        centers=centers.mean(1),
        replicas=flatten(replica.params, lead=2),
        replica=replica,
        disagreement=np.ptp(centers, axis=1).max(),
    )


def assert_replicas(trained, expected):
    """The workers' models after each step are the oracle's, to rounding."""
    assert relative_error(trained.replicas, expected) <= ROUNDING


def assert_same(trained, other):
    """The workers' models and their center after each step are another's."""
    assert_replicas(trained, other.replicas)
    assert relative_error(trained.centers, other.centers) <= ROUNDING
