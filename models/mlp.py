"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

Params = list[dict[str, jax.Array]]


def init(key: Any, sizes: Sequence[int]) -> Params:
    """Draws weights for layers of these sizes, input first.

    Returns:
        One {"w": (inputs, outputs), "b": (outputs,)} a layer; w is normal with variance
        2 / inputs, b is zero (He et al., "Delving deep into rectifiers", 2015).
    """
    shapes = list(pairwise(sizes))
    counts = [rows * columns for rows, columns in shapes]
    # One draw for all layers: each shape of its own costs a compilation.
    ends = list(accumulate(counts))
    draws = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    return [
        {
            "w": draw.reshape(shape) * (2 / shape[0]) ** 0.5,
            "b": jnp.zeros(shape[1]),
        }
        for draw, shape in zip(draws, shapes, strict=True)
    ]


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Maps x, (batch, inputs), to (batch, outputs) with ReLU between the layers."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]
