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
from syncalgos._engine.program import Inputs, Model, Outputs, Own, Program
from syncalgos._engine.sharded_tables import beside
from syncalgos._engine.state import of_one
from syncalgos._engine.worker import Found, Worker, first_own
from syncalgos._jaxprs import axes, equations, inner
from syncalgos._keys import holds_keys, is_key
from syncalgos.strategy import WORKERS, PyTree, apply_reduce, apply_sync, seeing


def differ(x: Any, y: Any) -> Any:
    """Marks entries that differ; NaN is identical to NaN."""
    return (x != y) & ((x == x) | (y == y))


def compare(worker: Worker, leaves: list[Any], inputs: Inputs) -> Outputs:
    """Marks the leaves that are identical in all lanes on every device."""
    apart = [jnp.any(differ(x, lax.all_gather(x, LANES)[0])) for x in leaves]
    return Outputs((), lax.pmax(jnp.stack(apart).astype(int), WORKERS) == 0)


COMPARE = Program(compare)


class Replication:
    """Knows which leaves are replicated in the states of a trainer.

    For states that the trainer made itself, tracing is enough. Others are compared.
    """

    def __init__(self, worker: Worker, layout: Layout):
        self.worker: Worker = worker
        self._layout = layout
        self._leaves: dict[Any, tuple[bool, ...]] = {}
        self._made: list[weakref.ref] = []

    def flags(self, own: Own) -> tuple[bool, ...]:
        """Marks the leaves that are replicated in states that the trainer makes."""
        leaves, structure = jax.tree.flatten(own)
        key = structure, *((x.shape, x.dtype) for x in leaves)
        if key not in self._leaves:
            replica = of_one(own).replica
            model = Model(replica.params, replica.buffers, jax.random.key(0))
            found, _ = replicated_leaves(self.worker, self._layout, model)
            self._leaves[key] = tuple(found)
        return self._leaves[key]

    def note(self, own: Own) -> None:
        """Notes a state that the trainer has just made."""
        self._made = [weakref.ref(x) for x in jax.tree.leaves(own)]

    def is_known(self, own: Own) -> bool:
        """Whether this state is the one noted last."""
        made, leaves = [ref() for ref in self._made], jax.tree.leaves(own)
        pairs = zip(made, leaves, strict=False)
        return len(made) == len(leaves) and all(x is y for x, y in pairs)

    def note_if_replicated(self, own: Own, held: Own) -> None:
        """Notes a state from the host if its leaves are replicated as in `flags`.

        Args:
            own: the state of all workers, on their devices.
            held: the same state on the host, leaves (workers, ...).
        """

        def is_replicated(x):
            x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
            lanes = x.reshape(*self._layout.own_shape, *x.shape[1:])
            return not differ(lanes, lanes[:, :1]).any()

        leaves = zip(jax.tree.leaves(held), self.flags(own), strict=True)
        if all(is_replicated(x) for x, should in leaves if should):
            self.note(own)


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
    strategy, optimizer = worker.strategy, worker.optimizer
    draws = holds_keys(jax.eval_shape(optimizer.init, model.params))
    members = introspection.combination(strategy).members
    parted = introspection.reduces(strategy) and members
    if layout.workers == 1 or not (draws or parted or worker.sharded is not None):
        return worker
    place = layout.devices[: layout.devices_each]
    lone = layout._replace(devices=place, lanes=layout.workers)

    def common(strategy, update):
        made = optax.GradientTransformationExtraArgs(optimizer.init, update)
        fixed = worker._replace(make=lambda numbers: (made, strategy))
        return replicated_leaves(fixed.at(None), lone, model)[1]

    # Without the optimizer, the strategy alone decides which leaves are common.
    apart = strategy
    if worker.sharded is not None:
        apart = beside(reduce_with("mean"), worker.sharded, optimizer)
    same = common(apart, _along)
    if any(same) and not all(same):
        after = common(apart, optax.with_extra_args_support(optimizer).update)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model.params)]
        for path, before, now in zip(paths, same, after, strict=True):
            if before and not now:
                raise ValueError(
                    f"optimizer: the step of params{jax.tree_util.keystr(path)}, which "
                    "is the same on all workers, depends on leaves that are not, such "
                    "as rows of tables, as in clip_by_global_norm: use an optimizer "
                    "that treats each leaf alone (optax.clip), or replicate all leaves"
                )
    if not draws:
        return worker
    same = same if apart is strategy else common(strategy, _along)
    if (any(same) and not all(same)) or _has_phases(worker, lone, model):
        raise ValueError(
            "optimizer: its state holds a random key, which must be the same on all "
            "workers for equal steps, and another on each for its own, but this "
            "strategy has both: use one optimizer without noise, or one strategy alone"
        )
    return worker._replace(own_keys=not all(same))


