"""Random weights."""

import math
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def normal(key: Any, shapes: PyTree) -> PyTree:
    """Draws standard normal float32 weights for a pytree of shapes, tuples of int."""
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    # One draw for all weights: each shape of its own costs a compilation.
    ends = list(accumulate(map(math.prod, flat)))
    draws = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    weights = [draw.reshape(shape) for draw, shape in zip(draws, flat, strict=True)]
    return jax.tree.unflatten(tree, weights)
