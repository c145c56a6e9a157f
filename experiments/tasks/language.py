"""Tasks of next tokens, by a GPT: the parts that they share, and two of them."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import tokens
from experiments.tasks.classify import muon_axes, values
from experiments.tasks.task import Data, Task
from models import gpt
from syncalgos import checks

CHARACTERS = 65
# The most training windows that contain the same character. Windows from every start
# would need as many copies of the text, on every device, as a window is long.
OVERLAP = 8
OCCURRING = 64  # tokens, so that the loss falls within a short run
EXAMPLES = 4096
HELD_OUT = 32
# Fields of a Task.
TRAINING: dict[str, Any] = {
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "schedule": "cosine",
    "warmup": 0.05,
    "dispatch_steps": 5,
    "muon": muon_axes,
}


def check_sizes(context: int, width: int, layers: int, heads: int) -> None:
    """Raises a ValueError if these are not valid sizes of a GPT."""
    sizes = {"context": context, "width": width, "layers": layers, "heads": heads}
    for name, value in sizes.items():
        checks.whole(f"--{name}", value, least=1)
    if width % heads:
        raise ValueError(
            f"--heads {heads} does not divide --width {width}: use a width that is a "
            "multiple of the heads"
        )


def fields(
    init: Callable[[jax.Array], gpt.Params],
    heads: int,
    remat: bool,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> dict[str, Any]:
    """Returns the fields of a Task in which a GPT predicts each next token of windows.

    Args:
        init: draws the params.
        heads: number of attention heads.
        remat: whether blocks are recomputed for the gradient.
        dtype: type of products and activations.
    """

    def apply(params, buffers, batch, key, train):
        window = batch["window"].astype(jnp.int32)  # (batch, context + 1)
        half = jnp.bfloat16 if dtype == "bfloat16" else None
        logits = gpt.apply(params, window[:, :-1], heads, remat, half)
        means = {k: x.mean(1) for k, x in values(logits, window[:, 1:]).items()}
        if "bytes" in batch:
            means["bytes_per_token"] = batch["bytes"] / (window.shape[1] - 1)
        return means, buffers

    return TRAINING | {
        "init": lambda key: (init(key), ()),
        "apply": apply,
        "layered": gpt.LAYERED,
        "shardings": gpt.shardings(heads),
    }


def shakespeare(
    data_dir: Path | None = None,
    model: Literal["gpt"] = "gpt",
    context: int = 64,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    remat: bool = False,
) -> Task:
    """The next of 1,115,394 characters by Shakespeare, the last tenth held out.

    Args:
        data_dir: folder of data sets.
        model: gpt, a transformer.
        context: characters that the model sees.
        width: width of the model.
        layers: number of blocks.
        heads: number of attention heads, which divides the width.
        remat: recompute blocks for the gradient, to save memory.

    Source: the text of Karpathy, "The unreasonable effectiveness of recurrent neural
    networks", 2015.
    """
    check_sizes(context, width, layers, heads)

    def init(key):
        return gpt.init(key, CHARACTERS, context, width, layers)

    return Task(
        **fields(init, heads, remat),
        load=partial(_load_shakespeare, data_dir, context),
        batch_size=16,
        steps=400,
        lr={"sgd": 0.1, "": 2e-3},
        eval_batch=256,
        figures={"bits_per_character": lambda nats: nats / math.log(2)},
        # Of the same length, one repeated character.
        blank=lambda: _data(np.zeros(tokens.SHAKESPEARE.size, np.uint8), context),
    )


def _load_shakespeare(data_dir: Path | None, context: int) -> Data:
    codes, alphabet = tokens.characters(tokens.shakespeare(data_dir))
    # The model is made before the text is read.
    assert len(alphabet) == CHARACTERS
    # One byte each, because windows repeat every character on the device.
    return _data(codes.astype(np.uint8), context)


def _data(codes: np.ndarray, context: int) -> Data:
    """Cuts the characters of a text into windows."""
    train, test = tokens.split(codes)
    if context >= len(test):
        raise ValueError(
            f"--context {context} is longer than the held-out text ({len(test)} "
            f"characters): use at most {len(test) - 1}"
        )
    # It divides the context, so that a stretch of windows can hold each character once.
    strides = range(-(-context // OVERLAP), context + 1)
    stride = next(x for x in strides if context % x == 0)
    # The first character of a held-out window is the last one of the window before, so
    # that each is predicted once. The end that does not fill a window is left out.
    return Data(
        train={"window": tokens.windows(train, context + 1, stride)},
        test={"window": tokens.windows(test, context + 1, context)},
        overlapping=context // stride,
        covering=context // stride,
    )


def gpt2_synthetic(
    model: str = "gpt2",
    positions: Literal["learnt", "rotary"] = "learnt",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    remat: bool = False,
) -> Task:
    """Windows that count up from a token in steps of 1 to 4, as long as the context.

    Only a few of the model's tokens occur, so that the loss falls within a short run.

    Args:
        model: a shape of models.gpt.SHAPES, such as gpt2, gpt2-medium, gpt2-tiny or
            diloco-150m.
        positions: position embeddings: learnt, as in GPT-2, or rotary.
        dtype: type of products and activations; params, norms and softmax are float32.
        remat: recompute blocks for the gradient, to save memory.
    """
    checks.one_of("--model", model, gpt.SHAPES)
    shape = gpt.SHAPES[model]._replace(rotary=positions == "rotary")
    task = Task(
        **fields(shape.init, shape.heads, remat, dtype),
        load=partial(_counting, shape.context),
        batch_size=8,
        steps=160,
        lr={"sgd": 0.1, "": 6e-4},
        eval_batch=8,
    )
    # Rotary positions are no params.
    return task._replace(layered=shape.layered)


def _counting(context: int) -> Data:
    """Makes windows of context + 1 tokens, the same ones in every run."""
    rng = np.random.default_rng(0)
    first_codes = rng.integers(OCCURRING, size=(EXAMPLES + HELD_OUT, 1))
    stride = rng.integers(1, 5, size=first_codes.shape)
    codes = (first_codes + stride * np.arange(context + 1)) % OCCURRING
    window = codes.astype(np.uint16)  # as many tokens as GPT-2 has fit
    return Data({"window": window[HELD_OUT:]}, {"window": window[:HELD_OUT]})
