"""What image tasks share: models by name, and classification's loss and accuracy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.tasks.task import fitting
from models import lenet, mlp, resnet
from syncalgos.collectives import Axis, PyTree

BatchNorm = Literal["worker", "global"]
Network = tuple[
    Callable[[jax.Array], tuple[PyTree, PyTree]],
    Callable[[PyTree, PyTree, jax.Array, bool], tuple[jax.Array, PyTree]],
]

RESNETS = {"resnet20": resnet.RESNET20, "resnet50": resnet.RESNET50}


def network(
    task: str,
    model: str,
    models: Sequence[str],
    shape: tuple[int, int, int],
    classes: int,
    batch_norm: BatchNorm,
    remat: bool,
    axis: Axis,
) -> Network:
    """A model for images.

    Args:
        task: its name, for errors.
        model: mlp, lenet or a resnet.
        models: those that fit the task.
        shape: of an image, (height, width, channels).
        classes: how many there are.
        batch_norm: statistics of each worker's batch, or of the global batch.
        remat: whether blocks are computed again for the gradient.
        axis: over which the workers lie.

    Returns:
        init: key -> (params, buffers), and apply: (params, buffers, images, train) ->
        (logits, buffers).

    Raises:
        ValueError: a model that does not fit, or lacks what is asked for.
    """
    fitting(task, model, models)
    if model in RESNETS:
        spec = RESNETS[model]
        axis_name = axis if batch_norm == "global" else None

        def apply(params, buffers, x, train):
            return resnet.apply(spec, params, buffers, x, train, axis_name, remat)

        return partial(_init_resnet, spec, classes, shape[-1]), apply
    resnets = ", ".join(name for name in models if name in RESNETS)
    for flag, asked in (("--remat", remat), ("--batch-norm", batch_norm == "global")):
        if asked:
            raise ValueError(
                f"{flag}: model {model!r} has no blocks with batch normalisation; "
                f"models of {task} that have: {resnets or 'none'}"
            )
    if model == "lenet":
        return lambda key: (lenet.init(key, classes, shape[-1]), ()), _apply_lenet
    sizes = (int(np.prod(shape)), 128, 128, classes)
    return lambda key: (mlp.init(key, sizes), ()), _apply_mlp


def _init_resnet(spec, classes, channels, key):
    return resnet.init(key, spec, classes, channels)


def _apply_lenet(params, buffers, x, train):
    return lenet.apply(params, x), buffers


def _apply_mlp(params, buffers, x, train):
    return mlp.apply(params, x.reshape(len(x), -1)), buffers


def stacked(model: str) -> PyTree:
    """Which of a model's leaves hold several layers (see `Task.stacked`)."""
    return resnet.stacked(RESNETS[model]) if model in RESNETS else 0


def statistics_sent(batch_norm: BatchNorm) -> str:
    """What a task's loss sends, in words (see `Task.sends`)."""
    return "batch statistics of every layer" if batch_norm == "global" else ""


def values(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Cross-entropy in nats and whether the most likely class is right; per example.

    Args:
        logits: (batch, classes).
        y: (batch,), classes.
    """
    hits = jnp.argmax(logits, axis=-1) == y
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {"loss": loss, "accuracy": jnp.float32(hits)}


def normalised(x: jax.Array, mean: Any, deviation: Any) -> jax.Array:
    """Bytes of pixels, (..., channels), as float32 of mean 0 and deviation 1."""
    pixels = x.astype(jnp.float32) / 255
    return (pixels - jnp.asarray(mean)) / jnp.asarray(deviation)
