"""Accumulation in a wider dtype than that of the params."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

PyTree = Any


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype in which to accumulate values of a dtype: at least float32."""
    # jax does not promote 8-bit floats to any other dtype.
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.promote_types(dtype, jnp.float32)


def widen(tree: PyTree) -> PyTree:
    """Casts floats to at least float32, for anchors, velocities and residuals.

    Args:
        tree: arrays; leaves that are not floats are kept.
    """
    # bfloat16 state would lose steps that are smaller than its precision of 8 bits.
    return on_floats(lambda xs: [x.astype(wide_dtype(x.dtype)) for x in xs], tree)


def zeros(tree: PyTree) -> PyTree:
    """Makes zeros shaped like a tree, at least float32: momenta, residuals and sums."""
    return jax.tree.map(jnp.zeros_like, widen(tree))


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """Casts a tree to the dtypes of another.

    Args:
        tree: arrays.
        like: a tree of the same structure.
    """
    return jax.tree.map(lambda x, y: jnp.asarray(x, jnp.asarray(y).dtype), tree, like)


def on_floats(
    change: Callable[[list[jax.Array]], Sequence[jax.Array]], tree: PyTree
) -> PyTree:
    """Changes all float leaves of a tree in one call, and keeps the other leaves.

    Args:
        change: a list of leaves -> a list of as many new leaves.
        tree: arrays.
    """
    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    changed = iter(change([x for x in leaves if _is_float(x)]))
    return form.unflatten([next(changed) if _is_float(x) else x for x in leaves])


def weak(label: str, number: Any) -> Any:
    """Makes a traced number weakly typed: like a Python float, it widens no array.

    Args:
        label: its name, for the message.
        number: a real scalar.

    Raises:
        ValueError: it is not a real scalar.
    """
    kind = jax.typeof(number)
    is_real = any(jnp.issubdtype(kind.dtype, x) for x in (jnp.floating, jnp.integer))
    if kind.shape or not is_real:
        raise ValueError(f"{label} must be a number, got {kind.str_short()}")
    # A value set into an array takes the array's type, which is weak for a Python
    # number. XLA removes the operation.
    return jnp.asarray(0.0).at[()].set(number)


def weak_floats(tree: PyTree) -> PyTree:
    """Makes the traced floats of a tree weakly typed, and keeps the rest."""

    def leaf(x: Any) -> Any:
        return weak("a number", x) if isinstance(x, Tracer) and _is_float(x) else x

    return jax.tree.map(leaf, tree)


def rounded(number: Any, least: int) -> Any:
    """The nearest whole number, at least `least`; a Python int for a Python number."""
    if isinstance(number, int | float):
        return max(least, round(number))
    return jnp.maximum(least, jnp.round(number).astype(jnp.int32))


def norm(tree: PyTree) -> jax.Array:
    """The norm of all leaves together, whose gradient at 0 is 0."""
    return root(optax.tree.norm(tree, squared=True))


def root(x: jax.Array) -> jax.Array:
    """The square root, with gradient 0 at 0: the true gradient there would give NaN."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Selects one of two trees by a scalar boolean; both are computed."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def if_finite(combined: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state, or the old one if the combined arrays are not finite.

    Args:
        combined: arrays that are the same on all workers, so that all decide alike.
        new: the state after the arrays were applied.
        old: the state before, of the same structure.
    """
    # Otherwise a NaN from one batch would stay in a residual for good.
    leaves = [x for x in jax.tree.leaves(combined) if _is_float(x)]
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves] or [True]))
    return select(finite, new, old)


def _is_float(x: Any) -> bool:
    """Whether a leaf holds floats; counts and keys do not."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
