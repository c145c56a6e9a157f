"""Save a training in the middle, and go on from the file to the very same bits.

    python examples/resume.py

It shows `to_host` and `from_host`. A TrainState is a tree of arrays, which any format
for arrays can hold, here NumPy's without pickle. A new trainer goes on from the file,
and ends with the replicas and the strategy's state of the one that was saved.
"""

import hashlib
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos
from syncalgos import TrainState


def loss(params, buffers, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)  # dropout
    scores = (hidden * kept / 0.9) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean(), (buffers, {})


def make():
    """Returns a new trainer."""
    strategy = syncalgos.diloco(period=15)  # saved between two syncs
    return syncalgos.DataParallel(loss, optax.adam(3e-3), strategy, workers=4)


def save(path: Path, held: TrainState):
    """Writes a state of `to_host`."""
    held = held._replace(key=jax.random.key_data(held.key))
    leaves = jax.tree_util.tree_leaves_with_path(held)
    # NumPy's files lose the name of bfloat16: such arrays need .view(np.uint16) here.
    np.savez(path, **{jax.tree_util.keystr(place): leaf for place, leaf in leaves})


def load(path: Path, like: TrainState) -> TrainState:
    """Reads what `save` wrote, in the structure of another state."""
    with np.load(path, allow_pickle=False) as file:
        held = jax.tree_util.tree_map_with_path(
            lambda place, _: file[jax.tree_util.keystr(place)], like
        )
    return held._replace(key=jax.random.wrap_key_data(held.key))


def sha256(held: TrainState) -> str:
    """Returns a hash of all replicas and of the strategy's state."""
    leaves = jax.tree.leaves((held.replica, held.sync))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


images, labels = load_digits(return_X_y=True)
x, y = np.asarray(images, np.float32) / 16, np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
rows = rng.choice(len(y), (200, 128))  # (steps, batch of all workers together)
halves = [{"x": x[half], "y": y[half]} for half in np.split(rows, 2)]
params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)

first = make()
state, _ = first.run(first.init(params), halves[0])
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "state.npz"
    save(path, first.to_host(state))
    state, _ = first.run(state, halves[1])
    print("uninterrupted", sha256(first.to_host(state)))

    second = make()
    state = second.from_host(load(path, like=second.to_host(second.init(params))))
    state, _ = second.run(state, halves[1])
    print("resumed      ", sha256(second.to_host(state)))
