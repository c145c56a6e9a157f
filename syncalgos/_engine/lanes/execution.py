"""Forms in which a device runs its lanes' local steps; all give the same numbers.

- Vectorized (`placement/backends.py`) runs all lanes under vmap, for any strategy and
  loss.
- Sequential runs one lane after the other from one sync to the next.
- Merged takes one gradient over the batches of all lanes. It needs averaged gradients
  and identical replicas.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos._combinators import introspection
from syncalgos._combinators.measured import sync_metrics
from syncalgos._dtypes import narrow, widen
from syncalgos._engine.placement.backends import Replicated, hold_replicated_once
from syncalgos._engine.placement.layout import DEVICES, LANES
from syncalgos._engine.program import Inputs, Outputs, WorkerState
from syncalgos._engine.worker import (
    LossResults,
    Worker,
    accumulate_gradients,
    scan_steps,
)
from syncalgos.strategy import PyTree, Replica, apply_sync, keep_grads, seeing


def sequential(
    worker: Worker,
    lanes: int,
    replicated: Replicated,
    worker_state: WorkerState,
    inputs: Inputs,
) -> Outputs:
    """Takes the local steps of one lane after the other, up to the next sync.

    A CPU's caches then hold one replica, and matmuls need no batch axis.
    """
    first_step = inputs.shared.step
    worker = worker.with_hyperparams(inputs.shared.hyperparams)
    # The strategy is known to keep gradients: between syncs, lanes share nothing.
    worker = worker._replace(strategy=worker.strategy._replace(reduce=keep_grads))
    lane_states, axes = hold_replicated_once(worker_state, replicated, lanes)
    # Each lane reads its own loss. A round's last loss is kept until the sync.
    seen_replicas = seeing(worker.strategy, worker_state.replica, jnp.zeros(lanes))
    lane_states = lane_states._replace(replica=seen_replicas)
    axes = axes._replace(replica=jax.tree.map(lambda _: 0, seen_replicas))
    take_lane_steps = partial(
        _take_lane_steps, worker, lanes, inputs, collectives.index(DEVICES)
    )
    round_ends = _find_round_ends(worker, first_step, inputs.batches)
    # The same dtype as a round's bounds, so that all loop counters have one dtype.
    first_lane = jnp.int32(0)
    end_lane = jnp.int32(lanes)

    # Steps count from the dispatch's first; totals are metrics summed over the lanes,
    # rows what the strategy noted, (steps, ...) each.
    def take_round(
        carry: tuple[jax.Array, WorkerState, PyTree, PyTree],
    ) -> tuple[jax.Array, WorkerState, PyTree, PyTree]:
        start, lane_states, totals, rows = carry
        end = round_ends[start]
        replicas, totals = lax.fori_loop(
            first_lane,
            end_lane,
            partial(take_lane_steps, start, end),
            (lane_states.replica, totals),
        )
        # The barrier keeps the strategy's sync from changing the rounding of the steps.
        replicas, totals = lax.optimization_barrier((replicas, totals))
        step = first_step + end - 1
        lane_states = WorkerState(replicas, lane_states.sync)
        lane_states = _sync_lanes(worker, lanes, axes, lane_states, step)
        new_rows = sync_metrics(lane_states.sync, step)
        rows = jax.tree.map(lambda x, y: x.at[end - 1].set(y), rows, new_rows)
        return end, lane_states, totals, rows

    num_steps = len(round_ends)
    zero_metrics = _make_zero_metrics(worker, worker_state, inputs)
    zero_rows = jax.tree.map(
        lambda x: jnp.zeros((num_steps, *x.shape), x.dtype),  # (steps, …)
        sync_metrics(lane_states.sync, first_step),
    )
    carry = jnp.int32(0), lane_states, widen(zero_metrics), zero_rows
    carry = lax.while_loop(lambda carry: carry[0] < num_steps, take_round, carry)
    _, lane_states, totals, rows = carry
    means = narrow(jax.tree.map(lambda x: x / lanes, totals), zero_metrics)
    metrics = {**collectives.mean(means, DEVICES), **rows}
    worker_state = _copy_to_lanes(lane_states, axes, lanes)
    replica = worker_state.replica._replace(loss=())
    worker_state = worker_state._replace(replica=replica)
    return Outputs(worker_state, (first_step + num_steps, metrics))


def merged(
    worker: Worker,
    lanes: int,
    replicated: Replicated,
    worker_state: WorkerState,
    inputs: Inputs,
    group_lanes: int | None = None,
) -> Outputs:
    """Takes one gradient over the batches of all lanes, with identical replicas.

    With `group_lanes`, which must divide the lanes, takes this many lanes at a time.
    """
    shared = inputs.shared
    worker = worker.with_hyperparams(shared.hyperparams)
    lane_states, axes = hold_replicated_once(worker_state, replicated, lanes)
    num_lanes = group_lanes or lanes
    first_worker = collectives.index(DEVICES) * lanes

    def differentiate_group(
        replica: Replica, number: Any, batch: PyTree
    ) -> LossResults:
        first_of_group = first_worker + number * num_lanes
        return worker.compute_gradients(
            replica, batch, shared.key, shared.data, first_of_group, merged=num_lanes
        )

    def differentiate(replica: Replica, batch: PyTree) -> LossResults:
        if num_lanes == lanes:
            return differentiate_group(replica, 0, batch)

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(lanes // num_lanes, num_lanes, *x.shape[1:])

        group_batches = jax.tree.map(split, batch)  # (groups, lanes, batch, …)
        return accumulate_gradients(
            lambda _, number, batch: differentiate_group(replica, number, batch),
            replica,
            group_batches,
        )

    def local_step(
        carry: tuple[WorkerState, jax.Array], batch: PyTree
    ) -> tuple[tuple[WorkerState, jax.Array], PyTree]:
        lane_states, step = carry
        replica = lane_states.replica
        results = differentiate(replica, batch)
        grads = collectives.mean(results.grads, DEVICES)
        results = LossResults(grads, replica.buffers, results.metrics)
        loss = worker.optimizer_loss(replica, results.metrics["loss"], DEVICES)
        replica = worker.take_inner_step(replica, results, loss)
        lane_states = lane_states._replace(replica=replica)
        if introspection.ever_acts(worker.strategy):
            lane_states = _sync_lanes(worker, lanes, axes, lane_states, step)
        metrics = {**results.metrics, **sync_metrics(lane_states.sync, step)}
        return (lane_states, step + 1), metrics

    carry = lane_states, shared.step
    (lane_states, step), metrics = scan_steps(local_step, carry, inputs.batches)
    metrics = collectives.mean(metrics, DEVICES)
    return Outputs(_copy_to_lanes(lane_states, axes, lanes), (step, metrics))


class MergedComparison(NamedTuple):
    """A loss and its gradient of a merged batch, beside those of its parts.

    All are means over the devices.

    Attributes:
        loss: the loss of the merged batch.
        mean_loss: the mean of the losses of its parts.
        loss_size: the mean of their magnitudes.
        grads_distance: the norm of the gradient of the merged batch minus the mean of
            those of its parts.
        grads_size: the mean of the norms of the gradients of its parts.
    """

    loss: jax.Array | float
    mean_loss: jax.Array | float
    loss_size: jax.Array | float
    grads_distance: jax.Array | float
    grads_size: jax.Array | float


def compare_merged(
    worker: Worker,
    workers: int,
    lanes: int,
    replicated: Replicated,
    worker_state: WorkerState,
    inputs: Inputs,
) -> Outputs:
    """Compares the first microbatches of some workers, as one batch and one by one.

    Args:
        worker: the worker whose loss is said to be a mean over its batch.
        workers: the number of workers of a device whose batches are merged.
        lanes, replicated, worker_state, inputs: as in `merged`.
    """
    shared = inputs.shared
    lane_states, _ = hold_replicated_once(worker_state, replicated, lanes)
    replica = lane_states.replica
    one_batch_worker = worker._replace(accumulate=1)

    def take_microbatches(x: jax.Array) -> jax.Array:
        return x[0, :workers, : x.shape[2] // worker.accumulate]

    def differentiate(
        _: PyTree, number: Any, batch: PyTree, merged: int | None = None
    ) -> LossResults:
        grads, buffers, metrics = one_batch_worker.compute_gradients(
            replica, batch, shared.key, shared.data, number, merged
        )
        grads, loss = widen((grads, metrics["loss"]))
        sizes = {
            "loss": loss,
            "loss_size": jnp.abs(loss),
            "grads_size": optax.tree.norm(grads),
        }
        return LossResults(grads, buffers, sizes)

    batches = jax.tree.map(take_microbatches, inputs.batches)  # (workers, batch, …)
    mean_results = accumulate_gradients(differentiate, replica, batches)
    merged_results = differentiate((), 0, batches, workers)
    differences = jax.tree.map(jnp.subtract, merged_results.grads, mean_results.grads)
    comparison = MergedComparison(
        loss=merged_results.metrics["loss"],
        mean_loss=mean_results.metrics["loss"],
        loss_size=mean_results.metrics["loss_size"],
        grads_distance=optax.tree.norm(differences),
        grads_size=mean_results.metrics["grads_size"],
    )
    return Outputs((), collectives.mean(comparison, DEVICES))


def _take_lane_steps(
    worker: Worker,
    lanes: int,
    inputs: Inputs,
    device: jax.Array,
    start: jax.Array,
    end: jax.Array,
    lane: jax.Array,
    carry: tuple[Replica, PyTree],
) -> tuple[Replica, PyTree]:
    """Takes local steps start to end - 1 of one lane; updates replicas and totals."""
    shared, batches = inputs

    def local_step(
        index: jax.Array, carry: tuple[Replica, PyTree]
    ) -> tuple[Replica, PyTree]:
        replica, totals = carry
        batch = jax.tree.map(lambda x: x[index, lane], batches)
        step = shared.step + index
        worker_index = device * lanes + lane
        worker_state, metrics = worker.local_step(
            WorkerState(replica), batch, shared, step, worker_index
        )
        # Added lane by lane, so that a sum does not depend on the number of steps.
        totals = jax.tree.map(lambda t, m: t.at[index].add(m), totals, metrics)
        return worker_state.replica, totals

    def put_lane(x: jax.Array, lane_value: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, lane_value, lane, 0)

    replicas, totals = carry
    replica = jax.tree.map(lambda x: x[lane], replicas)
    replica, totals = lax.fori_loop(start, end, local_step, (replica, totals))
    return jax.tree.map(put_lane, replicas, replica), totals


def _sync_lanes(
    worker: Worker,
    lanes: int,
    axes: WorkerState,
    lane_states: WorkerState,
    step: jax.Array,
) -> WorkerState:
    """Syncs all lanes."""

    def sync(
        replica: Replica, sync_state: PyTree, step: jax.Array
    ) -> tuple[Replica, PyTree]:
        return apply_sync(worker.strategy, replica, sync_state, step)

    mapped_sync = jax.vmap(sync, (*axes, None), axis_name=LANES, axis_size=lanes)
    new_states = WorkerState(*mapped_sync(*lane_states, step))
    return jax.tree.map(lambda x, axis: x[0] if axis is None else x, new_states, axes)


def _copy_to_lanes(
    lane_states: WorkerState, axes: WorkerState, lanes: int
) -> WorkerState:
    """Copies leaves that are held once into all lanes."""

    def copy_leaf(x: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(x, (lanes, *x.shape)) if axis is None else x

    return jax.tree.map(copy_leaf, lane_states, axes)


def _find_round_ends(
    worker: Worker, first_step: jax.Array, batches: PyTree
) -> jax.Array:
    """Finds for each step the step just after its round, (steps,)."""
    # Rounds end where the sync acts, including schedules, offsets, delays and phases.
    # The loops have dynamic bounds, so that one program serves any phase.
    num_steps = len(jax.tree.leaves(batches)[0])
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    acting_steps = introspection.acting_steps(worker.strategy)
    if acting_steps.period is not None:
        last_steps = acting_steps.next(first_step + steps) - first_step
        return jnp.minimum(last_steps + 1, num_steps)

    def acts(step: jax.Array) -> jax.Array:
        return jnp.asarray(acting_steps(first_step + step))

    is_acting = lax.map(acts, steps)
    ends = jnp.where(is_acting, steps + 1, jnp.int32(num_steps))
    return lax.cummin(ends, reverse=True)


def _make_zero_metrics(
    worker: Worker, worker_state: WorkerState, inputs: Inputs
) -> PyTree:
    """Returns zeros in the shape of each step's metrics, (steps, ...)."""
    shared, batches = inputs
    replica = jax.tree.map(lambda x: x[0], worker_state.replica)
    batch = jax.tree.map(lambda x: x[0, 0], batches)
    metrics = jax.eval_shape(
        worker.compute_metrics, replica, batch, shared.key, shared.data, jnp.int32(0)
    )
    steps = len(jax.tree.leaves(batches)[0])
    return jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), metrics)