def _along(grads, opt_state, params=None, **extra):
    """An optimizer's update that treats each leaf alone."""
    return grads, opt_state


def _has_phases(worker: Worker, layout: Layout, model: Model) -> bool:
    """Whether gradients are reduced at some steps, and kept at others."""

    def reduced(model, step):
        own = first_own(worker, step, Inputs(model))
        replica = seeing(worker.strategy, own.replica)
        return apply_reduce(worker.strategy, replica.params, replica, own.sync, step)

    jaxpr = layout.traced(reduced, model, jnp.int32(0))[0].jaxpr
    branches = [inner(x) for x, _ in equations(jaxpr) if x.primitive.name == "cond"]
    sends = [[any(axes(x) for x, _ in equations(arm)) for arm in y] for y in branches]
    return any(any(arms) and not all(arms) for arms in sends)


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

    def start(number, model):
        return first_own(worker.at(model.hyperparams), number, Inputs(model))

    def local_step(number, step, leaves):
        (replica, sync), hyperparams = form.unflatten(leaves[0]), leaves[1]
        # What holds for the worker's own numbers, such as 0, may not hold for others.
        own = worker.at(hyperparams)
        grads = jax.tree.map(lambda x: x + number.astype(x.dtype), replica.params)
        replica = seeing(own.strategy, replica, number)
        grads, sync = apply_reduce(own.strategy, grads, replica, sync, step)
        loss = own.optimizer_loss(replica, number.astype(float))
        stepped = own.updated(replica, Found(grads, replica.buffers, {}), loss)
        synced, sync = apply_sync(own.strategy, stepped, sync, step)
        return synced._replace(loss=()), sync, stepped.params

    step = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = _in(layout, step)
    made, same = _traced(start, layout, (numbers, model), (0, None))
    shapes, form = jax.tree.flatten(made)
    replica = made.replica
    first = len(jax.tree.leaves(replica._replace(buffers=())))
    own_buffers = range(first, first + len(jax.tree.leaves(replica.buffers)))
    same = [now and i not in own_buffers for i, now in enumerate(same)]
    while True:  # each pass except the last removes a leaf
        pairs = [*zip(shapes, same, strict=True)]
        held = [x if once else _in(layout, x) for x, once in pairs]
        axes = [None if once else 0 for once in same]
        given = numbers, step, (held, model.hyperparams)
        _, after = _traced(local_step, layout, given, (0, None, (axes, None)))
        steps = after[len(same) :]
        after = [now and before for now, before in zip(after, same, strict=False)]
        if after == same:
            return same, steps
        same = after


def _in(layout: Layout, x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a worker's leaf in all lanes of a device."""
    return jax.ShapeDtypeStruct((layout.lanes, *x.shape), x.dtype)


def _traced(
    program: Callable, layout: Layout, arguments: PyTree, axes: PyTree
) -> tuple[PyTree, list[bool]]:
    """Returns the shapes of a lane program's result, and which leaves are unmapped."""
    found = {}

    @custom_vmap
    def look(leaves):
        return leaves

    @look.def_vmap
    def _(lanes, varies, leaves):
        found["varies"] = varies[0]
        return leaves, varies[0]

    def on_lane(*arguments):
        # Only the leaves: two trees of a user's class may not be comparable.
        leaves, form = jax.tree.flatten(program(*arguments))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        found["shapes"] = form.unflatten(shapes)
        found["varies"] = [False] * len(leaves)
        return look(leaves)

    lanes = jax.vmap(on_lane, axes, axis_name=LANES, axis_size=layout.lanes)
    # Only make_jaxpr gets the devices' axis: vmap cannot sum over groups of devices.
    jax.make_jaxpr(lanes, axis_env=[(DEVICES, layout.shape[0])])(*arguments)
    return found["shapes"], [not varies for varies in found["varies"]]
