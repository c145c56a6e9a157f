"""What one worker does: its view of the engine's programs.

Each program is (own, shared, batches) -> (own, common): `own` is this worker's, and
`shared` and `common` are the same on all. `syncalgos.engine.lanes.execution` and
`syncalgos.engine.backends` map it over them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.combinators import decided
from syncalgos.dtypes import narrow, widen
from syncalgos.engine import arguments, inner_step, sharded_tables
from syncalgos.engine.losses import Loss, told
from syncalgos.keys import own_keys
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    require_same,
    strong,
)

DEVICES, LANES = WORKERS


class Worker(NamedTuple):
    """One worker's programs.

    Attributes:
        loss: of training.
        eval_loss: of evaluation.
        optimizer: the inner optimizer.
        strategy: for the params that are not sharded.
        accumulate: microbatches of which a step's gradients are the mean.
        sharded: a mask of the params of which each worker holds its rows; None is none.
        each: where metrics tell the loss of each of the workers, their number; else 0.
    """

    loss: Loss
    eval_loss: Loss
    optimizer: optax.GradientTransformation
    strategy: Strategy
    accumulate: int = 1
    sharded: PyTree = None
    each: int = 0

    def init(self, own, shared, batches):
        """Makes the replica and the strategy's state from one plain model."""
        params, buffers, key = shared
        params, buffers = strong((params, buffers))
        buffers = own_keys(buffers, own)
        params = sharded_tables.parts_of(self.sharded, params)
        opt_state = self.optimizer.init(params)
        arguments.check_opt_state(opt_state)
        replica = strong(Replica(params, opt_state, buffers))
        sync = strong(self.strategy.init(params))
        # Traced for its checks alone; the compiler drops what nothing uses.
        apply_reduce(self.strategy, params, replica, sync, jnp.int32(0))
        apply_sync(self.strategy, replica, sync, jnp.int32(0))
        self.center((replica, sync), (), ())
        return (replica, sync), (jnp.int32(0), key)

    def run(self, own, shared, batches):
        """Takes a local step on each batch."""
        (replica, sync), (first, key, data) = own, shared
        me = collectives.index()

        def local_step(carry, batch):
            replica, sync, step = carry
            grads, buffers, metrics = self.gradients(
                replica, batch, _draw(key, step, me), data, me
            )
            loss = self.told_loss(replica, metrics["loss"])
            grads, sync = apply_reduce(self.strategy, grads, replica, sync, step)
            stepped = self.updated(replica, grads, buffers, loss)
            replica, sync = apply_sync(self.strategy, stepped, sync, step)
            # Over lanes here: over all steps at once a sum would depend on how many.
            metrics = {**metrics, **decided.noted(sync, step)}
            return (replica, sync, step + 1), collectives.mean(metrics, LANES)

        carry, metrics = over_steps(local_step, (replica, sync, first), batches)
        replica, sync, step = carry
        return (replica, sync), (step, collectives.mean(metrics, DEVICES))

    def alone(self, replica, batch, key, step, me, data):
        """A local step of a strategy that keeps gradients: (replica, metrics)."""
        key = _draw(key, step, me)
        grads, buffers, metrics = self.gradients(replica, batch, key, data, me)
        loss = self.told_loss(replica, metrics["loss"])
        return self.updated(replica, grads, buffers, loss), metrics

    def metrics(self, replica, batch, key, me, data):
        """Those of a local step, from a forward pass of its first microbatch."""
        first = jax.tree.map(lambda x: x[: len(x) // self.accumulate], batch)
        return told(self.loss, self.each)(
            replica.params, replica.buffers, _take(first, data), key, me
        )[1][1]

    def told_loss(self, replica, loss, axis=WORKERS):
        """The loss that the inner optimizer is told: see `inner.told_loss`."""
        return inner_step.told_loss(self.strategy, self.optimizer, replica, loss, axis)

    def updated(self, replica, grads, buffers, loss):
        """The replica after the inner optimizer's step, which may look at the loss."""
        stepped = inner_step.stepped(self.optimizer, replica, grads, loss)
        stepped = Replica(*stepped, buffers)
        return require_same("a local step", "replica", replica, stepped)

    def gradients(self, replica, batch, key, data, me, joined=None):
        """Of the loss: (gradients, buffers, metrics), over all microbatches.

        With several batches `joined`, leaves of batch lead with (joined, batch), and
        `me` is the number of the first of their workers.
        """
        grad = jax.value_and_grad(told(self.loss, self.each, joined), has_aux=True)

        def of(buffers, batch, key):
            (_, (buffers, metrics)), grads = grad(
                replica.params, buffers, _take(batch, data), key, me
            )
            return grads, buffers, metrics

        if self.accumulate == 1:
            return of(replica.buffers, batch, key)

        def microbatch(carry, numbered):
            (total, buffers), (number, part) = carry, numbered
            grads, new, metrics = of(buffers, part, jax.random.fold_in(key, number))
            new = require_same("a microbatch", "buffers", buffers, new)
            return (jax.tree.map(jnp.add, total, widen(grads)), new), metrics

        k = self.accumulate

        def cut(x):  # each microbatch holds its part of every joined batch
            if joined is None:
                return x.reshape(k, len(x) // k, *x.shape[1:])
            each = x.shape[1] // k
            return x.reshape(joined, k, each, *x.shape[2:]).swapaxes(0, 1)

        parts = jax.tree.map(cut, batch)
        none = jax.tree.map(jnp.zeros_like, widen(replica.params))
        (total, buffers), metrics = lax.scan(
            microbatch, (none, replica.buffers), (jnp.arange(k), parts)
        )
        grads = narrow(jax.tree.map(lambda x: x / k, total), replica.params)
        return grads, buffers, jax.tree.map(lambda x: jnp.mean(x, 0), metrics)

    def evaluate(self, own, shared, batches):
        """Runs the center forward on this worker's part of each batch."""
        key, data = shared
        center, me = self.model(own), collectives.index()

        def forward(step, batch):
            _, (_, metrics) = told(self.eval_loss)(
                center.params,
                center.buffers,
                _take(batch, data),
                _draw(key, step, me),
                me,
            )
            return step + 1, collectives.mean(metrics, LANES)

        _, metrics = over_steps(forward, jnp.int32(0), batches)
        return (), collectives.mean(metrics, DEVICES)

    def center(self, own, shared, batches):
        """The model to ship: `model`, its tables whole, and the same on all workers."""
        params, _, buffers = self.model(own)
        params = sharded_tables.whole(self.sharded, params)
        return (), Replica(params, (), jax.tree.map(_of_first, buffers))

    def model(self, own):
        """The strategy's center with this worker's tables, and the mean of buffers."""
        replica, sync = own
        params = self.strategy.center(replica.params, sync)
        params = require_same("center", "params", replica.params, params)
        params = collectives.agreed(params)
        params = sharded_tables.merge(self.sharded, params, replica.params)
        return Replica(params, (), collectives.mean(replica.buffers))

    def divergence(self, own, shared, batches):
        """The root mean square distance of the replicas to their mean."""
        own = widen(
            sharded_tables.replicated(self.sharded, own)
        )  # 8 bits round their mean
        apart = jax.tree.map(jnp.subtract, own, collectives.mean(own))
        return (), jnp.sqrt(collectives.mean(optax.tree.norm(apart, squared=True)))


def _of_first(x):
    """The first worker's, of what has no mean."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raw = _of_first(jax.random.key_data(x))
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
    return collectives.gather(x)[0]


def _draw(key, step, me):
    """A worker's key of a step."""
    return jax.random.fold_in(jax.random.fold_in(key, step), me)


def _take(batch, data):
    """A batch, or the rows of the data that it names."""
    return batch if data is None else jax.tree.map(lambda x: x[batch], data)


def over_steps(step_program, carry, batches):
    """lax.scan over the steps; a single one without a loop.

    XLA on CPU runs convolutions about 10 times slower inside a loop (docs/design.md).
    """
    if jax.tree.leaves(batches)[0].shape[0] > 1:
        return lax.scan(step_program, carry, batches)
    carry, metrics = step_program(carry, jax.tree.map(lambda x: x[0], batches))
    return carry, jax.tree.map(lambda x: x[None], metrics)
