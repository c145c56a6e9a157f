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


def if_finite(combined: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """The new state, or the old one where what was combined is not finite.

    One batch with a NaN would stay in a residual for good. All workers decide alike, as
    all have what was combined.
    """
    leaves = [x for x in jax.tree.leaves(combined) if _is_float(x)]
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves] or [True]))
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
