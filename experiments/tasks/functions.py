"""Functions with a known minimum as tasks; their gradients are exact up to noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.tasks.task import Data
from syncalgos import checks

EXAMPLES = 4096  # without content: an example is one draw of the noise


def fields(
    value: Callable[[jax.Array], jax.Array],
    start: Callable[[jax.Array], jax.Array],
    optimum: np.ndarray,
    noise: float,
) -> dict[str, Any]:
    """Returns the fields of a Task that minimises a function of x.

    The test loss is the center's height above the minimum, and the test distance is the
    center's distance to the minimum; both are exact.

    Args:
        value: x, (dimensions,) -> its height above the minimum, a scalar.
        start: key -> the first x.
        optimum: (dimensions,), where the value is 0.
        noise: standard deviation of each entry of an example's gradient. For a batch of
            n examples it is noise / √n.
    """
    checks.real("--noise", noise, least=0)

    def apply(params, buffers, batch, key, train):
        x, count = params["x"], len(batch["number"])
        height = jnp.broadcast_to(value(x), (count,))
        if train and noise:
            draws = noise * jax.random.normal(key, (count, x.size), x.dtype)
            # This term is 0, and its gradient is the draw.
            height = height + draws @ (x - lax.stop_gradient(x))
        distance = jnp.linalg.norm(x - jnp.asarray(optimum, x.dtype))
        return {"loss": height, "distance": jnp.full(count, distance)}, buffers

    return {
        "init": lambda key: ({"x": start(key)}, ()),
        "apply": apply,
        "load": _load,
    }


def _load() -> Data:
    """Makes examples without content: the loss draws noise from the worker's key."""
    return Data(
        train={"number": np.arange(EXAMPLES, dtype=np.int32)},
        test={"number": np.zeros(1, np.int32)},
    )
