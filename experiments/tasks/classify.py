"""Parts that tasks share: models of images by name, cross-entropy, Muon's axes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from experiments.tasks.task import Arrays, Data, Shardings
from models import lenet, mlp, resnet, sharding
from syncalgos import checks
from syncalgos.collectives import Axis, PyTree

BatchNorm = Literal["worker", "global"]
MATRICES = {"w", "recurrent"}
# Output layers, which Muon leaves to Adam, like embeddings and biases.
HEADS = {"dense", "output"}

DENSE = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
CONVOLUTION = MuonDimensionNumbers(reduction_axis=(-4, -3, -2), output_axis=-1)
RESNETS = {"resnet20": resnet.RESNET20, "resnet50": resnet.RESNET50}


class ImageModel(NamedTuple):
    """A model for images.

    Attributes:
        init: key -> (params, buffers).
        apply: (params, buffers, images, train) -> (logits, buffers).
        layered: the leaves that hold several layers (see `Task.layered`).
        sends: a description of the data that its loss sends (see `Task.sends`).
        shardings: the rule by which devices share the params (see `Task.shardings`).
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, jax.Array, bool], tuple[jax.Array, PyTree]]
    layered: PyTree = 0
    sends: str = ""
    shardings: Shardings | None = None


def without_buffers(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[[PyTree, jax.Array], jax.Array],
    shardings: Shardings | None = None,
) -> ImageModel:
    """Makes a network of a model without buffers: init(key), apply(params, x)."""
    return ImageModel(
        init=lambda key: (init(key), ()),
        apply=lambda params, buffers, x, train: (apply(params, x), buffers),
        shardings=shardings,
    )


def perceptron(*sizes: int) -> ImageModel:
    """Makes a multilayer perceptron, whose input is a row of an image's pixels."""
    return without_buffers(
        lambda key: mlp.init(key, sizes),
        lambda params, x: mlp.apply(params, x.reshape(len(x), -1)),
        sharding.MATRICES,
    )


def network(
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    batch_norm: BatchNorm,
    remat: bool,
    axis: Axis,
) -> ImageModel:
    """Makes a model for images.

    Args:
        model: mlp, lenet or a resnet.
        shape: the shape of an image, (height, width, channels).
        classes: the number of classes.
        batch_norm: statistics of each worker's batch, or of the global batch.
        remat: whether blocks are recomputed for the gradient.
        axis: the axis of the workers.

    Raises:
        ValueError: the model does not support these arguments.
    """
    if model in RESNETS:
        spec = RESNETS[model]
        is_global = batch_norm == "global"
        # The workers of a run lie along mapped axes, never over Peers.
        statistics_axis = cast(str | tuple[str, ...], axis) if is_global else None
        return ImageModel(
            init=lambda key: resnet.init(key, spec, classes, shape[-1]),
            apply=lambda params, buffers, x, train: resnet.apply(
                spec, params, buffers, x, train, statistics_axis, remat
            ),
            layered=resnet.layered(spec),
            sends="batch statistics of every layer" if is_global else "",
        )
    # Not ignored: a flag without effect would silently spoil a comparison.
    for flag, is_set in (("--remat", remat), ("--batch-norm", batch_norm == "global")):
        if is_set:
            raise ValueError(
                f"{flag}: model {model!r} has no blocks with batch normalisation: use "
                "resnet20"
            )
    if model == "lenet":
        if min(shape[:2]) < 16:
            raise ValueError(
                f"--model lenet takes pictures of at least 16×16, got {shape}: use "
                "resnet20"
            )
        init = partial(lenet.init, classes=classes, channels=shape[-1], sides=shape[:2])
        return without_buffers(init, lenet.apply)
    return perceptron(math.prod(shape), 128, 128, classes)


def fields(
    network: ImageModel,
    prepare: Callable[[jax.Array, jax.Array, bool], jax.Array] | None = None,
) -> dict[str, Any]:
    """Returns the fields of a Task that follow from its model.

    Args:
        network: the model.
        prepare: (images, key, train) -> the model's inputs; None passes the images on.
    """

    def apply(params, buffers, batch, key, train):
        x = batch["x"] if prepare is None else prepare(batch["x"], key, train)
        logits, buffers = network.apply(params, buffers, x, train)
        return values(logits, batch["y"]), buffers

    # The other fields of a Network are those of a Task.
    return network._asdict() | {"apply": apply, "muon": muon_axes}


def make_labelled_data(train: Arrays, test: Arrays) -> Data:
    """Makes the data of a task, with its labels as groups."""
    return Data(train, test, groups={"label": train["y"]})


def values(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Returns, per example, cross-entropy in nats and whether the top class is right.

    Args:
        logits: (batch, classes).
        y: (batch,), the right classes.
    """
    hits = jnp.argmax(logits, axis=-1) == y
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {"loss": loss, "accuracy": jnp.float32(hits)}


def normalise_images(x: jax.Array, mean: Any, deviation: Any) -> jax.Array:
    """Converts bytes, (..., channels), to float32 of mean 0 and deviation 1."""
    # On the device: the stored data would take four times the memory as float32.
    return (x.astype(jnp.float32) / 255 - jnp.asarray(mean)) / jnp.asarray(deviation)


def muon_axes(params: PyTree) -> PyTree:
    """Returns Muon's dimension numbers for params of a model in models/.

    Muon orthogonalises hidden matrices; in stacked ones, each layer separately.

    Returns:
        A tree like params: the axes of each hidden matrix; None for the leaves that
        Adam updates: biases, norms, embeddings and the output layer.
    """
    # optax only counts axes: it would treat stacked biases as matrices, and not treat
    # stacked matrices as matrices.
    last_layer = str(len(params) - 1) if isinstance(params, list) else None

    def find_axes(path, x):
        names = checks.leaf_name(path).split("/")
        if names[-1] not in MATRICES or names[0] in {*HEADS, last_layer}:
            return None
        return CONVOLUTION if x.ndim >= 4 else DENSE

    return jax.tree_util.tree_map_with_path(find_axes, params)
