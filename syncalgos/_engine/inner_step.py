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
from syncalgos._engine.placement.shardings import of_state
from syncalgos._engine.state import of_one
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


def stepped(
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
    share: jax.Array | None = None,
) -> jax.Array:
    """The loss that the optimizer gets.

    It is the mean over the workers if the strategy may reduce gradients and the
    optimizer uses the loss. Otherwise it is the worker's own, and nothing is sent.
    """
    loss = jnp.asarray(loss, loss_dtype(replica.params))
    # The worker's own loss would be wrong under sync_sgd: workers would cut their
    # learning rates at different steps, and replicas would drift apart. The mean would
    # be sent at each local step, which local-update algorithms are meant to avoid.
    if introspection.reduces(strategy) and asks(optimizer, replica, loss):
        return collectives.mean(loss, axis, share)
    return loss


def asks(optimizer: optax.GradientTransformation, replica: Replica, loss: Any) -> bool:
    """Whether the optimizer uses or keeps the loss, found by tracing a step.

    Args:
        optimizer: the inner optimizer.
        replica: one worker's replica, arrays or their shapes.
        loss: any scalar array of the loss's dtype.
    """

    def step(loss, replica):
        return stepped(optimizer, replica, replica.params, loss)

    # The signature is not enough: optax's chains, muon and apply_if_finite accept all
    # extra arguments, and ignore the loss.
    given = loss, replica._replace(buffers=())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    return reads(jax.make_jaxpr(step)(*shapes).jaxpr, 0)


@contextmanager
def sending(replica: Replica, layout: Layout) -> Iterator[Replica]:
    """Yields the shapes that each device sends to its peers of the other workers.

    Args:
        replica: the replicas of all workers; leaves lead with (places, lanes).
        layout: the place of each worker.
    """
    one, sharding = of_one(replica), of_state(replica.params, layout)
    shards = sharding and sharding._replace(are_shards=True)
    with known(shards):
        yield shards.shard_of(one) if shards else one


def with_optimizer(
    optimizer: optax.GradientTransformation, strategy: Strategy
) -> Strategy:
    """Returns the strategy for the ledger, with what the inner optimizer sends."""

    def reduce(grads, replica, state, step):
        loss = optimizer_loss(strategy, optimizer, replica, jnp.float32(0))
        stepped(optimizer, replica, grads, loss)
        return strategy.reduce(grads, replica, state, step)

    return strategy._replace(reduce=reduce)
