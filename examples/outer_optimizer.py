"""Try another outer optimizer in DiLoCo: Adam in place of Nesterov SGD.

    python examples/outer_optimizer.py

It shows `outer_step`, which takes any optimizer of optax. Both train on the same
batches. Each has three rates to choose from, by validation data, and is then tested.
One seed does not tell which is better: `python -m experiments.compare` takes several.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos

PERIOD = 20
STEPS = 400
BATCH = 128


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = logits(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


def nesterov(rate):
    return syncalgos.diloco(PERIOD, outer_lr=rate)  # momentum 0.9


def adam(rate):
    outer = optax.adam(rate, b2=0.95)  # shorter than usual, for 20 outer steps
    return syncalgos.every(syncalgos.outer_step(outer), PERIOD)


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, validation, test = np.split(rng.permutation(len(y)), [1197, 1497])
rows = rng.choice(train, (STEPS, BATCH))  # (steps, batch of all workers together)
params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)


def trained(strategy):
    """Returns the center after training by a strategy."""
    trainer = syncalgos.DataParallel(loss, optax.sgd(0.05), strategy, workers=4)
    state, _ = trainer.run(trainer.init(params), {"x": x[rows], "y": y[rows]})
    return trainer.center(state).params


for make, rates in {nesterov: (0.4, 0.7, 1.0), adam: (0.02, 0.03, 0.05)}.items():
    centers = {rate: trained(make(rate)) for rate in rates}
    losses = {
        rate: float(loss(center, {"x": x[validation], "y": y[validation]}))
        for rate, center in centers.items()
    }
    best = min(losses, key=losses.__getitem__)
    for rate, value in losses.items():
        print(f"{make.__name__} at {rate}: validation loss {value:.4f}")
    hits = logits(centers[best], x[test]).argmax(-1) == y[test]
    print(f"{make.__name__}: test accuracy {hits.mean():.4f} at its best rate, {best}")
