"""Rosenbrock's curved valley with noisy gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tasks import functions
from experiments.tasks.task import Task

START = (-1.2, 1.0)  # from Rosenbrock's paper


def rosenbrock(noise: float = 1.5) -> Task:
    """Rosenbrock's curved valley, (1 - x)² + 100 (y - x²)², with noisy gradients.

    It is not convex; its minimum is 0, at (1, 1). The test loss is exact.

    Args:
        noise: standard deviation of each entry of an example's gradient.

    Source: Rosenbrock, "An automatic method for finding the greatest or least value of
    a function", 1960; as a task of 256 workers: Iacob et al., "DES-LOC: desynced low
    communication adaptive optimizers", 2025.
    """

    def value(x: jax.Array) -> jax.Array:
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

    return Task(
        **functions.fields(value, lambda key: jnp.array(START), np.ones(2), noise),
        batch_size=8,
        steps=1600,
        lr={"sgd": 0.0005, "": 0.01},
        dispatch_steps=160,
        optimizer="adam",
    )
