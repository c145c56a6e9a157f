"""LeNet for images of 28×28 pixels, or others: two convolutions and a dense layer.

The layers of mnist_cnn in Minerva's examples; LeNet-5 (LeCun et al., "Gradient-based
learning applied to document recognition", 1998) is their ancestor.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.convolution import conv, he_normal, max_pool

Params = dict[str, dict[str, jax.Array]]
Shapes = dict[str, tuple[int, ...]]


def init(
    key: Any, classes: int = 10, channels: int = 1, sides: tuple[int, int] = (28, 28)
) -> Params:
    """Draws He-normal weights, and zero biases.

    Args:
        key: the random key.
        classes: the number of classes.
        channels: the number of channels of an image.
        sides: its height and width, at least 16 each.

    Returns:
        {"w", "b"} for each of conv1, conv2 and dense; w of a convolution is (height,
        width, inputs, outputs).
    """
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in sides)
    shapes: Shapes = {
        "conv1": (5, 5, channels, 16),
        "conv2": (5, 5, 16, 32),
        "dense": (rows * columns * 32, classes),
    }
    weights = he_normal(key, shapes)
    return {name: {"w": w, "b": jnp.zeros(w.shape[-1])} for name, w in weights.items()}


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Maps x, (batch, height, width, channels), to logits, (batch, classes)."""
    for name in ("conv1", "conv2"):
        layer = params[name]
        x = conv(x, layer["w"], padding="VALID") + layer["b"]
        x = max_pool(jax.nn.relu(x))  # of 28×28: (batch, 12, 12, 16), (batch, 4, 4, 32)
    return x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"]
