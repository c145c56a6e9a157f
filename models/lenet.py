"""LeNet for images of 28×28 pixels: two convolutions and a dense layer.

The layers of mnist_cnn in Minerva's examples; LeNet-5 (LeCun et al., "Gradient-based
learning applied to document recognition", 1998) is their ancestor.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.convolution import conv, he_normal, max_pool

Params = dict[str, dict[str, jax.Array]]


def init(key: Any, classes: int = 10, channels: int = 1) -> Params:
    """Draws He-normal weights, and zero biases.

    Returns:
        {"w", "b"} for each of conv1, conv2 and dense; w of a convolution is (height,
        width, inputs, outputs).
    """
    shapes = {
        "conv1": (5, 5, channels, 16),
        "conv2": (5, 5, 16, 32),
        "dense": (4 * 4 * 32, classes),
    }
    return {
        name: {"w": w, "b": jnp.zeros(w.shape[-1])}
        for name, w in he_normal(key, shapes).items()
    }


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Maps x, (batch, 28, 28, channels), to logits, (batch, classes)."""
    for name in ("conv1", "conv2"):
        layer = params[name]
        x = conv(x, layer["w"], padding="VALID") + layer["b"]
        x = max_pool(jax.nn.relu(x))  # (batch, 12, 12, 16), then (batch, 4, 4, 32)
    return x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"]
