"""Put DiLoCo's outer step around Adam in a plain loop, with a single worker.

    python examples/one_worker.py

It shows `as_optimizer`, beside Adam alone. Each takes the best of three rates by the
validation loss, a mean over three seeds, and prints its test loss there. On these small
data the outer steps gain nothing.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos

PERIOD = 10
STEPS = 300
BATCH = 32
SEEDS = 3
RATES = 0.003, 0.01, 0.03

images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
parts = np.split(np.random.default_rng(0).permutation(len(y)), [1197, 1497])
train, validation, test = ({"x": x[part], "y": y[part]} for part in parts)


@jax.jit
def loss(params, batch):
    scores = jax.nn.relu(batch["x"] @ params["in"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


def losses(optimizer):
    """Returns validation and test loss after training by any optimizer of optax."""

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    seed_losses = []
    for rng in map(np.random.default_rng, range(SEEDS)):
        shapes = {"in": (64, 64), "out": (64, 10)}
        params = {k: rng.normal(0, 0.1, s).astype("f") for k, s in shapes.items()}
        state = optimizer.init(params)
        for rows in rng.integers(len(train["y"]), size=(STEPS, BATCH)):
            batch = {"x": train["x"][rows], "y": train["y"][rows]}
            params, state = step(params, state, batch)
        # STEPS is a number of whole periods: after a sync, params are the center.
        seed_losses.append([float(loss(params, split)) for split in (validation, test)])
    return np.mean(seed_losses, axis=0)


def alone(rate):
    return optax.adam(rate)


def with_outer_steps(rate):
    strategy = syncalgos.diloco(PERIOD, outer_lr=0.7, outer_momentum=0.6)
    return syncalgos.as_optimizer(strategy, optax.adam(rate))


for make in alone, with_outer_steps:
    losses_by_rate = {rate: losses(make(rate)) for rate in RATES}
    best = min(RATES, key=lambda rate: losses_by_rate[rate][0])
    for rate, (on_validation, _) in losses_by_rate.items():
        print(f"{make.__name__} at {rate}: validation loss {on_validation:.4f}")
    _, test_loss = losses_by_rate[best]
    print(f"{make.__name__}: test loss {test_loss:.4f} at its best rate, {best}")
