"""Pieces of clothing in MNIST's format."""

from pathlib import Path
from typing import Literal

from experiments.tasks import mnist
from experiments.tasks.task import Task
from syncalgos.collectives import WORKERS, Axis


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
    moments = (0.2860, 0.3530)
    return mnist.images(
        "fashion_mnist", moments, data_dir, model, batch_norm, remat, axis
    )
