"""Train a small network with JAX and optax on one device: an ordinary script.

    python examples/before.py

The same script with DiLoCo and four workers is after.py.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = logits(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


optimizer = optax.adam(3e-3)


@jax.jit
def train_step(params, opt_state, batch):
    grads = jax.grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)
opt_state = optimizer.init(params)
for step in range(1, 401):
    rows = rng.choice(train, 128)
    params, opt_state = train_step(params, opt_state, {"x": x[rows], "y": y[rows]})
    if step % 100 == 0:
        hits = logits(params, x[test]).argmax(-1) == y[test]
        print(f"step {step}: test accuracy {hits.mean():.4f}")
