"""Train a flax nnx network by DiLoCo with four workers: nnx_before.py, changed.

    python examples/nnx_after.py
    diff examples/nnx_before.py examples/nnx_after.py

The module is split: params are trained and synced, and all else, such as batch
statistics and random streams, is each worker's own. The center is a module again.
"""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import syncalgos

STEPS = 400


class Network(nnx.Module):
    """A hidden layer with batch normalisation and dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss(params, buffers, batch, key):
    model = nnx.merge(graph, params, buffers)
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), (nnx.state(model, nnx.Not(nnx.Param)), {})


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network(nnx.Rngs(params=0, dropout=1))
schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 40, STEPS)
tx = optax.chain(optax.clip_by_global_norm(1), optax.adamw(schedule))
strategy = syncalgos.diloco(period=20)
trainer = syncalgos.DataParallel(loss, tx, strategy, workers=4)
graph, params, buffers = nnx.split(model, nnx.Param, ...)
state = trainer.init(params, buffers)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    state, metrics = trainer.step(state, {"x": x[rows], "y": y[rows]})
    if step % 100 == 0:
        print(f"step {step}: loss {metrics['loss']:.4f}")

center = trainer.center(state)
model = nnx.merge(graph, center.params, center.buffers)
model.eval()
print(f"test accuracy {np.mean(model(x[test]).argmax(-1) == y[test]):.4f}")
