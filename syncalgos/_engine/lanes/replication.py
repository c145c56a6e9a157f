"""The leaves of a state that are identical in all lanes of a device, held once.

Examples are anchors, velocities, and everything computed from means alone. A device
needs one copy of each, even with 64 lanes.
"""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.custom_batching import custom_vmap

from syncalgos._combinators import introspection
from syncalgos._combinators.primitives import reduce_with
from syncalgos._engine.placement.layout import DEVICES, LANES, Layout
from syncalgos._engine.program import Inputs, Model, Outputs, Program, WorkerState
from syncalgos._engine.sharded_tables import hide_tables
from syncalgos._engine.state import drop_worker_axes
from syncalgos._engine.worker import LossResults, Worker, make_first_state
from syncalgos._jaxprs import axes, equations, inner
from syncalgos._keys import holds_keys, is_key
from syncalgos.strategy import (
    WORKERS,
    PyTree,
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    seeing,
)


def find_differing(x: Any, y: Any) -> Any:
    """Marks entries that differ; NaN is identical to NaN."""
    return (x != y) & ((x == x) | (y == y))


def mark_equal_leaves(worker: Worker, leaves: list[Any], inputs: Inputs) -> Outputs:
    """Marks the leaves that are identical in all lanes on every device."""
    differs = [jnp.any(find_differing(x, lax.all_gather(x, LANES)[0])) for x in leaves]
    return Outputs((), lax.pmax(jnp.stack(differs).astype(int), WORKERS) == 0)


COMPARE = Program(mark_equal_leaves)


class Replication:
    """Knows which leaves are replicated in the states of a trainer.

    For states that the trainer made itself, tracing is enough. Others are compared.
    """

    def __init__(self, worker: Worker, layout: Layout):
        self.worker: Worker = worker
        self._layout = layout
        self._flags_by_form: dict[Any, tuple[bool, ...]] = {}
        self._known_leaves: list[weakref.ref] = []

    def flags(self, worker_state: WorkerState) -> tuple[bool, ...]:
        """Marks the leaves that are replicated in states that the trainer makes."""
        leaves, structure = jax.tree.flatten(worker_state)
        key = structure, *((x.shape, x.dtype) for x in leaves)
        if key not in self._flags_by_form:
            replica = drop_worker_axes(worker_state).replica
            model = Model(replica.params, replica.buffers, jax.random.key(0))
            leaf_flags, _ = replicated_leaves(self.worker, self._layout, model)
            self._flags_by_form[key] = tuple(leaf_flags)
        return self._flags_by_form[key]

    def note(self, worker_state: WorkerState) -> None:
        """Notes a state that the trainer has just made."""
        self._known_leaves = [weakref.ref(x) for x in jax.tree.leaves(worker_state)]

    def is_known(self, worker_state: WorkerState) -> bool:
        """Whether this state is the one noted last."""
        known_leaves = [ref() for ref in self._known_leaves]
        leaves = jax.tree.leaves(worker_state)
        if len(known_leaves) != len(leaves):
            return False
        return all(x is y for x, y in zip(known_leaves, leaves, strict=True))

    def note_if_replicated(
        self, worker_state: WorkerState, host_state: WorkerState
    ) -> None:
        """Notes a state from the host if its leaves are replicated as in `flags`.

        Args:
            worker_state: the state of all workers, on their devices.
            host_state: the same state on the host, leaves (workers, ...).
        """

        def is_replicated(x: Any) -> bool:
            x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
            x = x.reshape(*self._layout.own_shape, *x.shape[1:])  # (places, lanes, …)
            return not find_differing(x, x[:, :1]).any()

        leaves = jax.tree.leaves(host_state)
        for leaf, is_expected in zip(leaves, self.flags(worker_state), strict=True):
            if is_expected and not is_replicated(leaf):
                return
        self.note(worker_state)


