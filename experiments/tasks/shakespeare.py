"""The next character of Shakespeare's text."""

import math
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.data import tokens
from experiments.tasks.language import check_sizes, fields
from experiments.tasks.task import Data, Task
from models import gpt

CHARACTERS = 65
# The most training windows that contain the same character. Windows from every start
# would need as many copies of the text, on every device, as a window is long.
OVERLAP = 8


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
        load=partial(_load, data_dir, context),
        batch_size=16,
        steps=400,
        lr={"sgd": 0.1, "": 2e-3},
        eval_batch=256,
        figures={"bits_per_character": lambda nats: nats / math.log(2)},
        blank=partial(_blank, context),
    )


def _load(data_dir: Path | None, context: int) -> Data:
    codes, alphabet = tokens.characters(tokens.shakespeare(data_dir))
    # The model is made before the text is read.
    assert len(alphabet) == CHARACTERS
    # One byte each, because windows repeat every character on the device.
    return _data(codes.astype(np.uint8), context)


def _blank(context: int) -> Data:
    """Makes the data of a text with the same length, of one repeated character."""
    return _data(np.zeros(tokens.SHAKESPEARE.size, np.uint8), context)


def _data(codes: np.ndarray, context: int) -> Data:
    """Cuts the characters of a text into windows."""
    train, test = tokens.split(codes)
    if context >= len(test):
        raise ValueError(
            f"--context {context} is longer than the held-out text "
            f"({len(test)} characters)"
        )
    stride = -(-context // OVERLAP)
    # The first character of a held-out window is the last one of the window before, so
    # that each is predicted once. The end that does not fill a window is left out.
    return Data(
        train={"window": tokens.windows(train, context + 1, stride)},
        test={"window": tokens.windows(test, context + 1, context)},
        overlapping=context // stride,
        covering=context // stride,
    )
