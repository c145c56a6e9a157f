"""One worker's view of the engine's programs.

`lanes/execution.py` and `placement/backends.py` map them over all workers.
"""

from collections.abc import Callable
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
from syncalgos._engine.placement.layout import DEVICES, LANES, on_words
from syncalgos._engine.program import Inputs, Model, Outputs, Own, Program, Shared
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


class Found(NamedTuple):
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
        each: the number of workers if metrics hold the loss of each worker, else 0.
        workers: the number of workers.
        make: hyperparameters -> the optimizer and the strategy with these numbers. The
            optimizer and strategy above are made with the `hyperparams` below.
        hyperparams: Python numbers.
        own_keys: whether each worker's optimizer draws from its own random keys.
    """

    loss: Loss
    eval_loss: Loss
    optimizer: optax.GradientTransformation
    strategy: Strategy
    accumulate: int
    sharded: PyTree
    each: int
    workers: int
    make: Make
    hyperparams: PyTree
    own_keys: bool = False

    def at(self, hyperparams: PyTree) -> "Worker":
        """The same worker with other numbers, such as the arguments of a program."""
        optimizer, strategy = self.make(weak_floats(hyperparams))
        return self._replace(optimizer=optimizer, strategy=strategy)

    def gradients(
        self,
        replica: Replica,
        batch: PyTree,
        key: jax.Array,
        data: PyTree,
        me: Any,
        merged: int | None = None,
    ) -> Found:
        """Returns the loss's gradients, buffers and metrics, over all microbatches.

        With several batches `merged`, leaves of batch lead with (merged, batch), and
        `me` is the number of the first of their workers.
        """
        loss = normalized_loss(self.loss, self.each, merged)
        grad = jax.value_and_grad(loss, has_aux=True)

        def found(buffers, batch, key):
            batch = _take(batch, data)
            batch = shards.spread(batch) if merged is None else batch
            given = replica.params, buffers, batch, key, me
            (_, (buffers, metrics)), grads = grad(*given)
            buffers = require_same("the loss", "buffers", replica.buffers, buffers)
            return Found(shards.kept(grads), buffers, metrics)

        if self.accumulate == 1:
            return found(replica.buffers, batch, key)

        def microbatch(buffers, number, part):
            of_part = found(buffers, part, jax.random.fold_in(key, number))
            # A row's gradient is a mean over the workers, whose weights may differ.
            if WEIGHT in of_part.metrics and any(
                sharded_tables.flags(self.sharded, replica.params)
            ):
                raise ValueError(
                    f"tables: a loss that returns {WEIGHT!r} needs accumulate=1: rows "
                    "would be weighted by their owner's examples"
                )
            return of_part

        # Rows are cut here and gathered in the loop, so that one microbatch of resident
        # data is in memory.
        parts = jax.tree.map(lambda x: _microbatches(x, self.accumulate, merged), batch)
        return accumulated(microbatch, replica, parts)

    def metrics(
        self, replica: Replica, batch: PyTree, key: jax.Array, data: PyTree, me: Any
    ) -> dict[str, jax.Array]:
        """Metrics of a local step, from a forward pass of its first microbatch."""
        first = jax.tree.map(lambda x: x[: len(x) // self.accumulate], batch)
        return normalized_loss(self.loss, self.each)(
            replica.params, replica.buffers, _take(first, data), key, me
        )[1][1]

    def optimizer_loss(
        self,
        replica: Replica,
        loss: Any,
        axis: Axis = WORKERS,
        share: jax.Array | None = None,
    ) -> Any:
        """The loss for the inner optimizer: see `inner_step.optimizer_loss`."""
        return inner_step.optimizer_loss(
            self.strategy, self.optimizer, replica, loss, axis, share
        )

    def updated(self, replica: Replica, found: Found, loss: Any) -> Replica:
        """The replica after the inner optimizer's step, which may use the loss."""
        stepped = inner_step.stepped(self.optimizer, replica, found.grads, loss)
        stepped = shards.kept(Replica(*stepped, found.buffers, replica.loss))
        return require_same("a local step", "replica", replica, stepped)

    def local_step(
        self, own: Own, batch: PyTree, shared: Shared, step: Any, me: Any
    ) -> tuple[Own, PyTree]:
        """Takes a local step without its sync; also returns the metrics."""
        key = _draw(shared.key, step, me)
        found = self.gradients(own.replica, batch, key, shared.data, me)
        seen = seeing(self.strategy, own.replica, found.metrics["loss"])
        own = own._replace(replica=seen)
        share = self.share(step, me)
        loss = self.optimizer_loss(own.replica, found.metrics["loss"], share=share)
        grads, sync = apply_reduce(self.strategy, found.grads, *own, step)
        found = found._replace(grads=grads)
        own = Own(self.updated(own.replica, found, loss), sync)
        # A float16 times a share may overflow, before the mean.
        metrics = found.metrics if share is None else widen(found.metrics)
        metrics = times_share(metrics, share)
        # Each worker's own loss is not averaged.
        each = {k: x for k, x in found.metrics.items() if k == OF_WORKERS}
        return own, metrics | each

    def share(self, step: Any, me: Any, of_syncs: bool = False) -> jax.Array | None:
        """A worker's weight in the means of a step's round; None: all weights are 1."""
        rounds = introspection.rounds(self.strategy, of_syncs)
        return participation.share_in(rounds, step, self.workers, me)

    def model(self, own: Own, step: Any) -> Replica:
        """The strategy's center with this worker's tables, and the mean of buffers."""
        mine = own.replica.params
        # The weights of the round that the last local step belongs to.
        last, me = jnp.maximum(step - 1, 0), collectives.index()
        # At a sync, the params of a worker that makes no local steps count like any.
        with collectives.counting(self.share(last, me, of_syncs=True)):
            params = self.strategy.center(mine, own.sync)
        buffers = collectives.agreed(own.replica.buffers, share=self.share(last, me))
        params = require_same("center", "params", mine, params)
        # Workers' centers may differ, as in a phase that is not active. Without this
        # mean, one worker's model would be evaluated, without an error.
        params = shards.kept(collectives.agreed(params))
        params = sharded_tables.merge(self.sharded, params, mine)
        return Replica(params, (), buffers)