def with_own_keys(worker: Worker, layout: Layout, model: Model) -> Worker:
    """Returns the worker, which draws from its own keys unless all steps are equal.

    Args:
        worker: the worker; its optimizer may have random keys in its state.
        layout: the place of each worker.
        model: the model from which all workers start, arrays or shapes.

    Raises:
        ValueError: the optimizer derives the step of a leaf that is equal on all
            workers from leaves that are not; or it draws, and only some leaves or some
            phases have equal steps.
    """
    strategy = worker.strategy
    optimizer = worker.optimizer
    has_tables = worker.sharded is not None
    draws_keys = holds_keys(jax.eval_shape(optimizer.init, model.params))
    members = introspection.combination(strategy).members
    may_reduce_some = bool(introspection.reduces(strategy) and members)
    if layout.workers == 1 or not (draws_keys or may_reduce_some or has_tables):
        return worker
    first_place = layout.devices[: layout.devices_each]
    one_place = layout._replace(devices=first_place, lanes=layout.workers)

    def mark_equal_steps(strategy: Strategy, update: Any) -> list[bool]:
        transformation = optax.GradientTransformationExtraArgs(optimizer.init, update)
        traced_worker = worker._replace(make=lambda numbers: (transformation, strategy))
        traced_worker = traced_worker.with_hyperparams(None)
        _, step_flags = replicated_leaves(traced_worker, one_place, model)
        return step_flags

    # Without the optimizer, the strategy alone decides which leaves have equal steps.
    leaf_strategy = strategy
    if has_tables:
        leaf_strategy = hide_tables(reduce_with("mean"), worker.sharded, optimizer)
    is_equal = mark_equal_steps(leaf_strategy, _pass_gradients)
    if any(is_equal) and not all(is_equal):
        update = optax.with_extra_args_support(optimizer).update
        stays_equal = mark_equal_steps(leaf_strategy, update)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model.params)]
        for path, was_equal, equal_after in zip(
            paths, is_equal, stays_equal, strict=True
        ):
            if was_equal and not equal_after:
                raise ValueError(
                    f"optimizer: the step of params{jax.tree_util.keystr(path)}, which "
                    "is the same on all workers, depends on leaves that are not, such "
                    "as rows of tables, as in clip_by_global_norm: use an optimizer "
                    "that treats each leaf alone (optax.clip), or replicate all leaves"
                )
    if not draws_keys:
        return worker
    if has_tables:
        is_equal = mark_equal_steps(strategy, _pass_gradients)
    is_mixed = any(is_equal) and not all(is_equal)
    if is_mixed or _has_phases(worker, one_place, model):
        raise ValueError(
            "optimizer: its state holds a random key, which must be the same on all "
            "workers for equal steps, and another on each for its own, but this "
            "strategy has both: use one optimizer without noise, or one strategy alone"
        )
    return worker._replace(has_own_keys=not all(is_equal))


def _pass_gradients(
    grads: PyTree, opt_state: PyTree, params: PyTree | None = None, **extra: Any
) -> tuple[PyTree, PyTree]:
    """An optimizer's update that treats each leaf alone."""
    return grads, opt_state


def _has_phases(worker: Worker, layout: Layout, model: Model) -> bool:
    """Whether gradients are reduced at some steps, and kept at others."""

    def reduce(model: Model, step: jax.Array) -> tuple[PyTree, PyTree]:
        worker_state = make_first_state(worker, step, Inputs(model))
        replica = seeing(worker.strategy, worker_state.replica)
        return apply_reduce(
            worker.strategy, replica.params, replica, worker_state.sync, step
        )

    def sends(arm: Any) -> bool:
        return any(axes(equation) for equation, _ in equations(arm))

    jaxpr = layout.trace(reduce, model, jnp.int32(0))[0].jaxpr
    for equation, _ in equations(jaxpr):
        if equation.primitive.name == "cond":
            arm_sends = [sends(arm) for arm in inner(equation)]
            if any(arm_sends) and not all(arm_sends):
                return True
    return False


