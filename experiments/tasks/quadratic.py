"""A convex quadratic with noisy gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tasks import functions
from experiments.tasks.task import Task
from syncalgos import checks


def quadratic(
    dimensions: int = 50, condition: float = 100.0, noise: float = 1.0
) -> Task:
    """A convex quadratic with a known minimum, and Gaussian noise in its gradients.

    Its eigenvalues lie between 1 and 1 / condition, evenly on a logarithmic scale, in
    directions that are a fixed rotation of the axes. The test loss is the height above
    the minimum.

    Args:
        dimensions: number of dimensions of x, which starts at standard normal draws.
        condition: ratio of the largest eigenvalue, 1, to the smallest.
        noise: standard deviation of each entry of an example's gradient.

    Source: the setting of Khaled et al., "Understanding outer optimizers in Local SGD",
    2025, with a different spectrum.
    """
    checks.whole("--dimensions", dimensions, least=1)
    checks.real("--condition", condition, least=1)
    draws = np.random.default_rng(0)
    # Not at 0: compressed numbers are most accurate near 0.
    optimum = draws.normal(size=dimensions)
    rotation = np.linalg.qr(draws.normal(size=(dimensions, dimensions)))[0]
    spectrum = np.geomspace(1 / condition, 1, dimensions)
    # Half of x's squared length along these rows is its height.
    rows = np.sqrt(spectrum)[:, None] * rotation

    def value(x: jax.Array) -> jax.Array:
        away = jnp.asarray(rows, x.dtype) @ (x - jnp.asarray(optimum, x.dtype))
        return jnp.sum(away**2) / 2

    return Task(
        **functions.fields(
            value, lambda key: jax.random.normal(key, (dimensions,)), optimum, noise
        ),
        batch_size=8,
        steps=1600,
        lr={"sgd": 0.1, "": 0.01},
        dispatch_steps=160,
    )
