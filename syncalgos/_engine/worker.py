"""One worker's view of the engine's programs.

`lanes/execution.py` and `placement/backends.py` map them over all workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos._combinators import introspection, participation
from syncalgos._combinators.measured import sync_metrics
from syncalgos._dtypes import narrow, weak_floats, widen, zeros
from syncalgos._engine import arguments, inner_step, lone_branches, sharded_tables
from syncalgos._engine.inner_fit import check_clock, check_form
from syncalgos._engine.losses import OF_WORKERS, WEIGHT, Loss, normalized_loss
from syncalgos._engine.placement.layout import DEVICES, LANES, change_key_words
from syncalgos._engine.program import (
    Inputs,
    Model,
    Outputs,
    Program,
    Shared,
    WorkerState,
)
from syncalgos._keys import is_key, own_keys
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.collectives._shares import times_share
from syncalgos.reducers._stacking import shards
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    require_same,
    seeing,
    strong,
)

Make = Callable[[PyTree], tuple[optax.GradientTransformation, Strategy]]


class LossResults(NamedTuple):
    """The results of a loss and its backward pass."""

    grads: PyTree
    buffers: PyTree
    metrics: dict[str, jax.Array]


class Worker(NamedTuple):
    """Everything needed to make a worker's programs.

    Attributes:
        loss: the loss for training.
        eval_loss: the loss for evaluation.
        optimizer: the inner optimizer.
        strategy: the strategy for the params that are not sharded.
        accumulate: the number of microbatches in a step.
        sharded: a mask of the params that are sharded by rows over the workers; None
            means none.
        reported_losses: the number of workers if metrics hold the loss of each worker,
            else 0.
        workers: the number of workers.
        make: hyperparameters -> the optimizer and the strategy with these numbers. The
            optimizer and strategy above are made with the `hyperparams` below.
        hyperparams: Python numbers.
        has_own_keys: whether each worker's optimizer draws from its own random keys.
    """

    loss: Loss
    eval_loss: Loss
    optimizer: optax.GradientTransformation
    strategy: Strategy
    accumulate: int
    sharded: PyTree
    reported_losses: int
    workers: int
    make: Make
    hyperparams: PyTree
    has_own_keys: bool = False

    def with_hyperparams(self, hyperparams: PyTree) -> "Worker":
        """The same worker with other numbers, such as the arguments of a program."""
        optimizer, strategy = self.make(weak_floats(hyperparams))
        return self._replace(optimizer=optimizer, strategy=strategy)

    def compute_gradients(
        self,
        replica: Replica,
        batch: PyTree,
        key: jax.Array,
        data: PyTree,
        worker_index: Any,
        merged: int | None = None,
    ) -> LossResults:
        """Returns the loss's gradients, buffers and metrics, over all microbatches.

        With several batches `merged`, leaves of batch lead with (merged, batch), and
        `worker_index` is the number of the first of their workers.
        """
        loss = normalized_loss(self.loss, self.reported_losses, merged)
        loss_and_grads = jax.value_and_grad(loss, has_aux=True)

        def differentiate(
            buffers: PyTree, batch: PyTree, key: jax.Array
        ) -> LossResults:
            batch = _take_examples(batch, data)
            if merged is None:
                batch = shards.spread_over_devices(batch)
            (_, (buffers, metrics)), grads = loss_and_grads(
                replica.params, buffers, batch, key, worker_index
            )
            buffers = require_same("the loss", "buffers", replica.buffers, buffers)
            return LossResults(shards.kept(grads), buffers, metrics)

        if self.accumulate == 1:
            return differentiate(replica.buffers, batch, key)

        has_tables = any(sharded_tables.mark_tables(self.sharded, replica.params))

        def differentiate_microbatch(
            buffers: PyTree, index: Any, microbatch: PyTree
        ) -> LossResults:
            results = differentiate(buffers, microbatch, jax.random.fold_in(key, index))
            # A row's gradient is a mean over the workers, whose weights may differ.
            if WEIGHT in results.metrics and has_tables:
                raise ValueError(
                    f"tables: a loss that returns {WEIGHT!r} needs accumulate=1: rows "
                    "would be weighted by their owner's examples"
                )
            return results

        # Rows are cut here and gathered in the loop, so that one microbatch of resident
        # data is in memory.
        cut = partial(_cut_microbatches, count=self.accumulate, merged=merged)
        microbatches = jax.tree.map(cut, batch)
        return accumulate_gradients(differentiate_microbatch, replica, microbatches)

    def compute_metrics(
        self,
        replica: Replica,
        batch: PyTree,
        key: jax.Array,
        data: PyTree,
        worker_index: Any,
    ) -> dict[str, jax.Array]:
        """Metrics of a local step, from a forward pass of its first microbatch."""
        microbatch = jax.tree.map(lambda x: x[: len(x) // self.accumulate], batch)
        microbatch = _take_examples(microbatch, data)
        loss = normalized_loss(self.loss, self.reported_losses)
        _, (_, metrics) = loss(
            replica.params, replica.buffers, microbatch, key, worker_index
        )
        return metrics

    def optimizer_loss(
        self,
        replica: Replica,
        loss: Any,
        axis: Axis = WORKERS,
        relative_weight: jax.Array | None = None,
    ) -> Any:
        """The loss for the inner optimizer: see `inner_step.optimizer_loss`."""
        return inner_step.optimizer_loss(
            self.strategy, self.optimizer, replica, loss, axis, relative_weight
        )

    def take_inner_step(
        self, replica: Replica, results: LossResults, loss: Any
    ) -> Replica:
        """The replica after the inner optimizer's step, which may use the loss."""
        params, opt_state = inner_step.take_step_with_loss(
            self.optimizer, replica, results.grads, loss
        )
        new_replica = Replica(params, opt_state, results.buffers, replica.loss)
        new_replica = shards.kept(new_replica)
        return require_same("a local step", "replica", replica, new_replica)

    def local_step(
        self,
        worker_state: WorkerState,
        batch: PyTree,
        shared: Shared,
        step: Any,
        worker_index: Any,
    ) -> tuple[WorkerState, PyTree]:
        """Takes a local step without its sync; also returns the metrics."""
        key = _draw_key(shared.key, step, worker_index)
        results = self.compute_gradients(
            worker_state.replica, batch, key, shared.data, worker_index
        )
        worker_loss = results.metrics["loss"]
        replica = seeing(self.strategy, worker_state.replica, worker_loss)
        relative_weight = self.compute_relative_weight(step, worker_index)
        loss = self.optimizer_loss(
            replica, worker_loss, relative_weight=relative_weight
        )
        grads, sync_state = apply_reduce(
            self.strategy, results.grads, replica, worker_state.sync, step
        )
        results = results._replace(grads=grads)
        replica = self.take_inner_step(replica, results, loss)
        metrics = results.metrics
        if relative_weight is not None:
            metrics = widen(metrics)  # a float16 times a weight may overflow
        metrics = times_share(metrics, relative_weight)
        if OF_WORKERS in results.metrics:  # each worker's own loss is not averaged
            metrics = {**metrics, OF_WORKERS: results.metrics[OF_WORKERS]}
        return WorkerState(replica, sync_state), metrics

    def compute_relative_weight(
        self, step: Any, worker_index: Any, of_syncs: bool = False
    ) -> jax.Array | None:
        """A worker's weight in the means of a step's round; None: all weights are 1."""
        weightings = introspection.find_weightings(self.strategy, of_syncs)
        return participation.compute_relative_weight(
            weightings, step, self.workers, worker_index
        )

    def compute_model(self, worker_state: WorkerState, step: Any) -> Replica:
        """The strategy's center with this worker's tables, and the mean of buffers."""
        own_params = worker_state.replica.params
        # The weights of the round that the last local step belongs to.
        last_step = jnp.maximum(step - 1, 0)
        worker_index = collectives.index()
        # At a sync, the params of a worker that makes no local steps count like any.
        sync_weight = self.compute_relative_weight(
            last_step, worker_index, of_syncs=True
        )
        with collectives.counting(sync_weight):
            params = self.strategy.center(own_params, worker_state.sync)
        relative_weight = self.compute_relative_weight(last_step, worker_index)
        buffers = collectives.agreed(
            worker_state.replica.buffers, share=relative_weight
        )
        params = require_same("center", "params", own_params, params)
        # Workers' centers may differ, as in a phase that is not active. Without this
        # mean, one worker's model would be evaluated, without an error.
        params = shards.kept(collectives.agreed(params))
        params = sharded_tables.merge(self.sharded, params, own_params)
        return Replica(params, (), buffers)


