"""The problem that the conformance tests train every algorithm on."""

import jax
import jax.numpy as jnp
import numpy as np
from owed import PERIOD, SHAPES

BATCH = 24


def loss(params, buffers, batch, key):
    """The squared error of a small network, with a buffer and a metric."""
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    error = hidden @ params["out"] * params["scale"] - batch["y"]
    seen = buffers["seen"] + jnp.mean(batch["x"])
    return jnp.mean(error**2), ({"seen": seen}, {"error": jnp.mean(jnp.abs(error))})


def problem(dtype=np.float32):
    """Params of this dtype, and the batches of 2 · PERIOD steps."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    steps = 2 * PERIOD
    batches = {
        "x": rng.normal(size=(steps, BATCH, 5)).astype(np.float32),
        "y": rng.normal(size=(steps, BATCH, 1)).astype(np.float32),
    }
    return jax.tree.map(lambda x: np.asarray(x, dtype), params), batches
