"""A GPT: a causal transformer over tokens, of any size or of those in SHAPES."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from models.draws import normal
from models.sharding import FSDP, TENSOR, Rule, gathered, matrix

Params = dict[str, Any]

LAYERED = {"tokens": 0, "positions": 0, "blocks": 1, "norm": 0}
"""The number of leading axes that count layers, for each part of the params."""

# Columns of what a device computes by itself, rows of what the devices then add up.
CUT_DIMENSIONS = {"qkv": -1, "out": -2, "up": -1, "down": -2}

# The parts of a block by their names in Hugging Face's GPT-2.
GPT2_PARTS = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


class Shape(NamedTuple):
    """The sizes of a GPT that has all biases of GPT-2.

    Attributes:
        vocabulary: number of tokens.
        context: tokens of a sequence.
        width: numbers of a token between layers.
        layers: blocks.
        heads: of attention.
        head_size: numbers of a query, a key or a value in a head.
        rotary: positions turn queries and keys; no table of them is learnt.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    head_size: int
    rotary: bool = False

    def init(self, key: Any) -> Params:
        """Draws weights, as the function `init` does."""
        return init(
            key,
            self.vocabulary,
            self.context,
            self.width,
            self.layers,
            attention=self.heads * self.head_size,
            qkv_bias=True,
            rotary=self.rotary,
        )

    @property
    def layered(self) -> dict[str, int]:
        """The part of LAYERED that is about these params."""
        absent = {"positions"} if self.rotary else set()
        return {part: axes for part, axes in LAYERED.items() if part not in absent}


# gpt2*: Radford et al. 2019, the layers and widths of table 2; the first is called 124M
# by its count. diloco-*: Douillard et al., "DiLoCo: Distributed low-communication
# training of language models", 2023; the sizes alone, as their models differ otherwise
# from GPT-2. gpt2-tiny: to try a command in seconds.
SHAPES = {
    "gpt2-tiny": Shape(512, 64, 32, 2, 2, 16),
    "gpt2": Shape(50257, 1024, 768, 12, 12, 64),
    "gpt2-medium": Shape(50257, 1024, 1024, 24, 16, 64),
    "gpt2-large": Shape(50257, 1024, 1280, 36, 20, 64),
    "gpt2-xl": Shape(50257, 1024, 1600, 48, 25, 64),
    "diloco-60m": Shape(32000, 1024, 896, 3, 16, 64),
    "diloco-150m": Shape(32000, 1024, 896, 12, 16, 64),
    "diloco-400m": Shape(32000, 1024, 1536, 12, 12, 128),
}


def init(
    key: Any,
    vocabulary: int,
    context: int,
    width: int,
    layers: int,
    *,
    attention: int | None = None,
    qkv_bias: bool = False,
    rotary: bool = False,
) -> Params:
    """Draws weights for sequences of up to `context` of `vocabulary` tokens.

    Args:
        key: of the draw.
        vocabulary: number of tokens.
        context: the longest sequence; unused with `rotary`, which knows no longest.
        width: numbers of a token between layers.
        layers: blocks.
        attention: numbers of a query in all heads together; None: the width.
        qkv_bias: queries, keys and values have a bias, as in GPT-2.
        rotary: no positions are learnt: `apply` turns queries and keys instead.

    Returns:
        {"tokens": (vocabulary, width), also the output projection; "positions":
        (context, width), unless rotary; "blocks": the layers' weights, each stacked on
        a leading axis of `layers`; "norm": the last layer norm}. Matrices are normal
        with standard deviation 0.02, those that end a residual branch with
        0.02 / sqrt(2 layers); biases are zero.
    """
    attention = width if attention is None else attention
    shapes = [
        (vocabulary, width),
        (0 if rotary else context, width),
        (layers, width, 3 * attention),
        (layers, attention, width),
        (layers, width, 4 * width),
        (layers, 4 * width, width),
    ]
    tokens, positions, qkv, out, up, down = (0.02 * w for w in normal(key, shapes))
    # A sum of 2 layers branches then keeps the deviation of one.
    residual = (2 * layers) ** -0.5
    # Not by default: on keys a bias changes no output, so its gradient is rounding
    # alone, of which Adam makes steps of full size.
    bias = {"b": jnp.zeros((layers, 3 * attention))} if qkv_bias else {}
    return {
        "tokens": tokens,
        **({} if rotary else {"positions": positions}),
        "blocks": {
            "norm1": _norm_init(layers, width),
            "qkv": {"w": qkv, **bias},
            "out": {"w": out * residual, "b": jnp.zeros((layers, width))},
            "norm2": _norm_init(layers, width),
            "up": {"w": up, "b": jnp.zeros((layers, 4 * width))},
            "down": {"w": down * residual, "b": jnp.zeros((layers, width))},
        },
        "norm": _norm_init(width),
    }


