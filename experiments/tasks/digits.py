"""Handwritten digits of 8×8 pixels, which ship with scikit-learn."""

import numpy as np

from experiments.tasks import muon
from experiments.tasks.classify import values
from experiments.tasks.task import Data, Task, fitting
from models import mlp, sharding

SIZES = (64, 128, 128, 10)


def digits(model: str = "mlp") -> Task:
    """1,797 images of 8×8 in 10 classes, one fifth of them held out.

    Args:
        model: mlp, the only one that fits.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998;
    the copy in scikit-learn.
    """
    fitting("digits", model, ["mlp"])
    return Task(
        init=lambda key: (mlp.init(key, SIZES), ()),
        apply=_apply,
        load=_load,
        batch_size=64,
        steps=480,
        lr={"sgd": 0.05, "": 1e-3},
        dispatch_steps=48,
        muon=muon.dimension_numbers,
        shardings=sharding.MATRICES,
    )


def _load() -> Data:
    # Its import takes a second, which --help and other tasks need not wait for.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # The same split for every seed, so that runs differ in training alone.
    order = np.random.default_rng(0).permutation(len(labels))
    # Pixels count from 0 to 16.
    x = np.asarray(images, np.float32)[order] / 16
    y = np.asarray(labels, np.int32)[order]
    held_out = len(labels) // 5
    return Data(
        train={"x": x[held_out:], "y": y[held_out:]},
        test={"x": x[:held_out], "y": y[:held_out]},
        groups={"label": y[held_out:]},
    )


def _apply(params, buffers, batch, key, train):
    return values(mlp.apply(params, batch["x"]), batch["y"]), buffers