def first_own(worker: Worker, number: jax.Array, inputs: Inputs) -> Own:
    """Makes the replica and the strategy's state of the worker with this number."""
    model: Model = inputs.shared
    params, buffers = strong((model.params, model.buffers))
    buffers = own_keys("buffers", buffers, number)
    params = sharded_tables.parts_of(worker.sharded, params)
    opt_state = worker.optimizer.init(params)
    if worker.own_keys:
        opt_state = own_keys("opt_state", opt_state, number)
    check_form("optimizer", opt_state)
    check_clock("optimizer", opt_state, worker.strategy)
    if collectives.size() > 1 and not introspection.reduces(worker.strategy):
        arguments.check_plateau(opt_state)
    replica = strong(Replica(params, opt_state, buffers))
    return shards.kept(Own(replica, strong(worker.strategy.init(params))))


def init(worker: Worker, number: jax.Array, inputs: Inputs) -> Outputs:
    """Makes the first state of the worker with this number; checks the strategy."""
    model: Model = inputs.shared
    worker = worker.at(model.hyperparams)
    own = first_own(worker, number, inputs)
    # These calls only check the strategy, to refuse it before anything is compiled. The
    # compiler drops their unused results.
    seen = seeing(worker.strategy, own.replica)
    lone_branches.refuse(worker.strategy, seen, own.sync, jnp.int32(0))
    center(worker, own, Inputs(Shared(jnp.int32(0), hyperparams=model.hyperparams)))
    # Fold in a constant first: strategies fold the step into key(seed) itself, so the
    # loss would otherwise draw from the same keys.
    key = jax.random.fold_in(model.key, 0x6C6F7373)
    return Outputs(own, Shared(jnp.int32(0), key))


def run(worker: Worker, own: Own, inputs: Inputs) -> Outputs:
    """Takes a local step on each batch."""
    shared: Shared = inputs.shared
    worker, me = worker.at(shared.hyperparams), collectives.index()

    def local_step(carry, batch):
        own, step = carry
        own, metrics = worker.local_step(own, batch, shared, step, me)
        own = shards.kept(Own(*apply_sync(worker.strategy, *own, step)))
        own = own._replace(replica=own.replica._replace(loss=()))
        metrics = {**metrics, **sync_metrics(own.sync, step)}
        # Averaged over the lanes in each step: over all steps at once, the order of
        # summation, and so the rounding, would depend on the number of steps.
        return (own, step + 1), collectives.mean(metrics, LANES)

    (own, step), metrics = over_steps(local_step, (own, shared.step), inputs.batches)
    return Outputs(own, (step, collectives.mean(metrics, DEVICES)))


