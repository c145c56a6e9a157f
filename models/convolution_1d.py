"""Convolutions over sequences: three of stride 2, and a dense layer.

The layers of the convolutional model in Greydanus, "Scaling down deep learning", 2020.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.convolution import conv, he_normal

Params = dict[str, dict[str, jax.Array]]
CONVOLUTIONS = ("conv1", "conv2", "conv3")


def init(key: Any, length: int = 40, classes: int = 10, channels: int = 25) -> Params:
    """Draws He-normal weights, and zero biases.

    Args:
        key: random key.
        length: of a sequence, divisible by 8.
        classes: the number of logits.
        channels: of each convolution.

    Returns:
        {"w", "b"} for each convolution and dense; w of a convolution is (1, width,
        inputs, outputs).
    """
    shapes = {
        "conv1": (1, 5, 1, channels),
        "conv2": (1, 3, channels, channels),
        "conv3": (1, 3, channels, channels),
        "dense": (length // 8 * channels, classes),
    }
    weights = he_normal(key, shapes)
    return {name: {"w": w, "b": jnp.zeros(w.shape[-1])} for name, w in weights.items()}


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Maps x, (batch, length), to logits, (batch, classes)."""
    x = x[:, None, :, None]  # as images of one row
    for name in CONVOLUTIONS:
        layer = params[name]
        x = jax.nn.relu(conv(x, layer["w"], stride=2) + layer["b"])
    return x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"]
