"""Eighteen settings of BMUF, 8 workers each, trained in turn by one program.

    python examples/grid.py

The rate and the momentum are data to the program: see docs/hyperparameters.md.
"""

import jax.numpy as jnp
import numpy as np
import optax

import syncalgos

rng = np.random.default_rng(0)
x = rng.normal(size=(200, 64, 10)).astype(np.float32)  # (steps, global batch, …)
y = x @ rng.normal(size=(10, 1)) + 0.5 * rng.normal(size=(200, 64, 1))


def loss(w, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2)


trainer = syncalgos.DataParallel(
    loss,
    lambda numbers: optax.sgd(numbers["rate"]),
    lambda numbers: syncalgos.bmuf(10, block_momentum=numbers["momentum"]),
    hyperparams={"rate": 0.1, "momentum": 0.5},
)
results = {}
for rate in np.geomspace(0.01, 0.3, 6):
    for momentum in (0.0, 0.5, 0.875):
        numbers = {"rate": rate, "momentum": momentum}
        state = trainer.init(np.zeros((10, 1), np.float32), hyperparams=numbers)
        state, metrics = trainer.run(state, (x, y))
        results[rate, momentum] = metrics["loss"][-20:].mean()

losses = results.values()
print(f"{len(results)} settings, loss {min(losses):.3f} to {max(losses):.3f}")
rate, momentum = min(results, key=lambda setting: results[setting])
print(f"best: rate {rate:.2g}, momentum {momentum:g}")
