"""Parts that tasks of next tokens share: sizes, the loss and training settings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.tasks import muon
from experiments.tasks.classify import values
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


def next_token(
    logits: Callable[[jax.Array], jax.Array], window: jax.Array
) -> dict[str, jax.Array]:
    """Returns, per window, the mean loss and accuracy of predicting each next token.

    Args:
        logits: maps tokens, (batch, context) int32, to the logits of each next token.
        window: tokens, (batch, context + 1).
    """
    window = window.astype(jnp.int32)
    found = values(logits(window[:, :-1]), window[:, 1:])
    return {name: x.mean(1) for name, x in found.items()}
