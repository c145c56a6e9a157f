"""Handwritten digits of 28×28 pixels, and tasks with the same format."""

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
    return images("mnist", (0.1307, 0.3081), data_dir, model, batch_norm, remat, axis)


def images(
    name: Literal["mnist", "fashion_mnist"],
    moments: tuple[float, float],
    data_dir: Path | None,
    model: str,
    batch_norm: classify.BatchNorm,
    remat: bool,
    axis: Axis,
) -> Task:
    """Makes a task of MNIST's format; `moments` are its pixels' mean and deviation."""
    network = classify.network(model, SHAPE, 10, batch_norm, remat, axis)

    def prepare(x, key, train):
        return classify.normalised(x[..., None], *moments)

    return Task(
        **classify.fields(network, prepare),
        load=lambda: classify.labelled(
            *formats.mnist_images(name.replace("_", "-"), data_dir)
        ),
        batch_size=64,
        steps=1000,
        lr={"sgd": 0.004, "": 5e-4},
        momentum=0.9,
        dispatch_steps=16,
        eval_batch=250,
    )
