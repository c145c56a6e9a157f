"""How a device runs its lanes: together, in turn, or joined. The numbers are the same.

Together, under vmap: what any strategy and any loss can do. In turn, from one sync to
the next lane by lane, in a loop without branches: a CPU's caches then hold one replica,
and its matmuls are plain ones. Joined, where the gradients are averaged and replicas
equal: one gradient over the batches of all lanes.

Each form maps a worker's programs over all of them, as
`syncalgos.engine.backends.spread` says.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import collectives, contract
from syncalgos.collectives import PyTree
from syncalgos.combinators import decided, introspection
from syncalgos.dtypes import narrow, widen
from syncalgos.engine.backends import held_once, over_devices, spread
from syncalgos.engine.lanes.replication import differ
from syncalgos.engine.layout import DEVICES, LANES, Layout
from syncalgos.engine.worker import Worker, over_steps


class Together(NamedTuple):
    """A program of one worker, under vmap.

    Attributes:
        program: a method of Worker.
        equal: for each leaf of `own`, whether it is equal in all lanes before and
            after, and held once. None where no leaf is known to be.
    """

    program: Callable[..., tuple[PyTree, PyTree]]
    equal: tuple[bool, ...] | None = None
    name = "vectorized"

    def mapped(self, worker: Worker, layout: Layout, donate: bool) -> Any:
        program = partial(self.program, worker)
        return spread(layout, program, donate, self.equal)


class InTurn(NamedTuple):
    """Local steps of one lane after the other, up to the next sync of all.

    Attributes:
        equal: as in `Together`.
    """

    equal: tuple[bool, ...] | None = None
    name = "sequential"

    def mapped(self, worker: Worker, layout: Layout, donate: bool) -> Any:
        program = partial(_in_turn, worker, layout.lanes, self.equal)
        return over_devices(layout, program, donate)


class Joined(NamedTuple):
    """One gradient over the batches of all lanes, whose replicas are equal.

    Attributes:
        equal: as in `Together`; all of the replica is.
    """

    equal: tuple[bool, ...] | None
    name = "merged"

    def mapped(self, worker: Worker, layout: Layout, donate: bool) -> Any:
        program = partial(_joined, worker, layout.lanes, self.equal)
        return over_devices(layout, program, donate)


class Agree(NamedTuple):
    """Whether leaves that should be equal in all lanes are, on every device."""

    equal: tuple[bool, ...]

    def mapped(self, worker: Worker, layout: Layout, donate: bool) -> Any:
        def on_device(own, rest):
            leaves = zip(jax.tree.leaves(own), self.equal, strict=True)
            apart = [jnp.any(differ(x, x[:1])) for x, should in leaves if should]
            return (), lax.pmax(jnp.any(jnp.array(apart)).astype(int), DEVICES) == 0

        return over_devices(layout, on_device, donate)


Form = Together | InTurn | Joined


def _in_turn(worker: Worker, lanes: int, equal: Any, own: PyTree, rest: PyTree) -> Any:
    (first, key, data), batches = rest
    (replicas, sync), axes = _lanes_of(own, equal, lanes)
    device, ends = collectives.index(DEVICES), _round_ends(worker, first, batches)
    all_lanes = jnp.int32(0), jnp.int32(lanes)

    def one_lane(start, end, lane, carry):
        def local_step(i, carry):
            replica, totals = carry
            batch = jax.tree.map(lambda x: x[i, lane], batches)
            replica, metrics = worker.alone(
                replica, batch, key, first + i, device * lanes + lane, data
            )
            # Lane by lane, so that a sum does not depend on how many steps there are.
            return replica, jax.tree.map(lambda t, m: t.at[i].add(m), totals, metrics)

        def put(x, mine):
            return lax.dynamic_update_index_in_dim(x, mine, lane, 0)

        replicas, totals = carry
        mine = jax.tree.map(lambda x: x[lane], replicas)
        mine, totals = lax.fori_loop(start, end, local_step, (mine, totals))
        return jax.tree.map(put, replicas, mine), totals

    def one_round(carry):
        start, replicas, sync, totals, told = carry
        end = ends[start]
        body = partial(one_lane, start, end)
        replicas, totals = lax.fori_loop(*all_lanes, body, (replicas, totals))
        # As it were a program of its own, whose rounding no strategy's sync changes.
        replicas, totals = lax.optimization_barrier((replicas, totals))
        replicas, sync = _synced(worker, lanes, axes, replicas, sync, first + end - 1)
        now = decided.noted(sync, first + end - 1)
        told = jax.tree.map(lambda rows, x: rows.at[end - 1].set(x), told, now)
        return end, replicas, sync, totals, told

    steps, none = len(ends), _no_metrics(worker, replicas, *rest)
    told = jax.tree.map(
        lambda x: jnp.zeros((steps, *x.shape), x.dtype), decided.noted(sync, first)
    )
    carry = jnp.int32(0), replicas, sync, widen(none), told
    carry = lax.while_loop(lambda carry: carry[0] < steps, one_round, carry)
    _, replicas, sync, totals, told = carry
    means = narrow(jax.tree.map(lambda x: x / lanes, totals), none)
    metrics = {**collectives.mean(means, DEVICES), **told}
    return _everywhere((replicas, sync), axes, lanes), (first + steps, metrics)


def _joined(worker: Worker, lanes: int, equal: Any, own: PyTree, rest: PyTree) -> Any:
    (first, key, data), batches = rest
    own, axes = held_once(own, equal, lanes)
    me = collectives.index(DEVICES) * lanes

    def local_step(carry, batch):
        replica, sync, step = carry
        grads, _, metrics = worker.gradients(
            replica, batch, key, data, me, joined=lanes
        )
        grads = collectives.mean(grads, DEVICES)
        loss = worker.told_loss(replica, metrics["loss"], DEVICES)
        replica = worker.updated(replica, grads, replica.buffers, loss)
        if worker.strategy.sync is not introspection.keep_replica:
            replica, sync = _synced(worker, lanes, axes, replica, sync, step)
        metrics = {**metrics, **decided.noted(sync, step)}
        return (replica, sync, step + 1), metrics

    carry, metrics = over_steps(local_step, (*own, first), batches)
    *own, step = carry
    metrics = collectives.mean(metrics, DEVICES)
    return _everywhere(tuple(own), axes, lanes), (step, metrics)


def _lanes_of(own: PyTree, equal: Any, lanes: int) -> tuple[PyTree, PyTree]:
    """`held_once`, for a program that holds all of the replicas' lanes."""
    (replicas, _), ((_, sync), (_, axes)) = own, held_once(own, equal, lanes)
    return (replicas, sync), (jax.tree.map(lambda _: 0, replicas), axes)


