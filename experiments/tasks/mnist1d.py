"""MNIST-1D: digits as curves of 40 numbers, made by the package mnist1d."""

import functools
import random
from typing import Literal

import numpy as np

from experiments.tasks import muon
from experiments.tasks.classify import labelled, values
from experiments.tasks.task import Data, Task
from models import convolution_1d, mlp, sharding

LENGTH, CLASSES = 40, 10
# Layers of a multilayer perceptron; logistic regression is one layer.
SIZES = {"mlp": (LENGTH, 100, 100, CLASSES), "logistic": (LENGTH, CLASSES)}


def mnist1d(model: Literal["cnn", "mlp", "logistic"] = "cnn") -> Task:
    """MNIST-1D: 4,000 curves of 40 numbers in 10 classes, and 1,000 held out.

    It is small, and yet tells models apart. As published, logistic regression reaches
    32 %, a multilayer perceptron 68 % and convolutions 94 %. The curves are drawn, the
    same ones each time.

    Args:
        model: cnn, mlp or logistic.

    Source: Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", 2020.
    """
    if model == "cnn":
        init, logits = convolution_1d.init, convolution_1d.apply
    else:
        init, logits = functools.partial(mlp.init, sizes=SIZES[model]), mlp.apply

    def apply(params, buffers, batch, key, train):
        return values(logits(params, batch["x"]), batch["y"]), buffers

    return Task(
        init=lambda key: (init(key), ()),
        apply=apply,
        load=_load,
        batch_size=64,
        steps=1200,
        lr={"sgd": 0.05, "": 0.003},
        momentum=0.9,
        dispatch_steps=60,
        muon=muon.dimension_numbers,
        shardings=None if model == "cnn" else sharding.MATRICES,
    )


def _load() -> Data:
    # It imports matplotlib and scipy, which takes a second.
    from mnist1d.data import get_dataset_args, make_dataset

    # It seeds the generators of the whole process.
    before = random.getstate(), np.random.get_state()
    try:
        made = make_dataset(get_dataset_args())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    train, test = (
        {
            "x": np.asarray(made[f"x{part}"], np.float32),
            "y": np.asarray(made[f"y{part}"], np.int32),
        }
        for part in ("", "_test")
    )
    return labelled(train, test)
