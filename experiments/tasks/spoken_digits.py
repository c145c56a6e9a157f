"""Spoken digits: an LSTM on the log-mel frames of recordings."""

from functools import partial
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from experiments.data import formats
from experiments.tasks.classify import muon_axes, values
from experiments.tasks.task import Data, Task
from models import lstm, sharding
from syncalgos import checks


def spoken_digits(
    data_dir: Path | None = None,
    model: Literal["lstm"] = "lstm",
    hidden: int = 128,
    layers: int = 1,
    frames: int = 64,
    remat: bool = False,
) -> Task:
    """Free Spoken Digit recordings: 2,700 by six speakers, and 300 held out.

    A recording is classified by the mean of the outputs over its frames.

    Args:
        data_dir: folder of data sets.
        model: lstm, and a layer on the mean of its outputs.
        hidden: units of each layer.
        layers: number of LSTM layers.
        frames: number of frames, of 16 ms each; longer recordings are cut.
        remat: recompute chunks of frames for the gradient, to save memory.

    Source: Jackson et al., "Free Spoken Digit Dataset", version 1.0.10.
    """
    for name, value in {"hidden": hidden, "layers": layers, "frames": frames}.items():
        checks.whole(f"--{name}", value, least=1)
    if frames > formats.LONGEST:
        raise ValueError(
            f"--frames must be at most {formats.LONGEST}, the longest recording's, got "
            f"{frames}"
        )
    # The gradient stores the carries of all chunks and the frames of one. Both grow as
    # the root of the number of frames.
    chunk = round(frames**0.5) if remat else None

    def apply(params, buffers, batch, key, train):
        outputs = lstm.apply(params, batch["x"], chunk)  # (batch, frames, 10)
        return values(mean_output(outputs, batch["length"]), batch["y"]), buffers

    return Task(
        init=lambda key: (lstm.init(key, formats.BANDS, hidden, 10, layers), ()),
        apply=apply,
        load=partial(_load, data_dir, frames),
        batch_size=64,
        steps=400,
        optimizer="adam",
        lr={"sgd": 0.1, "": 1e-3},
        clip_norm=1.0,
        dispatch_steps=8,
        eval_batch=300,
        muon=muon_axes,
        shardings=sharding.MATRICES,
    )


def mean_output(outputs, length):
    """Averages outputs over each recording's own frames.

    Args:
        outputs: (batch, frames, classes).
        length: (batch,), frames without padding.

    Returns:
        (batch, classes).
    """
    # `where`, not a product: 0 × inf would be NaN.
    is_frame = jnp.arange(outputs.shape[1]) < length[:, None]  # (batch, frames)
    return jnp.where(is_frame[..., None], outputs, 0).sum(1) / length[:, None]


def _load(data_dir: Path | None, frames: int) -> Data:
    train, test, speakers = formats.spoken_digits(data_dir, frames)
    return Data(train, test, groups={"label": train["y"], "speaker": speakers})
