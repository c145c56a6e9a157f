"""Where optimizers keep their moments: the fields of optax's states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos.collectives import PyTree

# By the class of a state, the fields of its first moments and of its second ones. A
# name alone does not tell: mu of SM3 is what others call nu, and params may have a mu.
MOMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "TraceState": (("trace",), ()),
    "EmaState": (("ema",), ()),
    "MuonState": (("mu",), ()),
    "ScaleByLionState": (("mu",), ()),
    "ScaleByAdamState": (("mu",), ("nu",)),
    "ScaleByBeliefState": (("mu",), ("nu",)),
    "ScaleByNovogradState": (("mu",), ("nu",)),
    "ScaleByRStdDevState": (("mu",), ("nu",)),
    "ScaleByAmsgradState": (("mu",), ("nu", "nu_max")),
    "ScaleByAdanState": (("m", "v"), ("n",)),
    "ScaleByAdemamixState": (("m1", "m2"), ("nu",)),
    "ScaleBySimplifiedAdEMAMixState": (("m",), ("n",)),
    "ProdigyState": (("exp_avg",), ("exp_avg_sq",)),
    "DAdaptAdamWState": (("exp_avg",), ("exp_avg_sq",)),
    "ScaleBySM3State": (("nu",), ("mu",)),
    "ScaleByRmsState": ((), ("nu",)),
    "ScaleByRssState": ((), ("sum_of_squares",)),
    "ScaleByAdaDeltaState": ((), ("e_g", "e_x")),
    "FactoredState": ((), ("v_row", "v_col", "v")),
}


def map_moments(
    order: int, change: Callable[[PyTree], PyTree], opt_state: PyTree
) -> PyTree:
    """The state, with its first or second moments changed.

    Args:
        order: 1 or 2: which moments.
        change: moments -> the same, changed.
        opt_state: of any optax optimizer.

    Raises:
        ValueError: it holds floats, and none of the states above.
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
            f"the optimizer's state ({names}) has no moments that are known here: they "
            "would not be averaged; take adam, sgd with momentum, or another of optax"
        )
    return changed


def _is_known(state: Any) -> bool:
    return type(state).__name__ in MOMENTS and hasattr(state, "_replace")


def _is_array_of_floats(x: Any) -> bool:
    return jnp.ndim(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _names(state: Any) -> set[str]:
    """The classes of the states in a chain that hold arrays of floats."""
    if type(state) is tuple:
        return set().union(*map(_names, state))
    holds = any(map(_is_array_of_floats, jax.tree.leaves(state)))
    return {type(state).__name__} if holds else set()
