"""Classes of optax's states by name, as optax does not export all of them.

A test looks for each name, and each field, in the installed optax.
"""

from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp

_LINE_SEARCH = (
    "a line search needs the loss at other params, which a local step does not "
    "compute, and a sync changes params after the search"
)
REFUSED = {
    "LookaheadState": "optax.lookahead trains a pair of models: use its fast optimizer "
    "with the strategy syncalgos.lookahead()",
    "ScheduleFreeState": "schedule_free evaluates another model than it trains, but a "
    "center is the trained one: use its base optimizer, or see docs/own-loop.md",
    "HutchinsonState": "an estimate of the Hessian needs the loss at other params, "
    "which a local step does not compute",
    "SAMState": "sam moves params to perturbed points, which a sync would average; see "
    "docs/own-loop.md",
    "ScaleByZoomLinesearchState": _LINE_SEARCH,
    "ScaleByBacktrackingLinesearchState": _LINE_SEARCH,
}
"""Why some optimizers cannot be inner optimizers, by a state within theirs."""

GIVEN_LOSS = {"HutchinsonState"}
"""States of these to whose optimizers an optax loop can give the loss."""

FOLLOWS_LOSS = {"ReduceLROnPlateauState"}
"""States of optimizers whose rates follow the loss."""

CLOCKS = {
    "MultiStepsState": "MultiSteps",
    "ApplyEvery": "apply_every",
    "ApplyIfFiniteState": "apply_if_finite",
    "ConditionallyTransformState": "conditionally_transform",
    "ConditionallyMaskState": "conditionally_mask",
}
"""Optimizers whose updates are not local steps, by their states.

The last three leave out steps by the data, which matters for a schedule only.
"""

# Schedules of learning rates and weight decay, a plateau's memory, noise's count,
# gradients in `apply_every`; and what optimizers that find their own rate have measured
# since the start, with which their moments and counts belong together.
_CONTINUING_NAMES = (
    "AddNoiseState ApplyEvery COCOBState DAdaptAdamWState DoGState DoWGState "
    "MadgradState MomoAdamState MomoState ProdigyState ReduceLROnPlateauState "
    "ScaleByDistanceOverGradientsState ScaleByRpropState ScaleByScheduleState "
    "WeightDecaySchedule"
)
KEPT = frozenset(_CONTINUING_NAMES.split())
"""States that continue when the optimizer restarts."""

_WRAPPER_NAMES = (
    "ApplyIfFinite ConditionallyMask ConditionallyTransform InjectHyperparams"
)
AROUND = {
    **{f"{x}State": "inner_state" for x in _WRAPPER_NAMES.split()},
    "InjectStatefulHyperparamsState": "inner_state",
    "MechanicState": "base_optimizer_state",
    "MultiStepsState": "inner_opt_state",
}
"""States that continue, but for the field with an optimizer's state."""

COUNTED = {"ScaleByAdemamixState": "count_m2"}
"""States that restart, but for the field with a count of schedules."""

IN_SUBSPACES = {"GaLoreState"}
"""States in subspaces that each worker finds from its own gradients."""

_MU_AND_NU = "Adam Belief Novograd RStdDev RStdDevWithCount"
# First and second moments, by their fields. A field's name alone is not enough: SM3's
# mu is what others call nu, and params may have a mu.
MOMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "TraceState": (("trace",), ()),
    "EmaState": (("ema",), ()),
    "MuonState": (("mu",), ()),
    "ScaleByLionState": (("mu",), ()),
    **{f"ScaleBy{x}State": (("mu",), ("nu",)) for x in _MU_AND_NU.split()},
    "ScaleByAmsgradState": (("mu",), ("nu", "nu_max")),
    "ScaleByAdanState": (("m", "v"), ("n",)),
    "ScaleByAdemamixState": (("m1", "m2"), ("nu",)),
    "ScaleBySimplifiedAdEMAMixState": (("m",), ("n",)),
    "MomoState": (("exp_avg",), ()),
    "MomoAdamState": (("exp_avg",), ("exp_avg_sq",)),
    "ProdigyState": (("exp_avg",), ("exp_avg_sq",)),
    "DAdaptAdamWState": (("exp_avg",), ("exp_avg_sq",)),
    "ScaleBySM3State": (("nu",), ("mu",)),
    "ScaleByRmsState": ((), ("nu",)),
    "ScaleByRmsWithCountState": ((), ("nu",)),
    "ScaleByRssState": ((), ("sum_of_squares",)),
    "ScaleByAdaDeltaState": ((), ("e_g", "e_x")),
    "FactoredState": ((), ("v_row", "v_col", "v")),
}


