"""A GPT whose workers have 2 × 2 devices each, trained with streaming DiLoCo.

    python examples/sharded_gpt.py

Two workers train on 8 virtual CPU devices: on 8 accelerators, leave out the line with
`jax_num_cpu_devices`. Heads and hidden units are sharded over "tensor", words and the
model's width over "fsdp"; positions stay whole. It prints whether the loss fell, what
a device holds of a leaf, and what a worker and a device sent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import syncalgos

jax.config.update("jax_num_cpu_devices", 8)  # virtual ones
WORDS, TIME, WIDTH, LAYERS, HEADS, SIZE = 32, 16, 64, 2, 4, 16
MODEL = {  # shape and sharding of a leaf; the first axis of a block leaf is layers
    "words": ((WORDS, WIDTH), P("fsdp")),
    "places": ((TIME, WIDTH), P()),
    "qkv": ((LAYERS, WIDTH, 3, HEADS, SIZE), P(None, "fsdp", None, "tensor")),
    "out": ((LAYERS, HEADS, SIZE, WIDTH), P(None, "tensor", None, "fsdp")),
    "up": ((LAYERS, WIDTH, 4 * WIDTH), P(None, "fsdp", "tensor")),
    "down": ((LAYERS, 4 * WIDTH, WIDTH), P(None, "tensor", "fsdp")),
}


def gathered(x, *axes):  # as a step computes with it: sharded over "tensor" only
    return jax.lax.with_sharding_constraint(x, P(*axes))


def block(x, w):  # x: (batch, time, width)
    qkv, out = gathered(w["qkv"], None, None, "tensor"), gathered(w["out"], "tensor")
    up, down = gathered(w["up"], None, "tensor"), gathered(w["down"], "tensor")
    q, k, v = jnp.einsum("btw,wchd->cbthd", jax.nn.standardize(x), qkv)
    read = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthd,hdw->btw", read, out)
    return x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down, None


def loss(params, text):
    words = gathered(params["words"])
    blocks = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, words[text[:, :-1]] + params["places"], blocks)
    logits = jax.nn.standardize(x) @ words.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


rng = np.random.default_rng(0)
params = {k: np.float32(rng.normal(0, 0.05, shape)) for k, (shape, _) in MODEL.items()}
first, stride = rng.integers(1, 5, size=(2, 160, 32, 1))
text = (first + stride * np.arange(TIME + 1)) % WORDS  # (steps, global batch, time + 1)
trainer = syncalgos.DataParallel(
    loss,
    optax.adam(0.01),
    syncalgos.streaming_diloco(period=16, fragments=2),
    workers=2,
    placement=syncalgos.Placement(
        mesh={"fsdp": 2, "tensor": 2},
        shardings={name: spec for name, (_, spec) in MODEL.items()},
    ),
)
state, metrics = trainer.run(trainer.init(params), text)
print(metrics["loss"][0] > 3, metrics["loss"][-1] < 0.2)
up = state.replica.params["up"]  # (workers, lanes, layers, …)
print(up.shape, up.sharding.shard_shape(up.shape))
sent = trainer.communication(state, steps=160)
print(sent.bytes_per_worker, sent.devices, sent.bytes_per_device)
