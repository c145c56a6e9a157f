"""The inner optimizer's step, and the loss for optimizers that ask for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from syncalgos import collectives
from syncalgos._combinators import introspection
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.placement.shardings import read_sharding
from syncalgos._engine.state import drop_worker_axes
from syncalgos._jaxprs import reads
from syncalgos.reducers._stacking.shards import known
from syncalgos.strategy import (
    WORKERS,
    Axis,
    PyTree,
    Replica,
    Strategy,
    loss_dtype,
    take_step,
)


def take_step_with_loss(
    optimizer: optax.GradientTransformation,
    replica: Replica,
    grads: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns (params, opt_state) after a step along the gradients.

    An optimizer with extra arguments gets the loss as `value`, as optax names it.
    """
    return take_step(
        "the optimizer",
        optimizer,
        grads,
        replica.opt_state,
        replica.params,
        value=loss,
    )


def optimizer_loss(
    strategy: Strategy,
    optimizer: optax.GradientTransformation,
    replica: Replica,
    loss: jax.Array,
    axis: Axis = WORKERS,
    relative_weight: jax.Array | None = None,
) -> jax.Array:
    """The loss that the optimizer gets.

    It is the mean over the workers if the strategy may reduce gradients and the
    optimizer uses the loss. Otherwise it is the worker's own, and nothing is sent.
    """
    loss = jnp.asarray(loss, loss_dtype(replica.params))
    # The worker's own loss would be wrong under sync_sgd: workers would cut their
    # learning rates at different steps, and replicas would drift apart. The mean would
    # be sent at each local step, which local-update algorithms are meant to avoid.
    if introspection.reduces(strategy) and uses_loss(optimizer, replica, loss):
        return collectives.mean(loss, axis, relative_weight)
    return loss


def uses_loss(
    optimizer: optax.GradientTransformation, replica: Replica, loss: Any
) -> bool:
    """Whether the optimizer uses or keeps the loss, found by tracing a step.

    Args:
        optimizer: the inner optimizer.
        replica: one worker's replica, arrays or their shapes.
        loss: any scalar array of the loss's dtype.
    """

    def step(loss: jax.Array, replica: Replica) -> tuple[PyTree, PyTree]:
        return take_step_with_loss(optimizer, replica, replica.params, loss)

    # The signature is not enough: optax's chains, muon and apply_if_finite accept all
    # extra arguments, and ignore the loss.
    arguments = loss, replica._replace(buffers=())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return reads(jax.make_jaxpr(step)(*shapes).jaxpr, 0)


@contextmanager
def use_sent_shapes(replica: Replica, layout: Layout) -> Iterator[Replica]:
    """Yields the shapes that each device sends to its peers of the other workers.

    Args:
        replica: the replicas of all workers; leaves lead with (places, lanes).
        layout: the place of each worker.
    """
    worker_shapes = drop_worker_axes(replica)
    sharding = read_sharding(replica.params, layout)
    if sharding is None:
        with known(None):
            yield worker_shapes
        return
    sharding = sharding._replace(are_shards=True)
    with known(sharding):
        yield sharding.shard_of(worker_shapes)


def with_optimizer(
    optimizer: optax.GradientTransformation, strategy: Strategy
) -> Strategy:
    """Returns the strategy for the ledger, with what the inner optimizer sends."""

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        loss = optimizer_loss(strategy, optimizer, replica, jnp.float32(0))
        take_step_with_loss(optimizer, replica, grads, loss)
        return strategy.reduce(grads, replica, state, step)

    return strategy._replace(reduce=reduce)
