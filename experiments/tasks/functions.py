"""Functions with a known minimum as tasks: their gradients are exact but for noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.tasks.task import Data
from syncalgos import checks

EXAMPLES = 4096  # in name: an example is one draw of the noise


def fields(
    value: Callable[[jax.Array], jax.Array],
    start: Callable[[jax.Array], jax.Array],
    optimum: np.ndarray,
    noise: float,
) -> dict[str, Any]:
    """Returns the fields of a Task that minimises a function of x.

    Its test loss is the center's height above the minimum, and its test distance that
    of the center to the point where the minimum is, both exact.

    Args:
        value: x, (dimensions,) -> its height above the minimum, a scalar.
        start: key -> the first x.
        optimum: (dimensions,), where the value is 0.
        noise: standard deviation of each number of an example's gradient. A batch of n
            examples has noise / √n.
    """
    checks.real("--noise", noise, least=0)

    def apply(params, buffers, batch, key, train):
        x, count = params["x"], len(batch["number"])
        height = jnp.broadcast_to(value(x), (count,))
        if train and noise:
            draws = noise * jax.random.normal(key, (count, x.size), x.dtype)
            # 0, whose gradient is the draw.
            height = height + draws @ (x - lax.stop_gradient(x))
        distance = jnp.linalg.norm(x - jnp.asarray(optimum, x.dtype))
        return {"loss": height, "distance": jnp.full(count, distance)}, buffers

    return {
        "init": lambda key: ({"x": start(key)}, ()),
        "apply": apply,
        "load": _load,
    }


def _load() -> Data:
    """Makes examples that hold nothing: the loss draws from a worker's key."""
    return Data(
        train={"number": np.arange(EXAMPLES, dtype=np.int32)},
        test={"number": np.zeros(1, np.int32)},
    )
