"""Parts that tasks of next tokens share: training settings, a GPT and its sizes."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments.tasks import muon
from experiments.tasks.classify import values
from models import gpt
from syncalgos import checks

# Fields of a Task.
TRAINING: dict[str, Any] = {
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "schedule": "cosine",
    "warmup": 0.05,
    "dispatch_steps": 5,
    "muon": muon.dimension_numbers,
}


def check_sizes(context: int, width: int, layers: int, heads: int) -> None:
    """Raises a ValueError if these are not valid sizes of a GPT."""
    sizes = {"context": context, "width": width, "layers": layers, "heads": heads}
    for name, value in sizes.items():
        checks.whole(f"--{name}", value, least=1)
    if width % heads:
        raise ValueError(f"--heads {heads} does not divide --width {width}")


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
        "stacked": gpt.STACKED,
        "shardings": gpt.shardings(heads),
    }
