"""Generated tokens for shapes of GPT-2, to measure and plan runs without data."""

from functools import partial
from typing import Literal

import numpy as np

from experiments.tasks.language import fields
from experiments.tasks.task import Data, Task
from models import gpt
from syncalgos import checks

OCCURRING = 64  # tokens, so that the loss falls within a short run
EXAMPLES, HELD_OUT = 4096, 32


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
    # Not all shapes have all parts of a GPT.
    made = fields(shape.init, shape.heads, remat, dtype) | {"stacked": shape.stacked}
    return Task(
        **made,
        load=partial(_load, shape.context),
        batch_size=8,
        steps=160,
        lr={"sgd": 0.1, "": 6e-4},
        eval_batch=8,
    )


def _load(context: int) -> Data:
    """Makes windows of context + 1 tokens, the same ones in every run."""
    rng = np.random.default_rng(0)
    first = rng.integers(OCCURRING, size=(EXAMPLES + HELD_OUT, 1))
    stride = rng.integers(1, 5, size=first.shape)
    tokens = (first + stride * np.arange(context + 1)) % OCCURRING
    window = tokens.astype(np.uint16)  # as many tokens as GPT-2 has fit
    return Data({"window": window[HELD_OUT:]}, {"window": window[:HELD_OUT]})
