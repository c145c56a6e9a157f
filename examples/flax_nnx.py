"""Train a flax nnx model with DiLoCo: four workers, a sync every 20 steps.

    python examples/flax_nnx.py

It shows where the parts of a module go. Params are trained and synced. All other state,
such as batch statistics, goes to the buffers. At the end the center is a module again.
"""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import syncalgos


class Network(nnx.Module):
    """A hidden layer with batch normalisation and dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


graph, params, buffers = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)


def loss(params, buffers, batch, key):
    """Returns a worker's mean loss over its part of the batch, its buffers, metrics."""
    # A copy, as the forward pass writes batch statistics into the module.
    model = nnx.merge(graph, params, buffers, copy=True)
    # The key differs between workers and steps, and so do the units that are dropped.
    nnx.reseed(model, default=key)
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    hits = logits.argmax(-1) == batch["y"]
    buffers = nnx.state(model, nnx.Not(nnx.Param))
    return losses.mean(), (buffers, {"accuracy": hits.mean()})


images, labels = load_digits(return_X_y=True)
x, y = np.asarray(images, np.float32) / 16, np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

strategy = syncalgos.diloco(period=20)
trainer = syncalgos.DataParallel(loss, optax.adam(3e-3), strategy, workers=4)
state = trainer.init(params, buffers)
for _ in range(4):
    rows = rng.choice(train, (100, 128))  # (steps, batch of all workers together)
    state, metrics = trainer.run(state, {"x": x[rows], "y": y[rows]})
    loss_now, hits = (metrics[name][-10:].mean() for name in ("loss", "accuracy"))
    print(f"step {state.step}: train loss {loss_now:.3f}, accuracy {hits:.3f}")

center = trainer.center(state)
model = nnx.merge(graph, center.params, center.buffers)
model.eval()
print(f"test accuracy {np.mean(model(x[test]).argmax(-1) == y[test]):.4f}")
