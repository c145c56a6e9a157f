"""The idea: a strategy is four pure functions, and combinators make new ones of old.

The functions run inside a mapped function (pmap, shard_map, vmap). Each sees one
worker's view and talks to the others only through collectives over named axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree


class Replica(NamedTuple):
    """What one worker holds.

    Attributes:
        params: the trained parameters, a pytree of float arrays.
        opt_state: the inner optimizer's state.
        buffers: state that is not trained, such as batch statistics.
    """

    params: PyTree
    opt_state: PyTree = ()
    buffers: PyTree = ()


class MeanCenter(NamedTuple):
    """The center of a strategy that has none of its own: the mean of the replicas."""

    axis: Axis = WORKERS

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        return collectives.mean(params, self.axis)


class PartCenter(NamedTuple):
    """The center of a strategy that knows it for some leaves only; else the mean.

    Attributes:
        over: (rest, params, state) -> `rest`, its own leaves replaced by their center.
        axis: the axis of the mean.
    """

    over: Callable[[PyTree, PyTree, PyTree], PyTree]
    axis: Axis = WORKERS

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        return self.over(collectives.mean(params, self.axis), params, state)


def center_of_inner(center: Any) -> Any:
    """A strategy's center, of the state of one around it, which has it as `strategy`.

    What others know of a center by its type stays to be seen.
    """
    if isinstance(center, MeanCenter):
        return center
    if isinstance(center, PartCenter):
        return center._replace(
            over=lambda rest, params, state: center.over(rest, params, state.strategy)
        )
    return lambda params, state: center(params, state.strategy)


def keep_grads(
    grads: PyTree, replica: Any, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    return grads, state


def keep_replica(replica: Any, state: PyTree, step: Any) -> tuple[Any, PyTree]:
    return replica, state


def _no_state(params: PyTree) -> PyTree:
    return ()


_Pair = tuple[Any, Any]


class Strategy(NamedTuple):
    """How the workers' replicas agree.

    `step` counts local steps from 0 and is the same on all workers. Gradients, replicas
    and state keep their structure, shapes and dtypes.

    Attributes:
        init: params -> state; default: none.
        reduce: (grads, replica, state, step) -> (grads, state), before the inner
            optimizer; default: keep.
        sync: (replica, state, step) -> (replica, state), after it; default: keep.
        center: (params, state) -> params, the model to evaluate and ship; default: the
            mean of the replicas.
    """

    init: Callable[[PyTree], PyTree] = _no_state
    reduce: Callable[[PyTree, Replica, PyTree, Any], _Pair] = keep_grads
    sync: Callable[[Replica, PyTree, Any], _Pair] = keep_replica
    center: Callable[[PyTree, PyTree], PyTree] = MeanCenter()


def check_strategy(where: str, strategy: Any) -> None:
    """Raises a ValueError unless it is given a Strategy."""
    if not isinstance(strategy, Strategy):
        called = callable(strategy) and getattr(strategy, "__name__", None)
        hint = f" (call it: {called}())" if called else ""
        got = checks.shown(strategy)
        raise ValueError(f"{where}: expected a Strategy, got {got}{hint}")


def check_params(params: PyTree) -> None:
    """Raises a ValueError that names a leaf which is no float array."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params hold no arrays")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, np.floating):
            kind = type(leaf).__name__ if dtype is None else f"of dtype {dtype}"
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {kind}, not a float array: "
                + _way_out(params, leaf)
            )


# Modules that are pytrees: the library, and what takes their trained arrays out.
_SPLITS = {
    "equinox": "eqx.partition(model, eqx.is_inexact_array)",
    "flax": "nnx.split(model, nnx.Param, ...)",
}


def _way_out(params: PyTree, leaf: Any) -> str:
    """Returns the way out for a leaf of params that is no float array."""
    modules = [kind.__module__.partition(".")[0] for kind in type(params).__mro__]
    if split := next((_SPLITS[name] for name in modules if name in _SPLITS), None):
        return f"a module is taken apart by {split}"
    if isinstance(leaf, float):
        return f"say jnp.asarray({leaf})"
    return "what is not trained belongs in buffers"


def apply_reduce(
    strategy: Strategy, grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """Calls strategy.reduce; raises a ValueError that names a leaf it reshapes."""
    pair = strategy.reduce(grads, replica, state, step)
    if type(pair) is not tuple or len(pair) != 2:
        got = type(pair).__name__
        raise ValueError(f"reduce must return (grads, state), got {got}")
    grads = require_same("reduce", "grads", grads, pair[0])
    return grads, require_same("reduce", "state", state, pair[1])


def apply_sync(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> tuple[Any, PyTree]:
    """Calls strategy.sync; raises a ValueError that names a leaf it reshapes."""
    pair = strategy.sync(replica, state, step)
    if (
        type(pair) is not tuple
        or len(pair) != 2
        or not isinstance(pair[0], type(replica))
    ):
        kinds = [type(x).__name__ for x in pair] if type(pair) is tuple else []
        got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
        raise ValueError(f"sync must return (replica, state), got {got}")
    replica = require_same("sync", "replica", replica, pair[0])
    return replica, require_same("sync", "state", state, pair[1])


def changes_params(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> list[bool]:
    """Which leaves of params a sync hands on changed, found by tracing it apart.

    A leaf counts as kept if it comes out as the very array that went in.
    """
    changed: list[bool] = []

    def look(replica, state, step):
        new, _ = strategy.sync(replica, state, step)
        pairs = zip(*map(jax.tree.leaves, (new.params, replica.params)), strict=True)
        changed.extend(after is not before for after, before in pairs)

    jax.eval_shape(look, replica, state, step)
    return changed


def require_same(changer: str, what: str, before: PyTree, after: PyTree) -> PyTree:
    """Returns `after`, strong; its structure, shapes and dtypes must be those before.

    Raises:
        ValueError: naming the first leaf that differs.
    """
    if (new := jax.tree.structure(after)) != (old := jax.tree.structure(before)):
        raise ValueError(f"{changer} changes the structure of {what}: {old} to {new}")

    def leaf(path, x, y):
        was, now = jax.typeof(x), jax.typeof(y)
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"{changer} changes {what}{jax.tree_util.keystr(path)} from "
                f"{was.str_short()} to {now.str_short()}; shapes and dtypes must stay"
            )
        return y

    return strong(jax.tree_util.tree_map_with_path(leaf, before, after))


def strong(tree: PyTree) -> PyTree:
    """Returns the tree without weak types.

    State that came back weaker than it went in would compile the next dispatch anew.
    """

    def leaf(x):
        kind = jax.typeof(x)
        return jnp.asarray(x, kind.dtype) if kind.weak_type else x

    return jax.tree.map(leaf, tree)
