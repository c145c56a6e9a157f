"""A problem whose workers draw, and keep buffers to themselves: keys among them."""

import jax
import numpy as np
import optax

import syncalgos
from support import problems
from syncalgos import DataParallel, Placement


def loss(params, buffers, batch, key):
    """With dropout, statistics, a counter and a chain of the worker's own keys."""
    x, target, of_examples = batch
    worker_key = jax.random.fold_in(buffers["key"], jax.random.bits(key))
    mask = jax.random.bernoulli(key, 0.8, x.shape)
    target = target + 0.01 * jax.random.normal(worker_key, target.shape)
    target = target + 0.01 * jax.vmap(jax.random.normal)(of_examples)
    buffers = {
        "count": buffers["count"] + len(x),
        "key": worker_key,
        "mean": 0.9 * buffers["mean"] + 0.1 * x.mean(0),
    }
    metrics = {"kept": mask.sum(), "mean": x.mean(0)}
    return problems.loss(params, (mask * x / 0.8, target)), (buffers, metrics)


def calm_loss(params, buffers, batch, key):
    x, target, _ = batch
    return problems.loss(params, (x - buffers["mean"], target)), (buffers, {})


def make_trainer(backend, workers, devices, strategy=None):
    """One that draws, keeps buffers, and accumulates microbatches."""
    return DataParallel(
        loss,
        optax.adam(0.01),
        syncalgos.bmuf(2) if strategy is None else strategy,
        workers=workers,
        backend=backend,
        eval_loss=calm_loss,
        accumulate=2,
        placement=Placement(devices=devices),
    )


def start(trainer):
    buffers = {"count": np.int32(0), "key": jax.random.key(9), "mean": np.zeros(3)}
    return trainer.init(problems.initial_params(), buffers, seed=7)


def make_batches(steps=8, global_batch=48):
    keys = jax.random.split(jax.random.key(11), (steps, global_batch))
    return *problems.make_batches(steps, global_batch), keys
