"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from models.draws import normal

Params = list[dict[str, jax.Array]]


def init(key: Any, sizes: Sequence[int]) -> Params:
    """Draws weights for layers of these sizes, input first.

    Returns:
        {"w": (inputs, outputs), "b": (outputs,)} for each layer; w is normal with
        variance 2 / inputs (He et al., "Delving deep into rectifiers", 2015), b zero.
    """
    return _layers(normal(key, list(pairwise(sizes))))


@jax.jit  # else each shape is a program of its own to compile
def _layers(draws: list[jax.Array]) -> Params:
    return [{"w": w * (2 / len(w)) ** 0.5, "b": jnp.zeros(w.shape[1])} for w in draws]


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Maps x, (batch, inputs), to (batch, outputs) with ReLU between the layers."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]
