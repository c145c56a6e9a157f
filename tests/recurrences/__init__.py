"""Each algorithm's recurrence from its paper, in float64 NumPy: a module by its name.

A module knows nothing of the library, nor of JAX but for the draws of random numbers.
Its iterator `recurrence(workers, **settings)` yields, after each local step, the
center and the list of the workers' params, vectors in the order of `problems.SHAPES`.

It has the `SETTINGS` to run under. In the first of them every term of an update is
alive, and no share is 0.5, which would hide two that changed places. An entry is the
arguments of the algorithm and its recurrence; or a pair of these and of arguments of
the recurrence alone: in what the library departs from the paper, or another number of
workers. Without such arguments a recurrence is the paper's.

`VARIANTS` are further settings that have a file in conformance/, by the name that the
file has after the algorithm's: those that other projects run.

One that draws random numbers has `DRAWS`, for the files of conformance/: what a draw is
for, and how draws are numbered. One that acts on leaves without calling `by_leaf` sets
`ACTS_ON_LEAVES`.
"""

from math import ceil
from typing import Any

import jax
import numpy as np
from support.problems import flatten, gradient, initial_params, make_batches, unflatten

STEPS = 14  # three blocks of PERIOD and half a block
PERIOD = 4
LR = 0.2
MOMENTUM = 0.9
START = flatten(initial_params())
SIZES = [np.size(leaf) for leaf in initial_params().values()]
X, TARGET = make_batches(STEPS)
FIRST_Q = "the first Q of a leaf, by the leaf's number"
PART_DRAWS = (
    "for each leaf in turn, workers + 1 rows of ceil(size / workers) numbers: row j "
    "for this worker's part j of the leaf, the last for the mean of its own part"
)


def falling(step):
    """A learning rate schedule, exact in the float32 in which JAX works it out."""
    return (26 - step) / 128


def worker_gradient(theta, step, worker, workers):
    """The gradient on the worker's contiguous slice of the step's global batch."""
    size = X.shape[1] // workers
    part = slice(worker * size, (worker + 1) * size)
    return gradient(theta, X[step, part], TARGET[step, part])


def mean(vectors):
    return np.mean(vectors, axis=0)


def rate(learning_rate: Any, step: int) -> Any:
    """The learning rate of a step, from a number or a schedule."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def local_steps(
    workers, learning_rate=LR, combine=lambda grads, theta, step: grads, momentum=None
):
    """Yields (step, θ), with every worker's θ stepped by its own heavy ball.

    `combine` makes of the workers' gradients those that they step along. The caller may
    replace entries of the list θ: the next step starts from them. So it is with the
    list `momentum`, where the caller passes the zeros that it starts from.
    """
    theta = [START] * workers
    momentum = [np.zeros_like(START)] * workers if momentum is None else momentum
    for step in range(STEPS):
        grads = [worker_gradient(theta[i], step, i, workers) for i in range(workers)]
        for i, g in enumerate(combine(grads, theta, step)):
            momentum[i] = MOMENTUM * momentum[i] + g
            theta[i] = theta[i] - rate(learning_rate, step) * momentum[i]
        yield step, theta


def in_step(workers, combine, learning_rate=LR):
    """A recurrence of workers that all take the same step, which `combine` makes."""
    for _, theta in local_steps(workers, learning_rate, combine):
        yield theta[0], theta


def by_leaf(function, *vectors):
    """Joins the results of a function of each leaf's number and place in vectors."""
    leaves = zip(*(unflatten(vector).values() for vector in vectors), strict=True)
    parts = [function(number, *leaf) for number, leaf in enumerate(leaves)]
    return np.concatenate([np.ravel(part) for part in parts])


def split_leaf(leaf, workers):
    """The parts of a leaf that one worker each averages; the last ones are short."""
    x = leaf.ravel()
    size = ceil(leaf.size / workers)
    return [x[j * size : (j + 1) * size] for j in range(workers)]


def draw_key(seed, *numbers):
    """The key of draws: a step and a worker's index, or a leaf's number, folded in."""
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def leaf_draws(key, counts):
    """Uniform draws for each leaf, from one sequence."""
    draws = np.asarray(jax.random.uniform(key, (sum(counts),)))
    return np.split(draws, np.cumsum(counts)[:-1])
