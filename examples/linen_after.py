"""Train a flax linen network by DiLoCo with four workers: linen_before.py, changed.

    python examples/linen_after.py
    diff examples/linen_before.py examples/linen_after.py

The loss is as before, out of the step. It gets a key that differs between workers and
steps. The period counts calls of the step, and so is a multiple of MultiSteps' two.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos

STEPS = 800


class Network(nn.Module):
    """A hidden layer with batch normalisation and dropout; it computes in bfloat16."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(64, dtype=jnp.bfloat16)(x)
        x = nn.BatchNorm(not train, dtype=jnp.bfloat16)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(10, dtype=jnp.bfloat16)(x).astype(jnp.float32)


def loss(params, batch_stats, batch, key):
    logits, updates = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["x"],
        train=True,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), (updates["batch_stats"], {})


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network()
variables = model.init(jax.random.key(0), x[:1], train=False)
optimizer = optax.MultiSteps(optax.adamw(3e-3), 2)
strategy = syncalgos.diloco(period=40)
trainer = syncalgos.DataParallel(loss, optimizer, strategy, workers=4)
state = trainer.init(variables["params"], variables["batch_stats"])
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 64)
    batch = {"x": x[rows], "y": y[rows]}
    state, metrics = trainer.step(state, batch)
    if step % 200 == 0:
        print(f"step {step}: loss {metrics['loss']:.4f}")

center = trainer.center(state)
variables = {"params": center.params, "batch_stats": center.buffers}
logits = jnp.asarray(model.apply(variables, x[test], train=False))
hits = logits.argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