def make_first_state(worker: Worker, index: jax.Array, inputs: Inputs) -> WorkerState:
    """Makes the replica and the strategy's state of the worker with this number."""
    model: Model = inputs.shared
    params, buffers = strong((model.params, model.buffers))
    buffers = own_keys("buffers", buffers, index)
    params = sharded_tables.take_own_rows(worker.sharded, params)
    opt_state = worker.optimizer.init(params)
    if worker.has_own_keys:
        opt_state = own_keys("opt_state", opt_state, index)
    check_form("optimizer", opt_state)
    check_clock("optimizer", opt_state, worker.strategy)
    if collectives.size() > 1 and not introspection.reduces(worker.strategy):
        arguments.check_plateau(opt_state)
    replica = strong(Replica(params, opt_state, buffers))
    sync_state = strong(worker.strategy.init(params))
    return shards.kept(WorkerState(replica, sync_state))


def init(worker: Worker, index: jax.Array, inputs: Inputs) -> Outputs:
    """Makes the first state of the worker with this number; checks the strategy."""
    model: Model = inputs.shared
    worker = worker.with_hyperparams(model.hyperparams)
    worker_state = make_first_state(worker, index, inputs)
    # These calls only check the strategy, to refuse it before anything is compiled. The
    # compiler drops their unused results.
    seen_replica = seeing(worker.strategy, worker_state.replica)
    lone_branches.refuse(worker.strategy, seen_replica, worker_state.sync, jnp.int32(0))
    shared = Shared(jnp.int32(0), hyperparams=model.hyperparams)
    center(worker, worker_state, Inputs(shared))
    # Fold in a constant first: strategies fold the step into key(seed) itself, so the
    # loss would otherwise draw from the same keys.
    key = jax.random.fold_in(model.key, 0x6C6F7373)
    return Outputs(worker_state, Shared(jnp.int32(0), key))


