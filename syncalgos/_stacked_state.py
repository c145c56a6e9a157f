"""Strategies for loops that stack their replicas along an axis of a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from syncalgos import checks, collectives
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import rules
from syncalgos._combinators.introspection import (
    axis_of,
    check_mapped,
    has_reduce,
    mean_center,
)
from syncalgos._host_arrays import taken
from syncalgos.collectives import PyTree
from syncalgos.collectives._axes import COUNTED
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_strategy,
    seeing,
    strong,
)


class Reduced(NamedTuple):
    """The state of a strategy between its reduce and its sync."""

    state: PyTree


@suggest_arguments
def stacked(strategy: Strategy, mesh: Mesh | None = None) -> Strategy:
    """Makes a strategy for a loop that stacks its replicas: (workers, …) in each leaf.

    Some frameworks train several replicas in one program. Their params, optimizer state
    and batches have a first axis of workers, which is an axis of their mesh. The
    framework keeps its own mapped step, and calls the functions of the returned
    strategy on the stacked arrays, before and after the optimizer's step:

        grads, state = strategy.reduce(grads, replica, state, step)
        …                                         the optimizer's step
        replica, state = strategy.sync(replica, state, step)

    Args:
        strategy: any strategy with a single axis name, such as diloco(axis="diloco").
            With a mesh, this must be the mesh axis of the workers; each position along
            it holds one worker.
        mesh: the mesh of the arrays. Each worker then sends to its peers as under
            `DataParallel`: jax.shard_map maps this axis alone, and XLA still shards
            each replica over the other axes. None: jax.vmap maps the workers, on one
            device or over sharded arrays, where XLA turns a message to a single peer
            into an all-gather.

    Returns:
        A Strategy of stacked arrays. Its init copies the params that it keeps, with
        their sharding. Call init on arrays, outside jax.jit; params and state may then
        both be donated. Its center is one plain model; if only some workers take part
        in a round, ask for the center at the round's end. Each worker keeps its own
        buffers.

    Raises:
        ValueError: the argument is not a Strategy or has several axes; the arrays hold
            a different number of workers from the mesh; sync is called without reduce
            although the strategy changes gradients; or a strategy `sees_loss` and the
            replica holds no losses, (workers,).

    Example:
        >>> import jax
        >>> from syncalgos import Replica, model_averaging, stacked
        >>> strategy = stacked(model_averaging(period=2, axis="replica"))
        >>> replica = Replica(jax.numpy.array([1.0, 3.0]))  # of two workers
        >>> state = strategy.init(replica.params)
        >>> for step in range(2):
        ...     replica, state = strategy.sync(replica, state, step)
        ...     replica.params
        Array([1., 3.], dtype=float32)
        Array([2., 2.], dtype=float32)
    """
    check_strategy("stacked", strategy)
    check_mapped("stacked", strategy)
    axis = axis_of(strategy)
    if not isinstance(axis, str):
        raise ValueError(
            f"stacked: strategy must have a single axis, such as "
            f'axis="diloco", got {axis}'
        )
    if rules.KINDS["stale"](strategy) and mean_center(strategy):
        raise ValueError(
            "stacked: the center of participating(…, stale=True) would count workers "
            "that skip: use stale=False, or a strategy with its own center"
        )
    if mesh is not None:
        checks.one_of("mesh axis of the strategy in stacked,", axis, mesh.axis_names)
        if {*mesh.axis_types} != {AxisType.Auto}:
            raise ValueError(
                "stacked: mesh must have axes of type Auto: jax.make_mesh(…, "
                "axis_types=(jax.sharding.AxisType.Auto,) * n)"
            )

    def common(own, _):
        # As in the engine: workers' centers differ in a phase that is not active.
        return collectives.agreed(strategy.center(*own), axis)

    mapped = partial(_mapped, axis, mesh)
    each_made = mapped(lambda own, _: strong(strategy.init(own)))
    each_reduced = mapped(lambda own, step: apply_reduce(strategy, *own, step=step))
    each_synced = mapped(lambda own, step: apply_sync(strategy, *own, step=step))
    of_all = mapped(common, is_common=True)

    def init(params: PyTree) -> PyTree:
        shapes = jax.eval_shape(each_made, params, 0)
        lying = _lying_as(params, shapes, mesh, axis)
        return jax.jit(each_made, out_shardings=lying)(taken("params", params), 0)

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        if isinstance(state, Reduced):
            raise ValueError("stacked: call reduce only once in a step, before sync")
        if not has_reduce(strategy):
            return grads, state
        grads, state = each_reduced((grads, seen(replica), state), step)
        return grads, Reduced(state)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        if has_reduce(strategy) != isinstance(state, Reduced):
            raise ValueError(
                "stacked: this strategy acts in reduce, too: call reduce(grads, "
                "replica, state, step) before the optimizer's step, and pass its state "
                "to sync"
            )
        state = state.state if isinstance(state, Reduced) else state
        replica, state = each_synced((seen(replica), state), step)
        return replica._replace(loss=()), state

    def seen(replica: Replica) -> Replica:
        if strategy.sees_loss and isinstance(replica.loss, tuple):
            raise ValueError(
                "stacked: this strategy needs the loss: pass "
                "replica._replace(loss=losses), with one loss for each worker"
            )
        return seeing(strategy, replica, replica.loss)

    def center(params: PyTree, state: PyTree) -> PyTree:
        return of_all((params, state), 0)

    return strategy._replace(init=init, reduce=reduce, sync=sync, center=center)


def _mapped(
    axis: str,
    mesh: Mesh | None,
    one: Callable[[Any, Any], PyTree],
    is_common: bool = False,
) -> Callable[[Any, Any], PyTree]:
    """Maps one worker's (own, step) -> result over stacked arrays.

    A common result is the same for all workers, and returned once.
    """

    def on_device(own, step):
        mine = one(jax.tree.map(lambda x: x[0], own), step)
        return mine if is_common else jax.tree.map(lambda x: x[None], mine)

    if mesh is None:
        along: Any = {"axis_name": axis, "spmd_axis_name": axis}
        axes = None if is_common else 0
        program = jax.vmap(one, in_axes=(0, None), out_axes=axes, **along)
    else:
        rows, same = PartitionSpec(axis), PartitionSpec()
        program = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(rows, same),
            out_specs=same if is_common else rows,
            axis_names={axis},
            check_vma=False,
        )

    def checked(own, step):
        leaves = checks.named_leaves("", own)
        first = [*np.shape(leaves[0][1]), 0][0] if leaves else 0
        workers = first if mesh is None else mesh.shape[axis]
        for name, x in leaves:
            if np.shape(x)[:1] != (workers,):
                raise ValueError(
                    f"stacked: there are {workers} workers along {axis!r}, but {name} "
                    f"has shape {np.shape(x)}"
                )
        return program(own, step)

    jitted = jax.jit(checked)

    def call(own, step):
        if COUNTED.get():
            raise ValueError(
                "communication: a stacked strategy holds all workers: count the "
                "strategy that was given to `stacked`"
            )
        return jitted(taken("", own), taken("step", step))

    return call


def _lying_as(params: PyTree, state: PyTree, mesh: Mesh | None, axis: str) -> PyTree:
    """The shardings of a state: a leaf that belongs to a leaf of params is cut like it.

    Its path in the state ends in the path of the leaf of params. Without these
    shardings XLA would put zeros, such as a momentum, whole on each device.
    """
    like = jax.tree_util.tree_leaves_with_path(params)
    like.sort(key=lambda leaf: -len(leaf[0]))  # one path may end in another
    given = [getattr(y, "sharding", None) for _, y in like]
    meshes = [mesh, *(x.mesh for x in given if isinstance(x, NamedSharding))]
    known = (x for x in meshes if x is not None and axis in x.axis_names)
    rest = next((NamedSharding(x, PartitionSpec(axis)) for x in known), None)

    def sharding(path, x):
        for end, y in like:
            if path[max(0, len(path) - len(end)) :] == end and x.shape == y.shape:
                own = getattr(y, "sharding", None)
                return own if isinstance(own, NamedSharding) else rest
        return rest

    return jax.tree_util.tree_map_with_path(sharding, state)
