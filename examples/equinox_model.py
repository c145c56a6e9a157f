"""Train an equinox module with DiLoCo: four workers, a sync every 20 steps.

    python examples/equinox_model.py

It shows how a module is split: its float arrays are the params, and the loss combines
them with the rest, such as functions. At the end the center is a module again.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos


class Network(eqx.Module):
    """A hidden layer, normalised; it takes one image."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 64, key=first)
        self.norm = eqx.nn.LayerNorm(64)
        self.out = eqx.nn.Linear(64, 10, key=second)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.norm(self.hidden(x))))


params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)


def loss(params, batch):
    """Returns a worker's mean loss over its part of the batch."""
    logits = jax.vmap(eqx.combine(params, static))(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


images, labels = load_digits(return_X_y=True)
x, y = np.asarray(images, np.float32) / 16, np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

trainer = syncalgos.DataParallel(
    loss,
    optax.adam(3e-3),
    syncalgos.diloco(period=20),
    workers=4,
)
state = trainer.init(params)
for _ in range(4):
    rows = rng.choice(train, (100, 128))  # (steps, batch of all workers together)
    state, metrics = trainer.run(state, {"x": x[rows], "y": y[rows]})
    print(f"step {state.step}: train loss {metrics['loss'][-10:].mean():.3f}")

model = eqx.combine(trainer.center(state).params, static)
hits = jax.vmap(model)(x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
