"""Random weights."""

import math
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def normal(key: Any, shapes: PyTree) -> PyTree:
    """Draws standard normal float32 weights for a pytree of shapes, tuples of int."""
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return jax.tree.unflatten(tree, _draw_arrays(key, tuple(flat)))


# One draw for all weights, in one program: each shape of its own costs a compilation.
@partial(jax.jit, static_argnums=1)
def _draw_arrays(key: Any, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    ends = list(accumulate(map(math.prod, shapes)))
    draws = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    return [draw.reshape(shape) for draw, shape in zip(draws, shapes, strict=True)]
