"""Train a small network by DiLoCo with four workers: before.py, changed in few lines.

    python examples/after.py
    diff examples/before.py examples/after.py

The loss, the optimizer and the loop stay. A trainer takes the place of the step, and
its state that of params and opt_state. The four workers share the batch of before.py.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos

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
strategy = syncalgos.diloco(period=20)
trainer = syncalgos.DataParallel(loss, optimizer, strategy, workers=4)

params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)
state = trainer.init(params)
for step in range(1, 401):
    rows = rng.choice(train, 128)
    state, _ = trainer.step(state, {"x": x[rows], "y": y[rows]})
    if step % 100 == 0:
        params = trainer.center(state).params
        hits = logits(params, x[test]).argmax(-1) == y[test]
        print(f"step {step}: test accuracy {hits.mean():.4f}")