def evaluate(worker: Worker, own: Own, inputs: Inputs) -> Outputs:
    """Runs the center forward on this worker's part of each batch."""
    shared: Shared = inputs.shared
    worker, me = worker.at(shared.hyperparams), collectives.index()
    model = worker.model(own, shared.step)
    loss = normalized_loss(worker.eval_loss)

    def forward(step, batch):
        batch, key = _take(batch, shared.data), _draw(shared.key, step, me)
        _, (_, metrics) = loss(model.params, model.buffers, batch, key, me)
        return step + 1, collectives.mean(metrics, LANES)

    _, metrics = over_steps(forward, jnp.int32(0), inputs.batches)
    return Outputs((), collectives.mean(metrics, DEVICES))


def center(worker: Worker, own: Own, inputs: Inputs) -> Outputs:
    """Returns the model to ship, with whole tables, identical on all workers."""
    shared: Shared = inputs.shared
    model = worker.at(shared.hyperparams).model(own, shared.step)
    params = sharded_tables.whole(worker.sharded, model.params)
    return Outputs((), Replica(params, (), jax.tree.map(_of_first, model.buffers)))


def divergence(worker: Worker, own: Own, inputs: Inputs) -> Outputs:
    """The root mean square distance of the replicas to their mean."""
    mine = sharded_tables.replicated(worker.sharded, own.replica.params)
    mine = widen(mine)  # bfloat16's 8 bits would round their mean
    # Replicas that are equal bit by bit have a divergence of 0.
    apart = jax.tree.map(jnp.subtract, mine, collectives.agreed(mine))
    return Outputs((), jnp.sqrt(collectives.mean(optax.tree.norm(apart, squared=True))))


def assess(worker: Worker, own: Own, inputs: Inputs) -> Outputs:
    """The results of `evaluate`, `center` and `divergence`, by one program."""
    programs = evaluate, center, divergence
    return Outputs((), tuple(x(worker, own, inputs).common for x in programs))


INIT = Program(init)
RUN = Program(run, takes_steps=True)
EVALUATE = Program(evaluate)
CENTER = Program(center, makes_model=True)
DIVERGENCE = Program(divergence)
ASSESS = Program(assess)


def accumulated(
    gradients: Callable[[PyTree, Any, PyTree], Found], replica: Replica, parts: PyTree
) -> Found:
    """The mean gradients and metrics over parts of a batch, one after the other.

    Args:
        gradients: (buffers, the part's number, part) -> the gradients of a part. Its
            weight is 1 unless its metrics give another.
        replica: the replica to differentiate at. Each part passes its buffers to the
            next.
        parts: leaves (parts, ...).
    """

    def add(carry, numbered):
        total, buffers = carry
        found = gradients(buffers, *numbered)
        grads = widen(found.grads)
        if WEIGHT in found.metrics:
            weight = widen(found.metrics[WEIGHT])
            grads = jax.tree.map(lambda x: jnp.where(weight == 0, 0, x * weight), grads)
        total = jax.tree.map(jnp.add, total, grads)
        return (total, found.buffers), found.metrics

    count = len(jax.tree.leaves(parts)[0])
    none = zeros(replica.params), replica.buffers  # sums are at least float32
    numbered = jnp.arange(count, dtype=jnp.int32), parts
    (total, buffers), metrics = lax.scan(add, none, numbered)
    if WEIGHT not in metrics:
        grads = narrow(jax.tree.map(lambda x: x / count, total), replica.params)
        return Found(grads, buffers, jax.tree.map(lambda x: jnp.mean(x, 0), metrics))
    weights = widen(metrics[WEIGHT])
    whole = jnp.where(weights.sum() == 0, 1, weights.sum())
    grads = narrow(jax.tree.map(lambda x: x / whole, total), replica.params)

    def mean(x):
        each = jnp.expand_dims(weights, tuple(range(1, x.ndim)))
        return jnp.where(each == 0, 0, x * each).sum(0) / whole

    return Found(grads, buffers, {**jax.tree.map(mean, metrics), WEIGHT: weights.sum()})


def over_steps(
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


def _of_first(x):
    """The first worker's value of a leaf that has no mean."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if is_key(x):
        return on_words(_of_first, x)
    return collectives.gather(x)[0]


def _draw(key, step, me):
    """Returns a worker's key for a step."""
    return jax.random.fold_in(jax.random.fold_in(key, step), me)


def _take(batch, data):
    """Returns the batch, or the rows of data that it names."""
    return batch if data is None else jax.tree.map(lambda x: x[batch], data)


def _microbatches(x, count, merged):
    """Cuts a batch into microbatches, each with a part of every merged batch."""
    if merged is None:
        return x.reshape(count, len(x) // count, *x.shape[1:])
    return x.reshape(merged, count, x.shape[1] // count, *x.shape[2:]).swapaxes(0, 1)
