"""Run a strategy in a loop that stacks its replicas over an axis of a mesh, as MaxText.

    python examples/stacked_state.py

The loop owns mesh, shardings and step, and maps over the workers ("diloco"); XLA shards
each replica ("fsdp"). `syncalgos.stacked` is all that is added.
"""

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import syncalgos
from syncalgos import Replica

jax.config.update("jax_num_cpu_devices", 4)  # virtual ones; accelerators stay as many
shape = (2, jax.device_count() // 2)
axes = ("diloco", "fsdp")
mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2)
cuts = {"layers": P("diloco", None, "fsdp"), "head": P("diloco", "fsdp")}
shardings = {name: NamedSharding(mesh, cut) for name, cut in cuts.items()}
optimizer = optax.adam(0.003)
strategy = syncalgos.stacked(syncalgos.easgd(period=10, axis="diloco"), mesh)


def logits(params, x):
    def layer(x, kernel):
        x = x + jax.nn.relu(x @ kernel)
        return jax.lax.with_sharding_constraint(x, P("fsdp")), None

    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]


def loss(params, batch):
    scores = jax.nn.log_softmax(logits(params, batch["x"]))
    return -(scores * jax.nn.one_hot(batch["y"], 10)).sum(1).mean()


def update(grads, opt_state, params):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return Replica(optax.apply_updates(params, updates), opt_state)


def over_workers(function):  # of one replica
    return jax.vmap(function, spmd_axis_name="diloco")


def train_step(carry, batch):  # leaves lead with the workers
    replica, state, step = carry
    value, grads = over_workers(jax.value_and_grad(loss))(replica.params, batch)
    grads, state = strategy.reduce(grads, replica, state, step)
    replica = over_workers(update)(grads, replica.opt_state, replica.params)
    replica, state = strategy.sync(replica, state, step)
    return (replica, state, step + 1), value.mean()


@jax.jit
def train(carry, batches):  # batches: (steps, workers, batch, …)
    return jax.lax.scan(train_step, carry, batches)


rng = np.random.default_rng(0)
images, labels = load_digits(return_X_y=True)
x = np.asarray(images, np.float32) / 16
y = np.asarray(labels, np.int32)
learned, test = np.split(rng.permutation(len(y)), [1497])
model = {"layers": rng.normal(0, 0.05, (3, 64, 64)), "head": np.zeros((64, 10))}
with jax.set_mesh(mesh):
    stacked = {name: np.array([x, x], np.float32) for name, x in model.items()}
    params = jax.device_put(stacked, shardings)
    replica = Replica(params, over_workers(optimizer.init)(params))
    carry = replica, strategy.init(params), 0
    for _ in range(4):
        rows = rng.choice(learned, (50, 2, 32))
        carry, losses = train(carry, {"x": x[rows], "y": y[rows]})
        # On CPU devices, XLA may abort the process if two calls are in flight.
        jax.block_until_ready(carry)
        print(f"train loss {losses[-10:].mean():.3f}")
    center = jax.device_get(strategy.center(carry[0].params, carry[1]))
    hits = jax.jit(logits)(center, x[test]).argmax(-1) == y[test]
print(f"test accuracy {hits.mean():.4f}")
