"""Finds a reducer by its name, its factory, or the reducer itself."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from syncalgos import _jaxprs, checks, collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import Setting, trace_over
from syncalgos.collectives._shares import (
    leaving_out_reducers,
    noted_share,
    weighing_in_reducers,
)
from syncalgos.reducers import _dense, _robust
from syncalgos.reducers._reducer import Reducer, Transformation
from syncalgos.strategy import require_same

REDUCERS: dict[str, Callable[..., Transformation]] = {
    "mean": _dense.mean,
    "bf16": _dense.bf16,
    "fp16": _dense.fp16,
    **{f"int{bits}": functools.partial(_dense.quantized, bits) for bits in (8, 4, 2)},
    "median": _robust.median,
    "trimmed": _robust.trimmed,
    "clipped": _robust.clipped,
}

IN_TRANSFORMATION: Setting[bool] = Setting("in_transformation", False)
"""Whether a reducer is called by a transformation, which hides what it declares."""

AnyReducer = Transformation | Callable[..., Transformation] | str
"""A reducer; or its factory, called with `axis` (and `seed`, if it has one); or one of
the names mean, bf16, fp16, int8, int4, int2, median, trimmed, clipped."""


def resolve(
    where: str, reducer: AnyReducer, axis: Axis, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Returns the given reducer, or makes it from its factory or name, over an axis.

    A Reducer that was made with an axis keeps its own, as does any other optax
    transformation, whose reducers cannot be seen from outside.

    Args:
        where: the caller, for error messages.
        reducer: a reducer, its factory or its name (see `AnyReducer`).
        axis: the mapped axis or axes over which the workers lie.
        seed: seeds a random reducer that is given by its factory or name.

    Raises:
        ValueError: an unknown name, a factory that needs more arguments, or another
            object.
    """
    checks.seed(seed)
    resolved = reducer
    if isinstance(reducer, str):
        resolved = reducer = REDUCERS[checks.one_of("reducer", reducer, REDUCERS)]
    if not isinstance(reducer, Transformation) and callable(reducer):
        parameters = inspect.signature(reducer).parameters
        missing = [name for name, p in parameters.items() if p.default is p.empty]
        if missing and "axis" in parameters:
            name = getattr(reducer, "__name__", "it")
            raise ValueError(f"{where}: call {name}(…) with {', '.join(missing)}")
        if "axis" in parameters and "seed" in parameters:
            resolved = reducer(axis=axis, seed=seed)
        elif "axis" in parameters:
            resolved = reducer(axis=axis)
    if isinstance(resolved, Reducer):
        return resolved.over(axis)
    if isinstance(resolved, Transformation):
        return _check_updates(where, optax.with_extra_args_support(resolved), axis)
    raise ValueError(
        f"{where}: expected an optax GradientTransformation or a factory with a "
        f"keyword axis, got {reducer!r} (wrap a plain function in optax.stateless)"
    )


def _weigh_in_reducers(
    update: Callable[..., tuple[PyTree, PyTree]],
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    axis: Axis,
) -> tuple[PyTree, PyTree]:
    """Calls an update whose reducers, not what is in front, see the worker's share.

    In front of a reducer there may be a clip, or another function of a worker's own
    gradients that does not scale with them. Where no reducer is inside, the updates
    stay as `participating` has weighted them.

    Raises:
        ValueError: it has reducers, and also sends a worker's own updates without one.
    """
    own_updates = collectives.unweighted(updates)
    reducer_inputs: list[PyTree] = []
    with leaving_out_reducers(reducer_inputs):
        jaxpr, names = trace_over(
            lambda updates: update(updates, state, params), own_updates, axis
        )
    if not reducer_inputs:
        return update(updates, state, params)
    if _jaxprs.sends_inputs(jaxpr, names):
        raise ValueError(
            "participating: a part of this transformation sends gradients or moves "
            "without a reducer, beside or in front of one that sends by it, and only "
            "what a reducer gets can be weighted: let reducers send, as reducers.mean()"
        )
    with weighing_in_reducers(True):
        result, new_state = update(own_updates, state, params)
    if jax.tree.structure(result) != jax.tree.structure(updates):
        return result, new_state  # which `_check_updates` refuses

    def keep_unchanged(result: Any, own_update: Any, update: Any) -> Any:
        return update if result is own_update else result

    # What passes as it is, as beside a mask, is the caller's, which knows it so.
    return jax.tree.map(keep_unchanged, result, own_updates, updates), new_state


def _check_updates(
    where: str, transformation: optax.GradientTransformationExtraArgs, axis: Axis
) -> optax.GradientTransformationExtraArgs:
    """Checks that a transformation returns updates of the form that it gets."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        call = functools.partial(transformation.update, **extra)
        with IN_TRANSFORMATION.set_to(True):
            if noted_share() is None:
                combined, state = call(updates, state, params)
            else:
                combined, state = _weigh_in_reducers(call, updates, state, params, axis)
        changer = f"{where}: the transformation"
        return require_same(changer, "updates", updates, combined), state

    return optax.GradientTransformationExtraArgs(transformation.init, update)
