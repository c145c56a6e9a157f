"""Traces of one worker's programs: jaxprs that are never run."""

from typing import Any, NamedTuple

import jax

from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import Inputs, Own
from syncalgos._engine.state import of_one
from syncalgos._engine.worker import Worker
from syncalgos.strategy import PyTree, Replica


class One(NamedTuple):
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


def of_one_worker(own: Own, inputs: Inputs) -> One:
    """Returns one worker's arguments of a step."""
    shared = inputs.shared
    key = jax.eval_shape(lambda x: x, shared.key)
    batch = of_one(inputs.batches, axes=3)  # of (steps, places, lanes, batch, ...)
    return One(key, of_one(own.replica), batch, shared.data)


def loss(worker: Worker, layout: Layout, one: One) -> Any:
    """Returns the jaxpr of the loss of a step's first microbatch in `one`."""

    def program(x: One) -> jax.Array:
        return worker.metrics(x.replica, x.batch, x.key, x.data, 0)["loss"]

    with layout.inside():
        return layout.traced(program, one)[0].jaxpr


def losses(worker: Worker, layout: Layout, one: One) -> tuple[Any, Any]:
    """Traces the loss of one microbatch, and of all lanes' microbatches as one batch.

    Returns:
        Both jaxprs.
    """

    whole = worker._replace(accumulate=1)

    def of_batches(count: int) -> Any:
        def cut(x):
            size = count * x.shape[0] // worker.accumulate
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)

        return loss(whole, layout, one._replace(batch=jax.tree.map(cut, one.batch)))

    return of_batches(1), of_batches(layout.lanes)