def run_steps(worker: Worker, worker_state: WorkerState, inputs: Inputs) -> Outputs:
    """Takes a local step on each batch."""
    shared: Shared = inputs.shared
    worker = worker.with_hyperparams(shared.hyperparams)
    worker_index = collectives.index()

    def local_step(
        carry: tuple[WorkerState, jax.Array], batch: PyTree
    ) -> tuple[tuple[WorkerState, jax.Array], PyTree]:
        worker_state, step = carry
        worker_state, metrics = worker.local_step(
            worker_state, batch, shared, step, worker_index
        )
        replica, sync_state = apply_sync(worker.strategy, *worker_state, step)
        replica, sync_state = shards.kept(WorkerState(replica, sync_state))
        worker_state = WorkerState(replica._replace(loss=()), sync_state)
        metrics = {**metrics, **sync_metrics(sync_state, step)}
        # Averaged over the lanes in each step: over all steps at once, the order of
        # summation, and so the rounding, would depend on the number of steps.
        return (worker_state, step + 1), collectives.mean(metrics, LANES)

    carry = worker_state, shared.step
    (worker_state, step), metrics = scan_steps(local_step, carry, inputs.batches)
    return Outputs(worker_state, (step, collectives.mean(metrics, DEVICES)))


def evaluate(worker: Worker, worker_state: WorkerState, inputs: Inputs) -> Outputs:
    """Runs the center forward on this worker's part of each batch."""
    shared: Shared = inputs.shared
    worker = worker.with_hyperparams(shared.hyperparams)
    worker_index = collectives.index()
    model = worker.compute_model(worker_state, shared.step)
    loss = normalized_loss(worker.eval_loss)

    def evaluate_step(step: jax.Array, batch: PyTree) -> tuple[jax.Array, PyTree]:
        batch = _take_examples(batch, shared.data)
        key = _draw_key(shared.key, step, worker_index)
        _, (_, metrics) = loss(model.params, model.buffers, batch, key, worker_index)
        return step + 1, collectives.mean(metrics, LANES)

    _, metrics = scan_steps(evaluate_step, jnp.int32(0), inputs.batches)
    return Outputs((), collectives.mean(metrics, DEVICES))


def center(worker: Worker, worker_state: WorkerState, inputs: Inputs) -> Outputs:
    """Returns the model to ship, with whole tables, identical on all workers."""
    shared: Shared = inputs.shared
    worker = worker.with_hyperparams(shared.hyperparams)
    model = worker.compute_model(worker_state, shared.step)
    params = sharded_tables.join_rows(worker.sharded, model.params)
    first_worker_buffers = jax.tree.map(_take_first_worker, model.buffers)
    return Outputs((), Replica(params, (), first_worker_buffers))


def divergence(worker: Worker, worker_state: WorkerState, inputs: Inputs) -> Outputs:
    """The root mean square distance of the replicas to their mean."""
    own_params = sharded_tables.list_replicated(
        worker.sharded, worker_state.replica.params
    )
    own_params = widen(own_params)  # bfloat16's 8 bits would round their mean
    # Replicas that are equal bit by bit have a divergence of 0.
    distances = jax.tree.map(jnp.subtract, own_params, collectives.agreed(own_params))
    squared_distance = optax.tree.norm(distances, squared=True)
    return Outputs((), jnp.sqrt(collectives.mean(squared_distance)))


