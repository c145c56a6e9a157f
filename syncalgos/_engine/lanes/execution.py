"""Forms in which a device runs its lanes' local steps; all give the same numbers.

- Vectorized (`placement/backends.py`) runs all lanes under vmap, for any strategy and
  loss.
- Sequential runs one lane after the other from one sync to the next.
- Merged takes one gradient over the batches of all lanes. It needs averaged gradients
  and identical replicas.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos._combinators import introspection
from syncalgos._combinators.measured import sync_metrics
from syncalgos._dtypes import narrow, widen
from syncalgos._engine.placement.backends import Replicated, held_once
from syncalgos._engine.placement.layout import DEVICES, LANES
from syncalgos._engine.program import Inputs, Outputs, Own
from syncalgos._engine.worker import Found, Worker, accumulated, over_steps
from syncalgos.strategy import PyTree, apply_sync, keep_grads, seeing


def sequential(
    worker: Worker, lanes: int, replicated: Replicated, own: Own, inputs: Inputs
) -> Outputs:
    """Takes the local steps of one lane after the other, up to the next sync.

    A CPU's caches then hold one replica, and matmuls need no batch axis.
    """
    first, worker = inputs.shared.step, worker.at(inputs.shared.hyperparams)
    # The strategy is known to keep gradients: between syncs, lanes share nothing.
    worker = worker._replace(strategy=worker.strategy._replace(reduce=keep_grads))
    held, axes = held_once(own, replicated, lanes)
    # Each lane reads its own loss. A round's last loss is kept until the sync.
    seen = seeing(worker.strategy, own.replica, jnp.zeros(lanes))
    held = held._replace(replica=seen)
    axes = axes._replace(replica=jax.tree.map(lambda _: 0, seen))
    one_lane = partial(_lane_steps, worker, lanes, inputs, collectives.index(DEVICES))
    ends = _round_ends(worker, first, inputs.batches)
    # The same dtype as a round's bounds, so that all loop counters have one dtype.
    all_lanes = jnp.int32(0), jnp.int32(lanes)

    # Steps count from the dispatch's first; totals are metrics summed over the lanes,
    # rows what the strategy noted, (steps, ...) each.
    def one_round(carry):
        start, own, totals, rows = carry
        end = ends[start]
        body = partial(one_lane, start, end)
        replicas, totals = lax.fori_loop(*all_lanes, body, (own.replica, totals))
        # The barrier keeps the strategy's sync from changing the rounding of the steps.
        replicas, totals = lax.optimization_barrier((replicas, totals))
        step = first + end - 1
        own = _synced(worker, lanes, axes, Own(replicas, own.sync), step)
        now = sync_metrics(own.sync, step)
        rows = jax.tree.map(lambda x, y: x.at[end - 1].set(y), rows, now)
        return end, own, totals, rows

    steps, none = len(ends), _no_metrics(worker, own, inputs)
    empty = jax.tree.map(
        lambda x: jnp.zeros((steps, *x.shape), x.dtype), sync_metrics(held.sync, first)
    )
    carry = jnp.int32(0), held, widen(none), empty
    carry = lax.while_loop(lambda carry: carry[0] < steps, one_round, carry)
    _, held, totals, rows = carry
    means = narrow(jax.tree.map(lambda x: x / lanes, totals), none)
    metrics = {**collectives.mean(means, DEVICES), **rows}
    own = _in_all(held, axes, lanes)
    own = own._replace(replica=own.replica._replace(loss=()))
    return Outputs(own, (first + steps, metrics))


def merged(
    worker: Worker,
    lanes: int,
    replicated: Replicated,
    own: Own,
    inputs: Inputs,
    group: int | None = None,
) -> Outputs:
    """Takes one gradient over the batches of all lanes, with identical replicas.

    With a `group`, which must divide the lanes, takes this many lanes at a time.
    """
    shared, worker = inputs.shared, worker.at(inputs.shared.hyperparams)
    held, axes = held_once(own, replicated, lanes)
    group, me = group or lanes, collectives.index(DEVICES) * lanes

    def gradients(replica, batch):
        def of_group(_, number, part):
            first = me + number * group
            given = replica, part, shared.key, shared.data, first
            return worker.gradients(*given, merged=group)

        if group == lanes:
            return of_group((), 0, batch)
        cut = lanes // group, group
        parts = jax.tree.map(lambda x: x.reshape(*cut, *x.shape[1:]), batch)
        return accumulated(of_group, replica, parts)

    def local_step(carry, batch):
        own, step = carry
        found = gradients(own.replica, batch)
        grads = collectives.mean(found.grads, DEVICES)
        found = Found(grads, own.replica.buffers, found.metrics)
        loss = worker.optimizer_loss(own.replica, found.metrics["loss"], DEVICES)
        own = own._replace(replica=worker.updated(own.replica, found, loss))
        if introspection.ever_acts(worker.strategy):
            own = _synced(worker, lanes, axes, own, step)
        return (own, step + 1), {**found.metrics, **sync_metrics(own.sync, step)}

    (held, step), metrics = over_steps(local_step, (held, shared.step), inputs.batches)
    metrics = collectives.mean(metrics, DEVICES)
    return Outputs(_in_all(held, axes, lanes), (step, metrics))


class Compared(NamedTuple):
    """A loss and its gradient of a merged batch, beside those of its parts.

    All are means over the devices.

    Attributes:
        loss: the loss of the merged batch.
        mean: the mean of the losses of its parts.
        loss_size: the mean of their magnitudes.
        apart: the norm of the gradient of the merged batch minus the mean of those of
            its parts.
        size: the mean of the norms of the gradients of its parts.
    """

    loss: jax.Array | float
    mean: jax.Array | float
    loss_size: jax.Array | float
    apart: jax.Array | float
    size: jax.Array | float


def compared(
    worker: Worker,
    workers: int,
    lanes: int,
    replicated: Replicated,
    own: Own,
    inputs: Inputs,
) -> Outputs:
    """Compares the first microbatches of some workers, as one batch and one by one.

    Args:
        worker: the worker whose loss is said to be a mean over its batch.
        workers: the number of workers of a device whose batches are merged.
        lanes, replicated, own, inputs: as in `merged`.
    """
    shared, replica = inputs.shared, held_once(own, replicated, lanes)[0].replica
    whole = worker._replace(accumulate=1)

    def first(x):
        return x[0, :workers, : x.shape[2] // worker.accumulate]

    def found(_, number, part, merged=None):
        given = replica, part, shared.key, shared.data, number, merged
        grads, buffers, metrics = whole.gradients(*given)
        grads, loss = widen((grads, metrics["loss"]))
        sizes = {"loss": loss, "loss_size": jnp.abs(loss)}
        return Found(grads, buffers, {**sizes, "size": optax.tree.norm(grads)})

    batches = jax.tree.map(first, inputs.batches)
    parts = accumulated(found, replica, batches)
    grads, _, metrics = found((), 0, batches, workers)
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, grads, parts.grads))
    each = parts.metrics["loss"], parts.metrics["loss_size"]
    told = Compared(metrics["loss"], *each, apart, parts.metrics["size"])
    return Outputs((), collectives.mean(told, DEVICES))


def _lane_steps(worker, lanes, inputs, device, start, end, lane, carry):
    """Takes local steps start to end - 1 of one lane; updates replicas and totals."""
    shared, batches = inputs

    def local_step(i, carry):
        replica, totals = carry
        batch = jax.tree.map(lambda x: x[i, lane], batches)
        step, me = shared.step + i, device * lanes + lane
        own, metrics = worker.local_step(Own(replica), batch, shared, step, me)
        # Added lane by lane, so that a sum does not depend on the number of steps.
        totals = jax.tree.map(lambda t, m: t.at[i].add(m), totals, metrics)
        return own.replica, totals

    def put(x, mine):
        return lax.dynamic_update_index_in_dim(x, mine, lane, 0)

    replicas, totals = carry
    mine = jax.tree.map(lambda x: x[lane], replicas)
    mine, totals = lax.fori_loop(start, end, local_step, (mine, totals))
    return jax.tree.map(put, replicas, mine), totals


def _synced(worker: Worker, lanes: int, axes: Own, own: Own, step: jax.Array) -> Own:
    """Syncs all lanes."""

    def sync(*own):
        return apply_sync(worker.strategy, *own)

    mapped = jax.vmap(sync, (*axes, None), axis_name=LANES, axis_size=lanes)
    synced = Own(*mapped(*own, step))
    return jax.tree.map(lambda x, axis: x[0] if axis is None else x, synced, axes)


def _in_all(own: Own, axes: Own, lanes: int) -> Own:
    """Copies leaves that are held once into all lanes."""

    def leaf(x, axis):
        return jnp.broadcast_to(x, (lanes, *x.shape)) if axis is None else x

    return jax.tree.map(leaf, own, axes)


def _round_ends(worker: Worker, first: jax.Array, batches: PyTree) -> jax.Array:
    """Finds for each step the step just after its round, (steps,)."""
    # Rounds end where the sync acts, including schedules, offsets, delays and phases.
    # The loops have dynamic bounds, so that one program serves any phase.
    num_steps = len(jax.tree.leaves(batches)[0])
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    acting_steps = introspection.acting_steps(worker.strategy)
    if acting_steps.period is not None:
        last_steps = acting_steps.next(first + steps) - first
        return jnp.minimum(last_steps + 1, num_steps)
    acting = lax.map(lambda step: jnp.asarray(acting_steps(first + step)), steps)
    ends = jnp.where(acting, steps + 1, jnp.int32(num_steps))
    return lax.cummin(ends, reverse=True)


def _no_metrics(worker: Worker, own: Own, inputs: Inputs) -> PyTree:
    """Returns zeros in the shape of each step's metrics, (steps, ...)."""
    shared, batches = inputs
    mine = jax.tree.map(lambda x: x[0], own.replica)
    batch = jax.tree.map(lambda x: x[0, 0], batches)
    given = mine, batch, shared.key, shared.data, jnp.int32(0)
    metrics = jax.eval_shape(worker.metrics, *given)
    steps = len(jax.tree.leaves(batches)[0])
    return jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), metrics)
