"""Handwritten digits of 8×8 pixels, which ship with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.tasks.classify import fields, make_labelled_data, perceptron
from experiments.tasks.task import Data, Task


def digits(model: Literal["mlp"] = "mlp") -> Task:
    """1,797 images of 8×8 in 10 classes, one fifth of them held out.

    Args:
        model: mlp, with two hidden layers of 128 units.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998;
    the copy in scikit-learn.
    """
    return Task(
        **fields(perceptron(64, 128, 128, 10)),
        load=_load,
        batch_size=64,
        steps=480,
        lr={"sgd": 0.05, "": 1e-3},
        dispatch_steps=48,
    )


def _load() -> Data:
    images, labels = _table()
    # The same split for every seed, so that runs differ only in training.
    order = np.random.default_rng(0).permutation(len(labels))
    # Pixels are from 0 to 16.
    x = np.asarray(images, np.float32)[order] / 16
    y = np.asarray(labels, np.int32)[order]
    held_out = len(labels) // 5
    test = {"x": x[:held_out], "y": y[:held_out]}
    return make_labelled_data({"x": x[held_out:], "y": y[held_out:]}, test)


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Reads scikit-learn's images, (1797, 64), and labels."""
    # Importing sklearn takes a second, as it imports scipy.stats and pandas. Reading
    # its file of 57 kB takes 0.02 s.
    spec = find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets/data/digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1]
    # The file is elsewhere in this version, or scikit-learn is not installed.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)
