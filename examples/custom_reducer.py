"""Send outer gradients in two bits: a custom reducer in DiLoCo.

    python examples/custom_reducer.py

It shows what a reducer is made of: `combine` exchanges one worker's tree by collectives
and also returns what the others got of it, so that error feedback can send the rest
later. `communication` counts the bytes, here beside those of the plain mean.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos
from syncalgos.reducers import error_feedback
from syncalgos.writing import WORKERS, Axis, Reducer, collectives, factory

PERIOD = 20
STEPS = 400
BATCH = 128


@factory  # a strategy around it repeats the call with its own axis
def ternary(*, axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' entries, each rounded to -s, 0 or s, for s of a leaf."""

    def leaf(x):
        flat = x.reshape(-1)
        # The threshold of Li, Zhang and Liu, "Ternary weight networks", 2016.
        large = jnp.abs(flat) > 0.7 * jnp.abs(flat).mean()
        scale = jnp.sum(jnp.abs(flat) * large) / jnp.maximum(1, large.sum())
        bits = jnp.packbits(jnp.stack([large & (flat > 0), large & (flat < 0)]), axis=1)
        # Sums of codes are no codes: all codes go to all workers.
        bits, scales = collectives.gather((bits, scale), axis)  # (workers, 2, bytes)
        bits = jnp.unpackbits(bits, axis=2, count=x.size).astype(x.dtype)
        entries = scales[:, None] * (bits[:, 0] - bits[:, 1])  # (workers, size)
        own_entries = entries[collectives.index(axis)]
        return entries.mean(0).reshape(x.shape), own_entries.reshape(x.shape)

    def combine(updates, state, step):
        leaves, form = jax.tree.flatten(updates)
        combined, decoded = zip(*map(leaf, leaves), strict=True)
        return form.unflatten(combined), form.unflatten(decoded), state

    return Reducer(combine)


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = logits(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1497])
rows = rng.choice(train, (STEPS, BATCH))  # (steps, batch of all workers together)
params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)

outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
for name, reducer in {"mean": "mean", "ternary": error_feedback(ternary())}.items():
    strategy = syncalgos.every(syncalgos.outer_step(outer, reducer), PERIOD)
    trainer = syncalgos.DataParallel(loss, optax.sgd(0.05), strategy, workers=4)
    state, _ = trainer.run(trainer.init(params), {"x": x[rows], "y": y[rows]})
    hits = logits(trainer.center(state).params, x[test]).argmax(-1) == y[test]
    sent_bytes = trainer.communication(state, STEPS).bytes_per_worker
    print(
        f"{name}: test accuracy {hits.mean():.4f}, {sent_bytes:,.0f} bytes per worker"
    )