def replicated_leaves(
    worker: Worker, layout: Layout, model: Model
) -> tuple[list[bool], list[bool]]:
    """Marks the leaves that are identical in all lanes of a device, at any time.

    vmap finds these leaves, so algorithms need not declare them. A leaf is one of them
    if both `init` and a local step that starts from unmapped leaves leave it unmapped.
    Buffers always count as different for each worker.

    Args:
        worker: the worker whose programs are traced.
        layout: the place of each worker.
        model: the model from which all workers start, arrays or shapes.

    Returns:
        A boolean for each leaf of a worker's data, and for each leaf of params whether
        it is identical right after the optimizer's step, before a sync.
    """
    model = model._replace(hyperparams=worker.hyperparams)

    def start(index: jax.Array, model: Model) -> WorkerState:
        started_worker = worker.with_hyperparams(model.hyperparams)
        return make_first_state(started_worker, index, Inputs(model))

    def local_step(
        index: jax.Array, step: jax.Array, leaves: list[jax.Array], hyperparams: PyTree
    ) -> tuple[Replica, PyTree, PyTree]:
        replica, sync = structure.unflatten(leaves)
        # What holds for the worker's own numbers, such as 0, may not hold for others.
        stepping_worker = worker.with_hyperparams(hyperparams)
        strategy = stepping_worker.strategy
        grads = jax.tree.map(lambda x: x + index.astype(x.dtype), replica.params)
        replica = seeing(strategy, replica, index)
        grads, sync = apply_reduce(strategy, grads, replica, sync, step)
        loss = stepping_worker.optimizer_loss(replica, index.astype(float))
        results = LossResults(grads, replica.buffers, {})
        replica = stepping_worker.take_inner_step(replica, results, loss)
        synced_replica, sync = apply_sync(strategy, replica, sync, step)
        return synced_replica._replace(loss=()), sync, replica.params

    step = jax.ShapeDtypeStruct((), jnp.int32)
    indices = _add_lanes(layout, step)
    first_state, is_replicated = _trace_lanes(
        start, layout, (indices, model), (0, None)
    )
    shapes, structure = jax.tree.flatten(first_state)
    replica = first_state.replica
    first_buffer = len(jax.tree.leaves(replica._replace(buffers=())))
    num_buffers = len(jax.tree.leaves(replica.buffers))
    for number in range(first_buffer, first_buffer + num_buffers):
        is_replicated[number] = False
    while True:  # each pass except the last removes a leaf
        lane_shapes = []
        lane_axes = []
        for shape, is_held_once in zip(shapes, is_replicated, strict=True):
            lane_shapes.append(shape if is_held_once else _add_lanes(layout, shape))
            lane_axes.append(None if is_held_once else 0)
        _, stays_replicated = _trace_lanes(
            local_step,
            layout,
            (indices, step, lane_shapes, model.hyperparams),
            (0, None, lane_axes, None),
        )
        step_flags = stays_replicated[len(is_replicated) :]
        pairs = zip(stays_replicated, is_replicated, strict=False)
        next_flags = [new_flag and old_flag for new_flag, old_flag in pairs]
        if next_flags == is_replicated:
            return is_replicated, step_flags
        is_replicated = next_flags


def _add_lanes(layout: Layout, x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a worker's leaf in all lanes of a device."""
    return jax.ShapeDtypeStruct((layout.lanes, *x.shape), x.dtype)


def _trace_lanes(
    program: Callable, layout: Layout, arguments: PyTree, axes: PyTree
) -> tuple[PyTree, list[bool]]:
    """Returns the shapes of a lane program's result, and which leaves are unmapped."""
    trace: dict[str, Any] = {}

    @custom_vmap
    def look(leaves: list[jax.Array]) -> list[jax.Array]:
        return leaves

    @look.def_vmap
    def _(lanes: int, varies: Any, leaves: list[jax.Array]) -> tuple[Any, Any]:
        trace["varies"] = varies[0]
        return leaves, varies[0]

    def on_lane(*arguments: Any) -> list[jax.Array]:
        # Only the leaves: two trees of a user's class may not be comparable.
        leaves, structure = jax.tree.flatten(program(*arguments))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        trace["shapes"] = structure.unflatten(shapes)
        trace["varies"] = [False] * len(leaves)
        return look(leaves)

    lanes = jax.vmap(on_lane, axes, axis_name=LANES, axis_size=layout.lanes)
    # Only make_jaxpr gets the devices' axis: vmap cannot sum over groups of devices.
    jax.make_jaxpr(lanes, axis_env=[(DEVICES, layout.shape[0])])(*arguments)
    return trace["shapes"], [not varies for varies in trace["varies"]]
