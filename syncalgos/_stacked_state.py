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
    check_mapped,
    find_axis,
    has_reduce,
    mean_center,
)
from syncalgos._host_arrays import copy_host_arrays
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
    axis = _check_stackable(strategy, mesh)

    def init_worker(params: PyTree, _: Any) -> PyTree:
        return strong(strategy.init(params))

    def reduce_worker(inputs: Any, step: Any) -> tuple[PyTree, PyTree]:
        grads, replica, state = inputs
        return apply_reduce(strategy, grads, replica, state, step)

    def sync_worker(inputs: Any, step: Any) -> tuple[Replica, PyTree]:
        replica, state = inputs
        return apply_sync(strategy, replica, state, step)

    def find_center(inputs: Any, _: Any) -> PyTree:
        params, state = inputs
        # As in the engine: workers' centers differ in a phase that is not active.
        return collectives.agreed(strategy.center(params, state), axis)

    map_workers = partial(_map_workers, axis, mesh)
    init_workers = map_workers(init_worker)
    reduce_workers = map_workers(reduce_worker)
    sync_workers = map_workers(sync_worker)
    find_common_center = map_workers(find_center, is_common=True)

    def init(params: PyTree) -> PyTree:
        state_shapes = jax.eval_shape(init_workers, params, 0)
        shardings = _find_shardings(params, state_shapes, mesh, axis)
        jitted = jax.jit(init_workers, out_shardings=shardings)
        return jitted(copy_host_arrays("params", params), 0)

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        if isinstance(state, Reduced):
            raise ValueError("stacked: call reduce only once in a step, before sync")
        if not has_reduce(strategy):
            return grads, state
        grads, state = reduce_workers((grads, with_loss(replica), state), step)
        return grads, Reduced(state)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        if has_reduce(strategy) != isinstance(state, Reduced):
            raise ValueError(
                "stacked: this strategy acts in reduce, too: call reduce(grads, "
                "replica, state, step) before the optimizer's step, and pass its state "
                "to sync"
            )
        state = state.state if isinstance(state, Reduced) else state
        replica, state = sync_workers((with_loss(replica), state), step)
        return replica._replace(loss=()), state

    def with_loss(replica: Replica) -> Replica:
        if strategy.sees_loss and isinstance(replica.loss, tuple):
            raise ValueError(
                "stacked: this strategy needs the loss: pass "
                "replica._replace(loss=losses), with one loss for each worker"
            )
        return seeing(strategy, replica, replica.loss)

    def center(params: PyTree, state: PyTree) -> PyTree:
        return find_common_center((params, state), 0)

    return strategy._replace(init=init, reduce=reduce, sync=sync, center=center)


def _check_stackable(strategy: Strategy, mesh: Mesh | None) -> str:
    """Returns the axis of a strategy that can run on stacked arrays.

    Raises:
        ValueError: the strategy or its mesh does not fit.
    """
    check_strategy("stacked", strategy)
    check_mapped("stacked", strategy)
    axis = find_axis(strategy)
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
    return axis


def _map_workers(
    axis: str,
    mesh: Mesh | None,
    function: Callable[[Any, Any], PyTree],
    is_common: bool = False,
) -> Callable[[Any, Any], PyTree]:
    """Maps one worker's (inputs, step) -> result over stacked arrays.

    A common result is the same for all workers, and returned once.
    """

    def map_on_device(inputs: PyTree, step: Any) -> PyTree:
        result = function(jax.tree.map(lambda x: x[0], inputs), step)
        if is_common:
            return result
        return jax.tree.map(lambda x: x[None], result)

    if mesh is None:
        names: Any = {"axis_name": axis, "spmd_axis_name": axis}
        out_axes = None if is_common else 0
        program = jax.vmap(function, in_axes=(0, None), out_axes=out_axes, **names)
    else:
        stacked_spec = PartitionSpec(axis)
        common_spec = PartitionSpec()
        program = jax.shard_map(
            map_on_device,
            mesh=mesh,
            in_specs=(stacked_spec, common_spec),
            out_specs=common_spec if is_common else stacked_spec,
            axis_names={axis},
            check_vma=False,
        )

    def check_and_map(inputs: PyTree, step: Any) -> PyTree:
        leaves = checks.named_leaves("", inputs)
        workers = 0
        if mesh is not None:
            workers = mesh.shape[axis]
        elif leaves and np.ndim(leaves[0][1]):
            workers = np.shape(leaves[0][1])[0]
        for name, x in leaves:
            if np.shape(x)[:1] != (workers,):
                raise ValueError(
                    f"stacked: there are {workers} workers along {axis!r}, but {name} "
                    f"has shape {np.shape(x)}"
                )
        return program(inputs, step)

    jitted = jax.jit(check_and_map)

    def call(inputs: PyTree, step: Any) -> PyTree:
        if COUNTED.get():
            raise ValueError(
                "communication: a stacked strategy holds all workers: count the "
                "strategy that was given to `stacked`"
            )
        return jitted(copy_host_arrays("", inputs), copy_host_arrays("step", step))

    return call


def _find_shardings(
    params: PyTree, state: PyTree, mesh: Mesh | None, axis: str
) -> PyTree:
    """The shardings of a state: a leaf that belongs to a leaf of params is cut like it.

    Its path in the state ends in the path of the leaf of params. Without these
    shardings XLA would put zeros, such as a momentum, whole on each device.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    leaves.sort(key=lambda leaf: -len(leaf[0]))  # one path may end in another
    default = _find_default_sharding([x for _, x in leaves], mesh, axis)

    def find_sharding(path: tuple[Any, ...], x: Any) -> NamedSharding | None:
        for leaf_path, leaf in leaves:
            path_end = path[max(0, len(path) - len(leaf_path)) :]
            if path_end == leaf_path and x.shape == leaf.shape:
                sharding = getattr(leaf, "sharding", None)
                return sharding if isinstance(sharding, NamedSharding) else default
        return default

    return jax.tree_util.tree_map_with_path(find_sharding, state)


def _find_default_sharding(
    leaves: list[Any], mesh: Mesh | None, axis: str
) -> NamedSharding | None:
    """The sharding over the workers alone, on the first mesh that has their axis."""
    meshes: list[Any] = [mesh]
    for x in leaves:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            meshes.append(sharding.mesh)
    for candidate in meshes:
        if candidate is not None and axis in candidate.axis_names:
            return NamedSharding(candidate, PartitionSpec(axis))
    return None
