"""The problem that the conformance tests train every algorithm on."""

import jax
import jax.numpy as jnp
import numpy as np

from support.requirements import PERIOD, SHAPES

BATCH = 24


def loss(params, batch):
    """The squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] * params["scale"] - batch["y"]) ** 2)


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
