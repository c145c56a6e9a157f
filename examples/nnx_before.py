"""Train a flax nnx network on one device: an ordinary loop.

    python examples/nnx_before.py

It has dropout from a random stream of its own, batch statistics, a rate that warms up
and falls as a cosine, and clipping. The same loop with DiLoCo is nnx_after.py.
"""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

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


def loss(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


@nnx.jit
def train_step(model, optimizer, batch):
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

model = Network(nnx.Rngs(params=0, dropout=1))
schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 40, STEPS)
tx = optax.chain(optax.clip_by_global_norm(1), optax.adamw(schedule))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    value = train_step(model, optimizer, {"x": x[rows], "y": y[rows]})
    if step % 100 == 0:
        print(f"step {step}: loss {value:.4f}")

model.eval()
print(f"test accuracy {np.mean(model(x[test]).argmax(-1) == y[test]):.4f}")
