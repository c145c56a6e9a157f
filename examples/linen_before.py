"""Train a flax linen network on one device: an ordinary loop.

    python examples/linen_before.py

It has dropout, batch statistics, arithmetic in bfloat16 with params in float32, and
updates by the gradients of two batches. The same loop with DiLoCo is linen_after.py.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

STEPS = 800


class Network(nn.Module):
    """A hidden layer with batch normalisation and dropout; it computes in bfloat16."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(64, dtype=jnp.bfloat16)(x)
        x = nn.BatchNorm(not train, dtype=jnp.bfloat16)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(10, dtype=jnp.bfloat16)(x).astype(jnp.float32)


class TrainState(train_state.TrainState):
    batch_stats: Any


@jax.jit
def train_step(state, batch, key):
    def loss(params):
        logits, updates = model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), updates["batch_stats"]

    grad = jax.value_and_grad(loss, has_aux=True)
    (value, batch_stats), grads = grad(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), value


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network()
variables = model.init(jax.random.key(0), x[:1], train=False)
optimizer = optax.MultiSteps(optax.adamw(3e-3), 2)
state = TrainState.create(apply_fn=model.apply, tx=optimizer, **variables)
key = jax.random.key(1)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 64)
    batch = {"x": x[rows], "y": y[rows]}
    state, value = train_step(state, batch, jax.random.fold_in(key, step))
    if step % 200 == 0:
        print(f"step {step}: loss {value:.4f}")

variables = {"params": state.params, "batch_stats": state.batch_stats}
logits = jnp.asarray(model.apply(variables, x[test], train=False))
hits = logits.argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
