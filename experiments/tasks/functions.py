"""Functions with a known minimum as tasks; their gradients are exact up to noise."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.tasks.task import Data, Task
from syncalgos import checks

EXAMPLES = 4096  # an example is one draw of the noise
START = (-1.2, 1.0)  # from Rosenbrock's paper


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

    def start(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (dimensions,))

    return _task(value, start, optimum, noise, sgd=0.1)


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

    task = _task(value, lambda key: jnp.array(START), np.ones(2), noise, sgd=0.0005)
    return task._replace(optimizer="adam")


def _task(
    value: Callable[[jax.Array], jax.Array],
    start: Callable[[jax.Array], jax.Array],
    optimum: np.ndarray,
    noise: float,
    sgd: float,
) -> Task:
    """Makes a task that minimises a function of x.

    The test loss is the center's height above the minimum, and the test distance is the
    center's distance to the minimum; both are exact.

    Args:
        value: x, (dimensions,) -> its height above the minimum, a scalar.
        start: key -> the first x.
        optimum: (dimensions,), where the value is 0.
        noise: standard deviation of each entry of an example's gradient. For a batch of
            n examples it is noise / √n.
        sgd: the learning rate of SGD.
    """
    checks.real("--noise", noise, least=0)

    def apply(params, buffers, batch, key, train):
        x = params["x"]
        count = len(batch["number"])
        height = jnp.broadcast_to(value(x), (count,))
        if train and noise:
            draws = noise * jax.random.normal(key, (count, x.size), x.dtype)
            # This term is 0, and its gradient is the draw.
            height = height + draws @ (x - lax.stop_gradient(x))
        distance = jnp.linalg.norm(x - jnp.asarray(optimum, x.dtype))
        return {"loss": height, "distance": jnp.full(count, distance)}, buffers

    return Task(
        init=lambda key: ({"x": start(key)}, ()),
        apply=apply,
        # Examples without content: the loss draws noise from the worker's key.
        load=lambda: Data(
            train={"number": np.arange(EXAMPLES, dtype=np.int32)},
            test={"number": np.zeros(1, np.int32)},
        ),
        batch_size=8,
        steps=1600,
        lr={"sgd": sgd, "": 0.01},
        dispatch_steps=160,
    )
