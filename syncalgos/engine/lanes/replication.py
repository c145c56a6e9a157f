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
from jax import lax
from jax.custom_batching import custom_vmap

from syncalgos.engine.placement.layout import DEVICES, LANES, Layout, is_key
from syncalgos.engine.program import Inputs, Model, Outputs, Own, Program
from syncalgos.engine.state import of_one
from syncalgos.engine.worker import Found, Worker, first_own
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
        self._worker, self._layout = worker, layout
        self._leaves: dict[Any, tuple[bool, ...]] = {}
        self._made: list[weakref.ref] = []

    def flags(self, own: Own) -> tuple[bool, ...]:
        """Marks the leaves that are replicated in states that the trainer makes."""
        leaves, structure = jax.tree.flatten(own)
        key = structure, *((x.shape, x.dtype) for x in leaves)
        if key not in self._leaves:
            self._leaves[key] = replicated_leaves(self._worker, self._layout, own)
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


def replicated_leaves(worker: Worker, layout: Layout, own: Own) -> tuple[bool, ...]:
    """Marks the leaves that are identical in all lanes of a device, at any time.

    vmap finds these leaves, so algorithms need not declare them. A leaf is one of them
    if both `init` and a local step that starts from unmapped leaves leave it unmapped.
    Buffers always count as different for each worker.

    Args:
        worker: the worker whose programs are traced.
        layout: the place of each worker.
        own: replicas and strategy state of all workers, arrays or shapes.

    Returns:
        A boolean for each leaf.
    """
    leaves, form = jax.tree.flatten(of_one(own))
    replica, _ = form.unflatten(leaves)

    def start(number, model):
        return first_own(worker, number, Inputs(model))

    def local_step(number, step, leaves):
        replica, sync = form.unflatten(leaves)
        grads = jax.tree.map(lambda x: x + number.astype(x.dtype), replica.params)
        replica = seeing(worker.strategy, replica, number)
        grads, sync = apply_reduce(worker.strategy, grads, replica, sync, step)
        loss = worker.optimizer_loss(replica, number.astype(float))
        found = Found(grads, replica.buffers, {})
        stepped = worker.updated(replica, found, loss)
        synced, sync = apply_sync(worker.strategy, stepped, sync, step)
        return synced._replace(loss=()), sync

    step = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = _in(layout, step)
    key = jax.random.key(0)
    model = Model(replica.params, replica.buffers, key, worker.hyperparams)
    shapes, same = _traced(start, layout, (numbers, model), (0, None))
    first = len(jax.tree.leaves(replica._replace(buffers=())))
    own_buffers = range(first, first + len(jax.tree.leaves(replica.buffers)))
    same = [now and i not in own_buffers for i, now in enumerate(same)]
    for _ in range(len(same) + 1):  # each pass except the last removes a leaf
        pairs = [*zip(shapes, same, strict=True)]
        held = [x if once else _in(layout, x) for x, once in pairs]
        axes = [None if once else 0 for once in same]
        _, after = _traced(local_step, layout, (numbers, step, held), (0, None, axes))
        after = [now and before for now, before in zip(after, same, strict=True)]
        if after == same:
            return tuple(same)
        same = after
    raise RuntimeError("leaves that are identical in all lanes were not found")


def _in(layout: Layout, x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a worker's leaf in all lanes of a device."""
    return jax.ShapeDtypeStruct((layout.lanes, *x.shape), x.dtype)


def _traced(
    program: Callable, layout: Layout, arguments: PyTree, axes: PyTree
) -> tuple[list[jax.ShapeDtypeStruct], list[bool]]:
    """Returns the shapes of a lane program's result leaves, and which are unmapped."""
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
        leaves = jax.tree.leaves(program(*arguments))
        found["shapes"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        found["varies"] = [False] * len(leaves)
        return look(leaves)

    lanes = jax.vmap(on_lane, axes, axis_name=LANES, axis_size=layout.lanes)
    # Only make_jaxpr gets the devices' axis: vmap cannot sum over groups of devices.
    jax.make_jaxpr(lanes, axis_env=[(DEVICES, layout.shape[0])])(*arguments)
    return found["shapes"], [not varies for varies in found["varies"]]
