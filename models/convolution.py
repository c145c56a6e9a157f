"""Convolution and pooling of images, (batch, height, width, channels), and weights."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from models.draws import normal

PyTree = Any
Padding = Literal["SAME", "VALID"]


def he_normal(key: Any, shapes: PyTree) -> PyTree:
    """Draws weights for a pytree whose leaves are shapes, tuples of int.

    A shape is (..., height, width, inputs, outputs) for a convolution, where leading
    axes count weights of one shape, or (inputs, outputs) for a dense layer.

    Returns:
        Normal float32 weights of variance 2 / fan-in (He et al., "Delving deep into
        rectifiers", 2015), where the fan-in is height × width × inputs.
    """
    return jax.tree.map(
        lambda w: w * (2 / math.prod(w.shape[-4:-1])) ** 0.5, normal(key, shapes)
    )


def conv(
    x: jax.Array, w: jax.Array, stride: int = 1, padding: Padding = "SAME"
) -> jax.Array:
    """Convolves images with weights, in the form that the platform runs fast.

    Args:
        x: (batch, height, width, inputs).
        w: (kernel height, kernel width, inputs, outputs).
        stride: step of the window in both directions.
        padding: SAME keeps ceil(size / stride) rows and columns, an odd zero at the
            end (as in lax, not as in PyTorch); VALID takes whole windows only.

    Returns:
        (batch, new height, new width, outputs).
    """
    # XLA on CPU runs `by_lax` inside a scan 10 to 15 times slower: LeNet's step of 32
    # images takes 102 ms, by patches 6.5 (docs/measured.md).
    plain_matmul = w.shape[:2] == (1, 1)
    # Of the devices for which the program is made: a compiler may be elsewhere.
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    if plain_matmul or platform == "cpu":
        return by_patches(x, w, stride, padding)
    return by_lax(x, w, stride, padding)


def by_lax(
    x: jax.Array, w: jax.Array, stride: int = 1, padding: Padding = "SAME"
) -> jax.Array:
    """Convolves by XLA's own operation; the arguments are those of `conv`."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def by_patches(
    x: jax.Array, w: jax.Array, stride: int = 1, padding: Padding = "SAME"
) -> jax.Array:
    """Convolves by one matmul of all patches; the arguments are those of `conv`."""

    # The gradient gathers its patches again. Keeping them, nine times x, is no faster:
    # ResNet-20 at batch 32 then takes 251 MiB instead of 140.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def multiply_patches(x: jax.Array, w: jax.Array) -> jax.Array:
        shifts = _shifted_windows(x, w.shape[:2], stride, padding, fill=0)
        patches = jnp.concatenate(shifts, axis=-1)
        return patches @ w.reshape(-1, w.shape[-1])

    return multiply_patches(x, w)


def max_pool(x: jax.Array, size: int = 2) -> jax.Array:
    """Pools maxima of size×size tiles; drops rows and columns that fill no tile."""
    batch, height, width, channels = x.shape
    rows = height // size
    columns = width // size
    x = x[:, : rows * size, : columns * size]
    x = x.reshape(batch, rows, size, columns, size, channels)
    # XLA's gradient of reduce_window is slow on CPU, and that of max(axis) 15 % slower.
    x = functools.reduce(jnp.maximum, [x[:, :, i] for i in range(size)])
    return functools.reduce(jnp.maximum, [x[:, :, :, i] for i in range(size)])


def overlapping_max_pool(x: jax.Array, size: int = 3, stride: int = 2) -> jax.Array:
    """Pools maxima of size×size windows, a stride apart, with SAME padding."""
    shifts = _shifted_windows(x, (size, size), stride, "SAME", fill=-jnp.inf)
    return functools.reduce(jnp.maximum, shifts)


def _shifted_windows(
    x: jax.Array, kernel: tuple[int, ...], stride: int, padding: Padding, fill: float
) -> list[jax.Array]:
    """Returns the entries of the padded images at each window position."""
    pads = lax.padtype_to_pads(x.shape[1:3], kernel, (stride, stride), padding)
    x = jnp.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
    rows, columns = (  # the first window's, and one for each stride that follows
        max((size - kernel_size) // stride * stride + 1, 0)
        for size, kernel_size in zip(x.shape[1:3], kernel, strict=True)
    )
    shifts = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            shifts.append(x[:, i : i + rows : stride, j : j + columns : stride])
    return shifts