def _synced(worker, lanes, axes, replica, sync, step) -> PyTree:
    """A sync of all lanes."""
    synced = jax.vmap(
        lambda *arguments: contract.apply_sync(worker.strategy, *arguments),
        in_axes=(*axes, None),
        axis_name=LANES,
        axis_size=lanes,
    )(replica, sync, step)
    return jax.tree.map(lambda x, axis: x[0] if axis is None else x, synced, axes)


def _everywhere(tree: PyTree, axes: PyTree, lanes: int) -> PyTree:
    """What is held once, in all lanes again."""

    def leaf(x, axis):
        return jnp.broadcast_to(x, (lanes, *x.shape)) if axis is None else x

    return jax.tree.map(leaf, tree, axes)


def _round_ends(worker: Worker, first: jax.Array, batches: PyTree) -> jax.Array:
    """For each of the steps, the one before which its round ends, (steps,)."""
    steps = jnp.arange(len(jax.tree.leaves(batches)[0]), dtype=jnp.int32)
    acting = lax.map(
        lambda i: jnp.asarray(introspection.acts(worker.strategy, first + i)), steps
    )
    ends = jnp.where(acting, steps + 1, jnp.int32(len(steps)))
    return lax.cummin(ends, reverse=True)


def _no_metrics(worker, replicas, shared, batches) -> PyTree:
    """Zeros of each step's metrics, (steps, ...)."""
    _, key, data = shared
    mine = jax.tree.map(lambda x: x[0], replicas)
    batch = jax.tree.map(lambda x: x[0, 0], batches)
    metrics = jax.eval_shape(worker.metrics, mine, batch, key, jnp.int32(0), data)
    steps = len(jax.tree.leaves(batches)[0])
    return jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), metrics)