def apply(
    params: Params,
    tokens: jax.Array,
    heads: int,
    remat: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """Maps tokens to logits of the token after each.

    Args:
        params: weights of `init`; without "positions" these are rotary.
        tokens: int32, (batch, time), time at most the context.
        heads: attention heads, a divisor of the width, or of `attention`.
        remat: let a gradient keep the inputs of blocks only and compute the rest again.
        dtype: of products and of what is kept for a gradient, such as jnp.bfloat16;
            norms and softmax stay float32. None: that of the params.

    Returns:
        (batch, time, vocabulary), float32 at least; no logit depends on later tokens.

    Raises:
        ValueError: tokens longer than the context, or heads that do not divide.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019;
    rotary positions: Su et al., "RoFormer: Enhanced transformer with rotary position
    embedding", 2021.
    """
    rotary = "positions" not in params
    time = tokens.shape[1]
    width = params["blocks"]["out"]["w"].shape[-2]
    context = time if rotary else len(params["positions"])
    if time > context:
        raise ValueError(f"gpt: {time} tokens are longer than the context of {context}")
    if width % heads:
        raise ValueError(f"gpt: a width of {width} does not divide into {heads} heads")
    if rotary and width // heads % 2:
        raise ValueError(f"gpt: rotary heads need an even size, not {width // heads}")
    table = gathered(params["tokens"])
    x = table[tokens]
    if not rotary:
        x = x + gathered(params["positions"])[:time]
    # (batch × time, width): from three axes XLA on CPU computes the weights' gradients
    # 3 to 7 times slower (8 × 32 tokens of width 48).
    x = x.reshape(-1, table.shape[1]).astype(dtype or x.dtype)
    # Keeping only the results of matmuls takes 91 MB instead of 216 for a gradient, in
    # 0.85 times the time; `remat` 52 MB, 1.1 times (16 × 128 tokens, 4 layers, CPU).
    # Inside a scan XLA cannot merge the two computations: no barrier is needed.
    policy = None if remat else jax.checkpoint_policies.dots_saveable
    apply_block = partial(_apply_block, heads, time, rotary)
    apply_block = jax.checkpoint(apply_block, prevent_cse=False, policy=policy)
    x, _ = lax.scan(apply_block, x, params["blocks"])
    logits = _norm(params["norm"], x) @ table.T.astype(x.dtype)
    return _as_float32(logits).reshape(*tokens.shape, -1)


def shardings(heads: int) -> Rule:
    """Makes the rule by which a worker's devices share the params.

    "fsdp" shards every matrix, embeddings included; "tensor" the heads of attention
    (columns of qkv, rows of out) and the hidden units of the MLP. Vectors stay whole.

    Args:
        heads: attention heads, which "tensor" must divide.
    """

    def spec(
        path: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> PartitionSpec:
        if heads % sizes.get(TENSOR, 1):
            raise ValueError(
                f"gpt: {TENSOR}={sizes[TENSOR]} does not divide the {heads} heads"
            )
        part, *block_path = path.split("/")
        if len(shape) - LAYERED[part] != 2:
            return PartitionSpec()
        tensor = CUT_DIMENSIONS.get(block_path[0]) if block_path else None
        return matrix(shape, sizes, LAYERED[part], tensor)

    return Rule((FSDP, TENSOR), spec)


def to_huggingface(
    params: Params, heads: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the same model as a GPT-2 of Hugging Face: config.json, and its tensors.

    Args:
        params: weights of `init`; those without a bias of queries, keys and values get
            one of zeros, which changes no logit.
        heads: attention heads.

    Raises:
        ValueError: GPT-2 cannot be such a model.
    """
    vocabulary, width = params["tokens"].shape
    if "positions" not in params:
        raise ValueError("gpt: GPT-2 has learnt positions, and this model rotary ones")
    layers, attention, _ = params["blocks"]["out"]["w"].shape
    if attention != width or width % heads:
        raise ValueError(
            f"gpt: the heads of a GPT-2 divide its width, {width}; "
            f"these are {heads}, of {attention} numbers together"
        )
    end_token = vocabulary - 1 if vocabulary == SHAPES["gpt2"].vocabulary else None
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": len(params["positions"]),
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        # Of other vocabularies no token is known to be an end.
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        # Nothing was dropped here.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    params = jax.tree.map(np.asarray, params)
    zero_bias = {"b": np.zeros((layers, 3 * width), np.float32)}
    blocks = params["blocks"] | {"qkv": zero_bias | params["blocks"]["qkv"]}
    # Theirs are (inputs, outputs), as ours.
    tensors = {
        "wte.weight": params["tokens"],
        "wpe.weight": params["positions"],
        "ln_f.weight": params["norm"]["scale"],
        "ln_f.bias": params["norm"]["b"],
    }
    for part, gpt2_part in GPT2_PARTS.items():
        weight = blocks[part]["scale" if "norm" in part else "w"]
        for i in range(layers):
            tensors[f"h.{i}.{gpt2_part}.weight"] = weight[i]
            tensors[f"h.{i}.{gpt2_part}.bias"] = blocks[part]["b"][i]
    return config, {f"transformer.{name}": x for name, x in tensors.items()}


def _apply_block(
    heads: int, time: int, rotary: bool, x: jax.Array, block: Params
) -> tuple[jax.Array, None]:
    """Adds attention, then the MLP, to x, (batch × time, width)."""
    # Of another type before they are gathered: devices then send half the bytes.
    layers = {}
    for name, cut_dimension in CUT_DIMENSIONS.items():
        w = gathered(block[name]["w"].astype(x.dtype), cut_dimension)
        layers[name] = block[name] | {"w": w}
    block = block | layers
    attended = _attention(heads, time, rotary, block, _norm(block["norm1"], x))
    x = x + _linear(block["out"], attended)
    hidden = jax.nn.gelu(_linear(block["up"], _norm(block["norm2"], x)))  # by tanh
    return x + _linear(block["down"], hidden), None


def _attention(
    heads: int, time: int, rotary: bool, block: Params, x: jax.Array
) -> jax.Array:
    """Reads, at each position, from itself and those before it."""
    qkv = jnp.split(_linear(block["qkv"], x), 3, axis=-1)
    # (batch, time, heads, head size)
    q, k, v = (y.reshape(-1, time, heads, y.shape[-1] // heads) for y in qkv)
    if rotary:
        q = _rotate_positions(q)
        k = _rotate_positions(k)
    products = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = _as_float32(products) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(len(x), -1)


def _rotate_positions(x: jax.Array) -> jax.Array:
    """Turns pairs of numbers of (batch, time, heads, size) by their position."""
    half = x.shape[-1] // 2  # a pair is numbers i and i + half
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates  # (time, 1, half)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    a, b = jnp.split(_as_float32(x), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def _linear(layer: Params, x: jax.Array) -> jax.Array:
    """Maps the last axis."""
    y = x @ layer["w"]
    return y + layer["b"].astype(y.dtype) if "b" in layer else y


def _norm(layer: Params, x: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    float_x = _as_float32(x)
    centred = float_x - float_x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    y = centred * lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["b"]
    return y.astype(x.dtype)


def _as_float32(x: jax.Array) -> jax.Array:
    """Returns x as float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _norm_init(*shape: int) -> Params:
    return {"scale": jnp.ones(shape), "b": jnp.zeros(shape)}
