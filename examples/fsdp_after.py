"""Train a sharded network (FSDP) by DiLoCo: fsdp_before.py, changed in few lines.

    python examples/fsdp_after.py
    diff examples/fsdp_before.py examples/fsdp_after.py

Each of two workers is four devices, over which its arrays are cut as before. The norm
for clipping is over all shards of a worker. What goes between workers is DiLoCo's.
"""

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import syncalgos

jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, if there are no real ones
STEPS = 400


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
train, test = np.split(rng.permutation(len(y)), [1500])

params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)
shardings = {"in": P(None, "fsdp"), "out": P("fsdp")}
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))

placement = syncalgos.Placement(mesh={"fsdp": 4}, shardings=shardings)
strategy = syncalgos.diloco(period=20)
trainer = syncalgos.DataParallel(
    loss, optimizer, strategy, workers=2, placement=placement
)
state = trainer.init(params)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    batch = {"x": x[rows], "y": y[rows]}
    state, metrics = trainer.step(state, batch)
    jax.block_until_ready(metrics)  # for CPU devices only: steps in flight may hang
    if step % 100 == 0:
        print(f"step {step}: loss {metrics['loss']:.4f}")

params = jax.device_get(trainer.center(state).params)
hits = logits(params, x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
