"""Handwritten digits of 28×28 pixels, and pieces of clothing in the same format."""

from pathlib import Path
from typing import Literal

from experiments.data import formats
from experiments.tasks import classify
from experiments.tasks.task import Task
from syncalgos.collectives import WORKERS, Axis

SHAPE = (28, 28, 1)


def mnist(
    data_dir: Path | None = None,
    model: Literal["lenet", "resnet20", "mlp"] = "lenet",
    batch_norm: Literal["worker", "global"] = "worker",
    remat: bool = False,
    axis: Axis = WORKERS,
) -> Task:
    """MNIST: 60,000 handwritten digits, and 10,000 held out.

    Args:
        data_dir: folder of data sets.
        model: lenet, resnet20 or mlp.
        batch_norm: for resnet20: statistics of each worker's batch, or the global one.
        remat: for resnet20: recompute blocks for the gradient, to save memory.
        axis: the axis of the workers.

    Source: LeCun et al., "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE, 1998.
    """
    network = classify.network(model, SHAPE, 10, batch_norm, remat, axis)
    return _task("mnist", data_dir, network, mean=0.1307, deviation=0.3081)


def fashion_mnist(
    data_dir: Path | None = None,
    model: Literal["lenet", "resnet20", "mlp"] = "lenet",
    batch_norm: Literal["worker", "global"] = "worker",
    remat: bool = False,
    axis: Axis = WORKERS,
) -> Task:
    """Fashion-MNIST: 60,000 pieces of clothing in 10 classes, and 10,000 held out.

    Args:
        data_dir: folder of data sets.
        model: lenet, resnet20 or mlp.
        batch_norm: for resnet20: statistics of each worker's batch, or the global one.
        remat: for resnet20: recompute blocks for the gradient, to save memory.
        axis: the axis of the workers.

    Source: Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for
    benchmarking machine learning algorithms", 2017.
    """
    network = classify.network(model, SHAPE, 10, batch_norm, remat, axis)
    return _task("fashion-mnist", data_dir, network, mean=0.2860, deviation=0.3530)


def _task(
    name: str,
    data_dir: Path | None,
    network: classify.ImageModel,
    mean: float,
    deviation: float,
) -> Task:
    """Makes a task of MNIST's format, whose pixels have this mean and deviation."""

    def prepare(x, key, train):
        return classify.normalise_images(x[..., None], mean, deviation)

    return Task(
        **classify.fields(network, prepare),
        load=lambda: classify.make_labelled_data(*formats.mnist_images(name, data_dir)),
        batch_size=64,
        steps=1000,
        lr={"sgd": 0.004, "": 5e-4},
        momentum=0.9,
        dispatch_steps=16,
        eval_batch=250,
    )
