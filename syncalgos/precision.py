"""Sums and averages in a wider dtype than what is trained."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which values of this one are accumulated: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(tree: PyTree) -> PyTree:
    """Floats as at least float32: anchors, velocities and residuals accumulate in it.

    Steps of a bfloat16 model below its 8 bits would be lost in bfloat16 state.
    """

    def leaf(x):
        x = jnp.asarray(x)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(wide_dtype(x.dtype)) if is_float else x

    return jax.tree.map(leaf, tree)


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """The tree in the dtypes of another."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, jnp.asarray(y).dtype), tree, like)
