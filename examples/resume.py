"""Save training midway with Orbax, and continue to the same bits.

    python examples/resume.py

A TrainState is a tree of arrays, which Orbax writes and restores in place, in one
process or several. A new trainer continues from it, and ends with the replicas and the
strategy's state of the one that was saved. On other devices: docs/orbax.md.
"""

import hashlib
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import syncalgos


def loss(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    mask = jax.random.bernoulli(key, 0.9, hidden.shape)  # dropout
    scores = (hidden * mask / 0.9) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


def make():
    """Returns a new trainer."""
    strategy = syncalgos.diloco(period=15)  # saved between two syncs
    return syncalgos.DataParallel(loss, optax.adam(3e-3), strategy, workers=4)


def sha256(trainer, state):
    """Returns a hash of this process's replicas and strategy's states."""
    host_state = trainer.to_host(state)
    leaves = jax.tree.leaves((host_state.replica, host_state.sync))
    return hashlib.sha256(b"".join(raw_bytes(leaf) for leaf in leaves)).hexdigest()


def raw_bytes(leaf):
    """Returns the bytes of an array, which may hold typed keys, as in flax nnx."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = np.asarray(jax.random.key_data(leaf))
    return leaf.tobytes()


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
rows = rng.choice(len(y), (200, 128))  # (steps, batch of all workers together)
halves = [{"x": x[half], "y": y[half]} for half in np.split(rows, 2)]
params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)

first_run = make()
state, _ = first_run.run(first_run.init(params), halves[0])
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as orbax:
    path = Path(folder) / "state"
    orbax.save(path, state)
    orbax.wait_until_finished()  # it writes in the background
    state, _ = first_run.run(state, halves[1])
    print("uninterrupted", sha256(first_run, state))

    second = make()
    state = orbax.restore(path, second.init(params))
    state, _ = second.run(state, halves[1])
    print("resumed      ", sha256(second, state))
