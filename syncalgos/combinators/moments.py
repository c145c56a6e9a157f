"""The moments of optimizers, which are fields of optax's states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.optax_states import MOMENTS


def map_moments(
    order: int, change: Callable[[PyTree], PyTree], opt_state: PyTree
) -> PyTree:
    """Changes the first or the second moments of an optimizer.

    Args:
        order: 1 or 2, for the first or the second moments.
        change: moments, shaped like params -> new ones of the same shapes.
        opt_state: the state of any optax optimizer.

    Returns:
        opt_state with these moments changed; unchanged if it holds no arrays of floats.

    Raises:
        ValueError: opt_state holds arrays of floats, but no state from MOMENTS.
    """
    found = []

    def node(state):
        if not _is_known(state):
            return state
        found.append(state)
        fields = MOMENTS[type(state).__name__][order - 1]
        return state._replace(**{f: change(getattr(state, f)) for f in fields})

    changed = jax.tree.map(node, opt_state, is_leaf=_is_known)
    if not found and any(map(_is_array_of_floats, jax.tree.leaves(opt_state))):
        names = ", ".join(sorted(_names(opt_state)))
        raise ValueError(
            f"the optimizer's state ({names}) has no moments that can be averaged: use "
            "adam, sgd with momentum, or another optimizer of optax"
        )
    return changed


def _is_known(state: Any) -> bool:
    """Whether a node of opt_state is one of optax's states with moments."""
    return type(state).__name__ in MOMENTS and hasattr(state, "_replace")


def _is_array_of_floats(x: Any) -> bool:
    """Whether a leaf is an array of floats, unlike counts and hyperparameters."""
    return jnp.ndim(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _names(state: Any) -> set[str]:
    """The names of the classes of states in a chain that hold arrays of floats."""
    if type(state) is tuple:
        return set().union(*map(_names, state))
    holds = any(map(_is_array_of_floats, jax.tree.leaves(state)))
    return {type(state).__name__} if holds else set()


def largest_step(b1: Any, b2: Any) -> Any:
    """The upper bound of |m| / √v for Adam's moments; infinity if there is none.

    Args:
        b1: the decay of m, at least 0 and below 1.
        b2: the decay of v.
    """
    # By the Cauchy-Schwarz inequality. Without a bound, 1-bit Adam on digits diverged
    # within 13 steps.
    bounded = b1**2 < b2
    if not checks.is_traced(bounded):
        return (1 - b1) / ((1 - b2) * (1 - b1**2 / b2)) ** 0.5 if bounded else jnp.inf
    square = (1 - b2) * (1 - b1**2 / jnp.where(bounded, b2, 1))
    return jnp.where(bounded, (1 - b1) / jnp.where(bounded, square, 1) ** 0.5, jnp.inf)