def assess(worker: Worker, worker_state: WorkerState, inputs: Inputs) -> Outputs:
    """The results of `evaluate`, `center` and `divergence`, by one program."""
    metrics = evaluate(worker, worker_state, inputs).common
    model = center(worker, worker_state, inputs).common
    distance = divergence(worker, worker_state, inputs).common
    return Outputs((), (metrics, model, distance))


INIT = Program(init)
RUN = Program(run_steps, takes_steps=True)
EVALUATE = Program(evaluate)
CENTER = Program(center, makes_model=True)
DIVERGENCE = Program(divergence)
ASSESS = Program(assess)


def accumulate_gradients(
    gradients: Callable[[PyTree, Any, PyTree], LossResults],
    replica: Replica,
    parts: PyTree,
) -> LossResults:
    """The mean gradients and metrics over parts of a batch, one after the other.

    Args:
        gradients: (buffers, the part's number, part) -> the gradients of a part. Its
            weight is 1 unless its metrics give another.
        replica: the replica to differentiate at. Each part passes its buffers to the
            next.
        parts: leaves (parts, ...).
    """

    def add_part(
        carry: tuple[PyTree, PyTree], numbered_part: tuple[jax.Array, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], dict[str, jax.Array]]:
        total, buffers = carry
        number, part = numbered_part
        results = gradients(buffers, number, part)
        grads = widen(results.grads)
        if WEIGHT in results.metrics:
            weight = widen(results.metrics[WEIGHT])
            grads = jax.tree.map(lambda x: jnp.where(weight == 0, 0, x * weight), grads)
        total = jax.tree.map(jnp.add, total, grads)
        return (total, results.buffers), results.metrics

    count = len(jax.tree.leaves(parts)[0])
    zero_sums = zeros(replica.params), replica.buffers  # sums are at least float32
    numbered_parts = jnp.arange(count, dtype=jnp.int32), parts
    (total, buffers), metrics = lax.scan(add_part, zero_sums, numbered_parts)
    if WEIGHT not in metrics:
        grads = narrow(jax.tree.map(lambda x: x / count, total), replica.params)
        return LossResults(
            grads, buffers, jax.tree.map(lambda x: jnp.mean(x, 0), metrics)
        )
    weights = widen(metrics[WEIGHT])  # (parts,)
    total_weight = jnp.where(weights.sum() == 0, 1, weights.sum())
    grads = narrow(jax.tree.map(lambda x: x / total_weight, total), replica.params)

    def weigh_mean(x: jax.Array) -> jax.Array:
        part_weights = jnp.expand_dims(weights, tuple(range(1, x.ndim)))  # (parts, 1 …)
        return jnp.where(part_weights == 0, 0, x * part_weights).sum(0) / total_weight

    means = jax.tree.map(weigh_mean, metrics)
    means[WEIGHT] = weights.sum()
    return LossResults(grads, buffers, means)


def scan_steps(
    step_program: Callable[[Any, PyTree], tuple[Any, PyTree]],
    carry: Any,
    batches: PyTree,
) -> tuple[Any, PyTree]:
    """Calls lax.scan over the steps, but takes a single step without a loop."""
    if jax.tree.leaves(batches)[0].shape[0] > 1:
        return lax.scan(step_program, carry, batches)
    # XLA on CPU runs convolutions 10 times slower inside a loop (docs/measured.md).
    carry, metrics = step_program(carry, jax.tree.map(lambda x: x[0], batches))
    return carry, jax.tree.map(lambda x: x[None], metrics)


def _take_first_worker(x: jax.Array) -> jax.Array:
    """The first worker's value of a leaf that has no mean."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if is_key(x):
        return change_key_words(_take_first_worker, x)
    return collectives.gather(x)[0]


def _draw_key(key: jax.Array, step: Any, worker_index: Any) -> jax.Array:
    """Returns a worker's key for a step."""
    return jax.random.fold_in(jax.random.fold_in(key, step), worker_index)


def _take_examples(batch: PyTree, data: PyTree) -> PyTree:
    """Returns the batch, or the rows of data that it names."""
    return batch if data is None else jax.tree.map(lambda x: x[batch], data)


def _cut_microbatches(x: jax.Array, count: int, merged: int | None) -> jax.Array:
    """Cuts a batch into microbatches, each with a part of every merged batch."""
    if merged is None:
        return x.reshape(count, len(x) // count, *x.shape[1:])  # (count, batch, …)
    x = x.reshape(merged, count, x.shape[1] // count, *x.shape[2:])
    return x.swapaxes(0, 1)  # (count, merged, batch, …)
