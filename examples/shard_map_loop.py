"""Run a strategy in your own loop: plain JAX, jax.shard_map, your own optimizer.

    python examples/shard_map_loop.py

It shows the four functions of a strategy, each in its place: init, reduce before the
optimizer, sync after it, and center, the model to evaluate. Each device is a worker.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from sklearn.datasets import load_digits

import syncalgos
from syncalgos import Replica

jax.config.update("jax_num_cpu_devices", 4)  # virtual ones; accelerators stay as many
strategy = syncalgos.diloco(period=20, axis="workers")


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = jax.nn.log_softmax(logits(params, batch["x"]))
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()


def local_step(carry, batch):  # of one worker
    replica, state, step = carry
    value, grads = jax.value_and_grad(loss)(replica.params, batch)
    grads, state = strategy.reduce(grads, replica, state, step)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, replica.opt_state, grads)
    params = jax.tree.map(lambda p, v: p - 0.05 * v, replica.params, velocity)
    replica, state = strategy.sync(Replica(params, velocity), state, step)
    return (replica, state, step + 1), value


# Outside of the maps arrays lead with the workers; inside each worker sees its row.
def begin(params):
    velocity = jax.tree.map(jnp.zeros_like, params)
    carry = Replica(params, velocity), strategy.init(params), jnp.int32(0)
    return jax.tree.map(lambda x: x[None], carry)


def train(rows, batches):
    carry = jax.tree.map(lambda x: x[0], rows)
    carry, losses = jax.lax.scan(local_step, carry, batches)
    return jax.tree.map(lambda x: x[None], carry), losses[None]


def center(rows):
    replica, state, _ = jax.tree.map(lambda x: x[0], rows)
    return strategy.center(replica.params, state)


mesh = jax.make_mesh([jax.device_count()], ["workers"], axis_types=(AxisType.Auto,))
# With this check jax.grad would add up the gradients of all workers at every step.
mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
replicated = PartitionSpec()
row = PartitionSpec("workers")
part = PartitionSpec(None, "workers")  # of (steps, batch of all workers together)
begin = jax.jit(mapped(begin, in_specs=replicated, out_specs=row))
train = jax.jit(mapped(train, in_specs=(row, part), out_specs=row))
center = jax.jit(mapped(center, in_specs=row, out_specs=replicated))

images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
rng = np.random.default_rng(0)
learned, test = np.split(rng.permutation(len(y)), [1500])
rows = begin({"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))})
for _ in range(4):
    chosen = rng.choice(learned, (100, 32 * mesh.size))
    rows, losses = train(rows, {"x": x[chosen], "y": y[chosen]})
    jax.block_until_ready(rows)  # on CPU devices: XLA may abort if two are in flight
    print(f"train loss {losses[:, -10:].mean():.3f}")
hits = logits(center(rows), x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
