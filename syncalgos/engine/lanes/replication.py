"""What is equal in all lanes of a device, so that it can be held once.

Anchors, velocities, and all that follows from means alone: 64 lanes need one of each.
"""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from syncalgos.collectives import PyTree
from syncalgos.engine.layout import DEVICES, LANES, Layout, is_key
from syncalgos.engine.worker import Worker
from syncalgos.strategy import apply_reduce, apply_sync


def differ(x: Any, y: Any) -> Any:
    """Where arrays differ; NaN is equal to NaN."""
    return (x != y) & ((x == x) | (y == y))


class Equal:
    """Knows it of the states of a trainer.

    Of states that the trainer made itself, by tracing alone; others are compared.
    """

    def __init__(self, worker: Worker, layout: Layout):
        self._worker, self._layout = worker, layout
        self._leaves: dict[Any, tuple[bool, ...]] = {}
        self._made: list[weakref.ref] = []

    def note(self, own: PyTree) -> None:
        """Takes note of a state that the trainer has just made."""
        self._made = [weakref.ref(x) for x in jax.tree.leaves(own)]

    def note_if_equal(self, own: PyTree, held: PyTree) -> None:
        """`note`, of a state from the host whose leaves are what they should be.

        Args:
            own: of all workers, on their devices.
            held: the same on the host, leaves (workers, ...).
        """

        def is_equal(x):
            x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
            lanes = x.reshape(*self._layout.own_shape, *x.shape[1:])
            return not differ(lanes, lanes[:, :1]).any()

        leaves = zip(jax.tree.leaves(held), self._flags(own), strict=True)
        if all(is_equal(x) for x, should in leaves if should):
            self.note(own)

    def of(
        self, own: PyTree, agree: Callable[[tuple[bool, ...]], Any]
    ) -> tuple[bool, ...] | None:
        """For each leaf of (replica, sync), whether it is equal; None if none is.

        Args:
            own: of all workers.
            agree: whether those leaves of `own` are what they should be.
        """
        equal = self._flags(own)
        if not any(equal):
            return None
        if not self._is_made(own):
            if not agree(equal):
                return None
            self.note(own)
        return equal

    def _is_made(self, own: PyTree) -> bool:
        made, leaves = [ref() for ref in self._made], jax.tree.leaves(own)
        pairs = zip(made, leaves, strict=False)
        return len(made) == len(leaves) and all(x is y for x, y in pairs)

    def _flags(self, own: PyTree) -> tuple[bool, ...]:
        leaves, structure = jax.tree.flatten(own)
        key = structure, *((x.shape, x.dtype) for x in leaves)
        if key not in self._leaves:
            self._leaves[key] = equal_leaves(self._worker, self._layout, own)
        return self._leaves[key]


def equal_leaves(worker: Worker, layout: Layout, own: PyTree) -> tuple[bool, ...]:
    """Which leaves of (replica, sync) are equal in all lanes of a device, at any time.

    Anchors, velocities, and all that follows from means alone: vmap knows. A leaf is
    one of them if `init` makes it equal, and a local step of equal ones, too. Buffers
    are each worker's own.

    Args:
        worker: whose programs are traced.
        layout: where the workers live.
        own: (replica, sync) of all workers, arrays or shapes.

    Returns:
        A boolean for each leaf.
    """

    leaves, form = jax.tree.flatten(own)
    replica, _ = form.unflatten([_of_one(x) for x in leaves])

    def start(number, model):
        return worker.init(number, (*model, jax.random.key(0)), ())[0]

    def local_step(number, step, leaves):
        replica, sync = form.unflatten(leaves)
        grads = jax.tree.map(lambda x: x + number.astype(x.dtype), replica.params)
        grads, sync = apply_reduce(worker.strategy, grads, replica, sync, step)
        loss = worker.told_loss(replica, number.astype(float))
        stepped = worker.updated(replica, grads, replica.buffers, loss)
        return apply_sync(worker.strategy, stepped, sync, step)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = _in(layout, step)
    model = replica.params, replica.buffers
    shapes, equal = _traced(start, layout, (numbers, model), (0, None))
    first = len(jax.tree.leaves(replica._replace(buffers=())))
    own_buffers = range(first, first + len(jax.tree.leaves(replica.buffers)))
    equal = [now and i not in own_buffers for i, now in enumerate(equal)]
    for _ in range(len(equal) + 1):  # each round but the last takes out a leaf
        pairs = [*zip(shapes, equal, strict=True)]
        held = [x if once else _in(layout, x) for x, once in pairs]
        axes = [None if once else 0 for once in equal]
        _, after = _traced(local_step, layout, (numbers, step, held), (0, None, axes))
        after = [now and before for now, before in zip(after, equal, strict=True)]
        if after == equal:
            return tuple(equal)
        equal = after
    raise RuntimeError("leaves that are equal in all lanes were not found")


def _of_one(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a worker's leaf, of one that leads with (devices, lanes)."""
    return jax.ShapeDtypeStruct(x.shape[2:], x.dtype)


def _in(layout: Layout, x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a worker's leaf in all lanes of a device."""
    return jax.ShapeDtypeStruct((layout.lanes, *x.shape), x.dtype)


def _traced(
    program: Callable, layout: Layout, arguments: PyTree, axes: PyTree
) -> tuple[list[jax.ShapeDtypeStruct], list[bool]]:
    """Shapes of the leaves that one lane's program returns, and which no lane owns."""
    found = {}

    @custom_vmap
    def look(leaves):
        return leaves

    @look.def_vmap
    def _(lanes, varies, leaves):
        found["varies"] = varies[0]
        return leaves, varies[0]

    def on_lane(*arguments):
        # Leaves alone: two trees of a user's class may not be comparable.
        leaves = jax.tree.leaves(program(*arguments))
        found["shapes"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        found["varies"] = [False] * len(leaves)
        return look(leaves)

    lanes = jax.vmap(on_lane, axes, axis_name=LANES, axis_size=layout.lanes)
    # No vmap: it knows no sums over groups of devices.
    jax.make_jaxpr(lanes, axis_env=[(DEVICES, layout.shape[0])])(*arguments)
    return found["shapes"], [not varies for varies in found["varies"]]
