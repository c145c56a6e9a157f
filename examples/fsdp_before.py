"""Train a network that is sharded over four devices (FSDP): an ordinary loop.

    python examples/fsdp_before.py

The gradients are clipped by their norm over all shards. The same loop with DiLoCo, of
two workers that are four devices each, is fsdp_after.py.
"""

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

jax.config.update("jax_num_cpu_devices", 4)  # virtual ones, if there are no real ones
STEPS = 400


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = logits(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


@jax.jit
def train_step(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
train, test = np.split(rng.permutation(len(y)), [1500])

params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}
params = jax.tree.map(np.float32, params)
shardings = {"in": P(None, "fsdp"), "out": P("fsdp")}
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), shardings)
params = jax.device_put(params, places)
opt_state = optimizer.init(params)
for step in range(1, STEPS + 1):
    rows = rng.choice(train, 128)
    batch = {"x": x[rows], "y": y[rows]}
    batch = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
    params, opt_state, value = train_step(params, opt_state, batch)
    jax.block_until_ready(value)  # for CPU devices only: steps in flight may hang
    if step % 100 == 0:
        print(f"step {step}: loss {value:.4f}")

params = jax.device_get(params)
hits = logits(params, x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
