"""Train an equinox network by DiLoCo with four workers: equinox_before.py, changed.

    python examples/equinox_after.py
    diff examples/equinox_before.py examples/equinox_after.py

The float arrays of a module are its params, and the loss combines them with the rest,
such as functions. `accumulate` takes the place of the scan over parts of a batch.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos

STEPS = 400


class Network(eqx.Module):
    """A hidden layer, normalised, with dropout; it takes one image."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 64, key=key1)
        self.norm = eqx.nn.LayerNorm(64)
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(64, 10, key=key2)

    def __call__(self, x, key=None):
        return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x))), key=key))


def loss(params, batch, key):
    model = eqx.combine(params, static)
    logits = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network(jax.random.key(0))
optimizer = optax.adam(3e-3)
params, static = eqx.partition(model, eqx.is_inexact_array)
trainer = syncalgos.DataParallel(
    loss, optimizer, syncalgos.diloco(period=20), workers=4, accumulate=4
)
state = trainer.init(params)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    batch = {"x": x[rows], "y": y[rows]}
    state, metrics = trainer.step(state, batch)
    if step % 100 == 0:
        print(f"step {step}: loss {metrics['loss']:.4f}")

model = eqx.combine(trainer.center(state).params, static)
hits = jax.vmap(eqx.nn.inference_mode(model))(x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