def find_state_names(opt_state: Any, names: Container[str]) -> list[str]:
    """Returns those of these class names that occur in an optimizer's state."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: type(x).__name__ in names)
    node_names = [type(x).__name__ for x in nodes]
    return [name for name in node_names if name in names]


def map_moments(order: int, change: Callable[[Any], Any], opt_state: Any) -> Any:
    """Changes the first or the second moments of an optimizer.

    Args:
        order: 1 or 2, for the first or the second moments.
        change: moments, shaped like params -> new ones of the same shapes.
        opt_state: the state of any optax optimizer.

    Returns:
        opt_state with these moments changed; unchanged if it holds no arrays of floats.

    Raises:
        ValueError: opt_state holds arrays of floats, but no state from MOMENTS; or,
            beside one, arrays of which it is not known what they are.
    """
    check_mean(opt_state)
    states_with_moments = []

    def change_node(state: Any) -> Any:
        if not _is_known(state):
            return state
        states_with_moments.append(state)
        fields = MOMENTS[type(state).__name__][order - 1]
        return state._replace(**{f: change(getattr(state, f)) for f in fields})

    new_opt_state = jax.tree.map(change_node, opt_state, is_leaf=_is_known)
    unknown_state = opt_state
    if states_with_moments:
        unknown_state = _drop_known(opt_state)
    unknown_names = sorted(_name_states(unknown_state))
    if unknown_names:
        raise ValueError(
            f"the optimizer's state ({', '.join(unknown_names)}) has no moments that "
            "can be averaged: use adam, sgd with momentum, or another optimizer of "
            "optax"
        )
    return new_opt_state


def check_mean(opt_state: Any) -> None:
    """Raises a ValueError if a mean over the workers of the state has no meaning."""
    for name in find_state_names(opt_state, IN_SUBSPACES):
        raise ValueError(
            f"the optimizer's state ({name}) has no mean over the workers: each finds "
            "a subspace of its own; reset it, or use an algorithm that leaves it alone"
        )


def _drop_known(state: Any) -> Any:
    """Returns a state without what is known to be moments, or to be none."""

    def is_known(x: Any) -> bool:
        return type(x).__name__ in {*MOMENTS, *KEPT, *AROUND}

    def drop_node(x: Any) -> Any:
        inner_field = AROUND.get(type(x).__name__)
        if inner_field:
            return _drop_known(getattr(x, inner_field))
        return () if is_known(x) else x

    return jax.tree.map(drop_node, state, is_leaf=is_known)


def _is_known(state: Any) -> bool:
    """Whether a node of opt_state is one of optax's states with moments."""
    return type(state).__name__ in MOMENTS and hasattr(state, "_replace")


def _is_array_of_floats(x: Any) -> bool:
    """Whether a leaf is an array of floats, unlike counts and hyperparameters."""
    return jnp.ndim(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _name_states(state: Any) -> set[str]:
    """The names of the classes of states in a chain that hold arrays of floats."""
    if type(state) is tuple:
        return set().union(*map(_name_states, state))
    has_floats = any(map(_is_array_of_floats, jax.tree.leaves(state)))
    return {type(state).__name__} if has_floats else set()
