"""The acceptance test of Caffe2's data_parallel_model.

A fully connected layer 16 → 1, a sigmoid, the squared loss, a batch of 64, 10 steps:
the same parameters for any number of workers, on any devices in any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos

STEPS = 10
LR = 0.1
MOMENTUM = 0.9
WEIGHT_DECAY = 0.01

# Float32 rounds params near 1 by 6e-8: the order of the sums over workers costs that
# much of a gradient, and 10 steps add up to less than ten times as much. A sum in place
# of a mean, or decay at a wrong scale, shows at 1e-3 and above.
TOLERANCE = 5e-7


def make_batches(global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Caffe2's data: uniform inputs, labelled by their first column, rounded."""
    x = np.random.default_rng(2603).random((STEPS, global_batch, 16), np.float32)
    return x, np.round(x[..., 0])


def make_params() -> dict[str, np.ndarray]:
    weight = np.random.default_rng(1).normal(size=16) / 4
    return {"weight": weight.astype(np.float32), "bias": np.zeros((), np.float32)}


@syncalgos.stateless
def squared_loss(params: Any, batch: Any) -> jax.Array:
    x, label = batch
    output = jax.nn.sigmoid(x @ params["weight"] + params["bias"])
    return jnp.mean((output - label) ** 2) / 2


OPTIMIZER = optax.chain(
    optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(LR, momentum=MOMENTUM)
)


def train_in_numpy(global_batch: int) -> dict[str, np.ndarray]:
    """The same training in float64 NumPy, with the gradient by hand."""
    params = {name: x.astype(float) for name, x in make_params().items()}
    velocity = {"weight": np.zeros(16), "bias": 0.0}
    for x, label in zip(*make_batches(global_batch), strict=True):
        output = 1 / (1 + np.exp(-(x @ params["weight"] + params["bias"])))
        error = (output - label) * output * (1 - output) / global_batch
        grads = {"weight": error @ x, "bias": error.sum()}
        for name, grad in grads.items():
            velocity[name] *= MOMENTUM
            velocity[name] += grad + WEIGHT_DECAY * params[name]
            params[name] = params[name] - LR * velocity[name]
    return params


PLACEMENTS = (16, "auto", None), (6, "pmap", [2, 0]), (6, "shard_map", [1, 2])


@pytest.mark.parametrize(("workers", "backend", "devices"), PLACEMENTS, ids=str)
def test_params_are_the_same_for_any_workers_on_any_devices(workers, backend, devices):
    batch = 66 if workers == 6 else 64
    trainer = syncalgos.DataParallel(
        squared_loss,
        OPTIMIZER,
        syncalgos.sync_sgd(),
        workers=workers,
        backend=backend,
        placement=syncalgos.Placement(devices=devices),
    )
    state, _ = trainer.run(trainer.init(make_params()), make_batches(batch))
    for name, values in train_in_numpy(batch).items():
        replicas = np.asarray(state.replica.params[name])  # (devices, lanes, ...)
        values = np.broadcast_to(values, replicas.shape)
        np.testing.assert_allclose(replicas, values, rtol=0, atol=TOLERANCE)
