"""CIFAR-10 with the usual augmentation."""

from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from experiments.data import formats
from experiments.tasks import classify
from experiments.tasks.task import Task
from syncalgos.collectives import WORKERS, Axis

SHAPE = (32, 32, 3)
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
BORDER = 4  # zeros around an image, before it is cropped


def cifar10(
    data_dir: Path | None = None,
    model: Literal["resnet20"] = "resnet20",
    batch_norm: Literal["worker", "global"] = "worker",
    remat: bool = False,
    axis: Axis = WORKERS,
) -> Task:
    """CIFAR-10: 50,000 photographs in 10 classes, and 10,000 held out.

    Training images are shifted by up to 4 pixels, and half of them mirrored.

    Args:
        data_dir: folder of data sets.
        model: resnet20, the network published for these images.
        batch_norm: statistics of each worker's own batch, or of the global batch.
        remat: recompute blocks for the gradient, to save memory.
        axis: the axis of the workers.

    Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009;
    augmentation and rates: He et al., 2016, section 4.2.
    """
    network = classify.network(model, SHAPE, 10, batch_norm, remat, axis)

    def prepare(x, key, train):
        x = classify.normalise_images(x, MEAN, DEVIATION)
        return augment(key, x) if train else x

    return Task(
        **classify.fields(network, prepare),
        load=lambda: classify.make_labelled_data(*formats.cifar_images(data_dir)),
        batch_size=128,
        steps=2000,
        lr={"sgd": 0.02, "": 1e-3},
        momentum=0.9,
        weight_decay=1e-4,
        schedule="step",
        dispatch_steps=8,
        eval_batch=256,
    )


def augment(key: jax.Array, x: jax.Array) -> jax.Array:
    """Shifts each image by up to 4 pixels, filled with zeros, and mirrors half.

    Args:
        key: the key for the draws.
        x: images, (batch, height, width, channels).
    """
    bounds = jnp.array([2 * BORDER + 1, 2 * BORDER + 1, 2])
    # One call for all draws, because each call of the generator takes time to compile.
    draws = jax.random.randint(key, (len(x), 3), 0, bounds)
    padded = jnp.pad(x, [(0, 0), (BORDER, BORDER), (BORDER, BORDER), (0, 0)])

    def crop_one(padded, draw):
        shifted = jax.lax.dynamic_slice(padded, (draw[0], draw[1], 0), x.shape[1:])
        return jnp.where(draw[2], shifted[:, ::-1], shifted)

    return jax.vmap(crop_one)(padded, draws)
