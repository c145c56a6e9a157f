"""Accumulation in a wider dtype than that of the params."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype to accumulate values of this one in: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(tree: PyTree) -> PyTree:
    """Casts floats to at least float32, for anchors, velocities and residuals.

    Args:
        tree: arrays; leaves that are no floats are kept.
    """
    # Steps of a bfloat16 model below its 8 bits would be lost in bfloat16 state.

    def leaf(x):
        x = jnp.asarray(x)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(wide_dtype(x.dtype)) if is_float else x

    return jax.tree.map(leaf, tree)


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """Casts a tree to the dtypes of another.

    Args:
        tree: arrays.
        like: a tree of the same structure.
    """
    return jax.tree.map(lambda x, y: jnp.asarray(x, jnp.asarray(y).dtype), tree, like)


def if_finite(combined: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state, or the old one if what was combined is not finite.

    Args:
        combined: arrays that are the same on all workers, which thus decide alike.
        new: the state after them.
        old: the state before, of the same structure.
    """
    # Else one batch with a NaN would stay in a residual for good.
    leaves = [x for x in jax.tree.leaves(combined) if _is_float(x)]
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves] or [True]))
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
