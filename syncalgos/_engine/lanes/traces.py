"""Traces of one worker's programs: jaxprs that are never run."""

from typing import Any, NamedTuple

import jax

from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import Inputs, WorkerState
from syncalgos._engine.state import drop_worker_axes
from syncalgos._engine.worker import Worker
from syncalgos.strategy import PyTree, Replica


class LossArguments(NamedTuple):
    """One worker's arguments of a local step, as shapes.

    Attributes:
        key: the key of the state.
        replica: the worker's replica.
        batch: the worker's part of a step's batch.
        data: the data on the devices.
    """

    key: Any
    replica: Replica
    batch: PyTree
    data: PyTree


def make_loss_arguments(worker_state: WorkerState, inputs: Inputs) -> LossArguments:
    """Returns one worker's arguments of a step."""
    shared = inputs.shared
    key = jax.eval_shape(lambda x: x, shared.key)
    replica = drop_worker_axes(worker_state.replica)
    # Batches are (steps, places, lanes, batch, …).
    batch = drop_worker_axes(inputs.batches, axes=3)  # (batch, …)
    return LossArguments(key, replica, batch, shared.data)


def trace_loss(worker: Worker, layout: Layout, loss_arguments: LossArguments) -> Any:
    """Returns the jaxpr of the loss of a step's first microbatch."""

    def program(x: LossArguments) -> jax.Array:
        return worker.compute_metrics(x.replica, x.batch, x.key, x.data, 0)["loss"]

    with layout.inside():
        return layout.trace(program, loss_arguments)[0].jaxpr


def trace_losses(
    worker: Worker, layout: Layout, loss_arguments: LossArguments
) -> tuple[Any, Any]:
    """Traces the loss of one microbatch, and of all lanes' microbatches as one batch.

    Returns:
        Both jaxprs.
    """
    one_batch_worker = worker._replace(accumulate=1)

    def trace_batches(count: int) -> Any:
        def resize(x: Any) -> jax.ShapeDtypeStruct:
            size = count * x.shape[0] // worker.accumulate
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)

        batch = jax.tree.map(resize, loss_arguments.batch)
        arguments = loss_arguments._replace(batch=batch)
        return trace_loss(one_batch_worker, layout, arguments)

    return trace_batches(1), trace_batches(layout.lanes)
