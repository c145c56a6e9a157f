"""Batch statistics of equinox over the whole batch, whatever the number of workers.

`eqx.nn.BatchNorm` takes one example, so its axes are that of `jax.vmap` over the
examples and those of the workers: ("batch", *WORKERS). With "batch" alone, statistics
are those of a worker's part of the batch; WORKERS alone leaves out its other examples.
"""

import equinox as eqx
import jax
import numpy as np
import optax

import syncalgos
from syncalgos import WORKERS


class Network(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, ("batch", *WORKERS), mode="batch")
        self.out = eqx.nn.Linear(3, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


def loss(params, buffers, batch, key):
    model = eqx.combine(params, static)
    axes = (0, None)  # of an example and of the state, which all examples share
    apply = jax.vmap(model, in_axes=axes, out_axes=axes, axis_name="batch")
    outputs, buffers = apply(batch, buffers)
    return ((outputs - batch.sum(1, keepdims=True)) ** 2).mean(), (buffers, {})


model, buffers = eqx.nn.make_with_state(Network)(jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)
batches = np.random.default_rng(0).normal(3, size=(200, 32, 3)).astype(np.float32)
for workers in 1, 4:
    trainer = syncalgos.DataParallel(
        loss, optax.sgd(0.1), syncalgos.sync_sgd(), workers=workers
    )
    state, metrics = trainer.run(trainer.init(params, buffers), batches)
    center = trainer.center(state)
    means, _ = center.buffers.get(model.norm.batch_state_index)
    print(f"{workers} workers: {metrics['loss'][-1]:.3f}", np.round(means, 2))
