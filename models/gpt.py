"""A small GPT: a causal transformer over tokens."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from models.draws import normal
from models.sharding import FSDP, TENSOR, Rule, gathered, matrix

Params = dict[str, Any]

STACKED = {"tokens": 0, "positions": 0, "blocks": 1, "norm": 0}
"""The number of leading axes that count layers, for each part of the params."""

# Columns of what a device computes by itself, rows of what the devices then add up.
CUT = {"qkv": -1, "out": -2, "up": -1, "down": -2}


def init(key: Any, vocabulary: int, context: int, width: int, layers: int) -> Params:
    """Draws weights for sequences of up to `context` of `vocabulary` tokens.

    Returns:
        {"tokens": (vocabulary, width), also the output projection; "positions":
        (context, width); "blocks": the layers' weights, each stacked on a leading axis
        of `layers`; "norm": the last layer norm}. Matrices are normal with standard
        deviation 0.02, those that end a residual branch with 0.02 / sqrt(2 layers);
        biases are zero. Queries, keys and values have no bias.
    """
    shapes = [
        (vocabulary, width),
        (context, width),
        (layers, width, 3 * width),
        (layers, width, width),
        (layers, width, 4 * width),
        (layers, 4 * width, width),
    ]
    tokens, positions, qkv, out, up, down = (0.02 * w for w in normal(key, shapes))
    # A sum of 2 layers branches then keeps the deviation of one.
    residual = (2 * layers) ** -0.5
    return {
        "tokens": tokens,
        "positions": positions,
        "blocks": {
            "norm1": _norm_init(layers, width),
            # No bias: on keys it would change no output, so its gradient is rounding
            # alone, of which Adam makes steps of full size.
            "qkv": {"w": qkv},
            "out": {"w": out * residual, "b": jnp.zeros((layers, width))},
            "norm2": _norm_init(layers, width),
            "up": {"w": up, "b": jnp.zeros((layers, 4 * width))},
            "down": {"w": down * residual, "b": jnp.zeros((layers, width))},
        },
        "norm": _norm_init(width),
    }


def apply(
    params: Params, tokens: jax.Array, heads: int, remat: bool = False
) -> jax.Array:
    """Maps tokens to logits of the token after each.

    Args:
        params: weights of `init`.
        tokens: int32, (batch, time), time at most the context.
        heads: attention heads, a divisor of the width.
        remat: let a gradient keep the inputs of blocks only and compute the rest again.

    Returns:
        (batch, time, vocabulary); no logit depends on later tokens.

    Raises:
        ValueError: tokens longer than the context, or heads that do not divide.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
    """
    context, width = params["positions"].shape
    time = tokens.shape[1]
    if time > context:
        raise ValueError(f"gpt: {time} tokens are longer than the context of {context}")
    if width % heads:
        raise ValueError(f"gpt: a width of {width} does not divide into {heads} heads")
    table, positions = gathered(params["tokens"]), gathered(params["positions"])
    # (batch × time, width): from three axes XLA on CPU computes the weights' gradients
    # 3 to 7 times slower (8 × 32 tokens of width 48).
    x = (table[tokens] + positions[:time]).reshape(-1, width)
    # Keeping only the results of matmuls takes 91 MB instead of 216 for a gradient, in
    # 0.85 times the time; `remat` 52 MB, 1.1 times (16 × 128 tokens, 4 layers, CPU).
    # Inside a scan XLA cannot merge the two computations: no barrier is needed.
    kept = None if remat else jax.checkpoint_policies.dots_saveable
    block = partial(_block, heads, time)
    block = jax.checkpoint(block, prevent_cse=False, policy=kept)
    x, _ = lax.scan(block, x, params["blocks"])
    return (_norm(params["norm"], x) @ table.T).reshape(*tokens.shape, -1)


def shardings(heads: int) -> Rule:
    """Makes the rule by which a worker's devices share the params.

    "fsdp" shards every matrix, embeddings included; "tensor" the heads of attention
    (columns of qkv, rows of out) and the hidden units of the MLP. Vectors stay whole.

    Args:
        heads: attention heads, which "tensor" must divide.
    """

    def spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]):
        if heads % sizes.get(TENSOR, 1):
            raise ValueError(
                f"gpt: {TENSOR}={sizes[TENSOR]} does not divide the {heads} heads"
            )
        part, *rest = path.split("/")
        if len(shape) - STACKED[part] != 2:
            return PartitionSpec()
        return matrix(shape, sizes, STACKED[part], CUT.get(rest[0]) if rest else None)

    return Rule((FSDP, TENSOR), spec)


def _block(
    heads: int, time: int, x: jax.Array, block: Params
) -> tuple[jax.Array, None]:
    """Adds attention, then the MLP, to x, (batch × time, width)."""
    whole = {name: gathered(block[name]["w"], cut) for name, cut in CUT.items()}
    block = block | {name: block[name] | {"w": w} for name, w in whole.items()}
    read = _attention(heads, time, block, _norm(block["norm1"], x))
    x = x + _linear(block["out"], read)
    hidden = jax.nn.gelu(_linear(block["up"], _norm(block["norm2"], x)))  # by tanh
    return x + _linear(block["down"], hidden), None


def _attention(heads: int, time: int, block: Params, x: jax.Array) -> jax.Array:
    """Reads, at each position, from itself and those before it."""
    qkv = jnp.split(x @ block["qkv"]["w"], 3, axis=-1)
    # (batch, time, heads, width / heads)
    q, k, v = (y.reshape(-1, time, heads, y.shape[-1] // heads) for y in qkv)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


def _linear(layer: Params, x: jax.Array) -> jax.Array:
    """Maps the last axis."""
    return x @ layer["w"] + layer["b"]


def _norm(layer: Params, x: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["b"]


def _norm_init(*shape: int) -> Params:
    return {"scale": jnp.ones(shape), "b": jnp.zeros(shape)}
