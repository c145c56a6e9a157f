"""Train an equinox network on one device: an ordinary loop.

    python examples/equinox_before.py

It has dropout with a key for each image, and takes the gradients of a batch in four
parts, to save memory. The same loop with DiLoCo is equinox_after.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

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


def loss(model, batch, key):
    logits = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


@eqx.filter_jit
def train_step(model, opt_state, batch, key):
    def add(total, numbered):
        number, part = numbered
        worker_key = jax.random.fold_in(key, number)
        loss_and_grads = eqx.filter_value_and_grad(loss)(model, part, worker_key)
        return jax.tree.map(jnp.add, total, loss_and_grads), None

    params = eqx.filter(model, eqx.is_inexact_array)
    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    none = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, none, (jnp.arange(4), parts))
    value, grads = jax.tree.map(lambda x: x / 4, total)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, value


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network(jax.random.key(0))
optimizer = optax.adam(3e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
key = jax.random.key(1)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    batch = {"x": x[rows], "y": y[rows]}
    worker_key = jax.random.fold_in(key, step)
    model, opt_state, value = train_step(model, opt_state, batch, worker_key)
    if step % 100 == 0:
        print(f"step {step}: loss {value:.4f}")

hits = jax.vmap(eqx.nn.inference_mode(model))(x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
