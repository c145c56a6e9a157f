"""MNIST-1D: digits as curves of 40 numbers, made by the package mnist1d."""

import random
from functools import partial
from typing import Literal

import numpy as np

from experiments.tasks.classify import (
    fields,
    make_labelled_data,
    perceptron,
    without_buffers,
)
from experiments.tasks.task import Arrays, Data, Task
from models import convolution_1d

# The units of a perceptron's hidden layers; logistic regression has none.
HIDDEN = {"mlp": (100, 100), "wide": (475, 475), "logistic": ()}


def mnist1d(
    model: Literal["cnn", "mlp", "wide", "logistic"] = "cnn",
    test_seed: int | None = None,
) -> Task:
    """MNIST-1D: 4,000 curves of 40 numbers in 10 classes, and 1,000 held out.

    It is small, but separates models well: as published, logistic regression reaches
    32 %, a multilayer perceptron 68 % and convolutions 94 %. The curves are generated,
    and are the same each time.

    Args:
        model: cnn, mlp, wide (an mlp of 250,335 params) or logistic.
        test_seed: the seed of other test curves; None means the package's own curves.

    Source: Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", 2020.
    """
    if model == "cnn":
        network = without_buffers(convolution_1d.init, convolution_1d.apply)
    else:
        network = perceptron(40, *HIDDEN[model], 10)
    return Task(
        **fields(network),
        load=partial(_load, test_seed),
        batch_size=64,
        steps=1200,
        lr={"sgd": 0.05, "": 0.003},
        momentum=0.9,
        dispatch_steps=60,
    )


def _load(test_seed: int | None) -> Data:
    train, test = _make_data()
    return make_labelled_data(
        train, test if test_seed is None else _make_data(test_seed)[1]
    )


def _make_data(seed: int | None = None) -> tuple[Arrays, Arrays]:
    """Makes the curves to train on and to test on; None is the package's own seed."""
    # This imports matplotlib and scipy, which takes a second.
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    if seed is not None:
        vars(arguments)["seed"] = seed
    # `make_dataset` seeds the global generators of the process.
    random_states = random.getstate(), np.random.get_state()
    try:
        dataset = make_dataset(arguments)
    finally:
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
    x = partial(np.asarray, dtype=np.float32)
    y = partial(np.asarray, dtype=np.int32)
    train = {"x": x(dataset["x"]), "y": y(dataset["y"])}
    return train, {"x": x(dataset["x_test"]), "y": y(dataset["y_test"])}
