"""Parts that image tasks share: models by name, cross-entropy and accuracy."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.tasks import muon
from experiments.tasks.task import Arrays, Data, Shardings
from models import lenet, mlp, resnet, sharding
from syncalgos.collectives import Axis, PyTree

BatchNorm = Literal["worker", "global"]
RESNETS = {"resnet20": resnet.RESNET20, "resnet50": resnet.RESNET50}


class Network(NamedTuple):
    """A model for images.

    Attributes:
        init: key -> (params, buffers).
        apply: (params, buffers, images, train) -> (logits, buffers).
        stacked: the leaves that hold several layers (see `Task.stacked`).
        sends: what its loss sends at every step, in words (see `Task.sends`).
        shardings: by which its devices share the params (see `Task.shardings`).
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, jax.Array, bool], tuple[jax.Array, PyTree]]
    stacked: PyTree = 0
    sends: str = ""
    shardings: Shardings | None = None


def network(
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    batch_norm: BatchNorm,
    remat: bool,
    axis: Axis,
) -> Network:
    """Makes a model for images.

    Args:
        model: mlp, lenet or a resnet.
        shape: of an image, (height, width, channels).
        classes: the number of classes.
        batch_norm: statistics of each worker's batch, or of the global batch.
        remat: whether blocks are computed again for the gradient.
        axis: the axis of the workers.

    Raises:
        ValueError: the model lacks what is asked for.
    """
    if model in RESNETS:
        spec, is_global = RESNETS[model], batch_norm == "global"
        return Network(
            init=lambda key: resnet.init(key, spec, classes, shape[-1]),
            apply=lambda params, buffers, x, train: resnet.apply(
                spec, params, buffers, x, train, axis if is_global else None, remat
            ),
            stacked=resnet.stacked(spec),
            sends="batch statistics of every layer" if is_global else "",
        )
    # Refused, not ignored: a flag without effect would spoil a comparison unnoticed.
    for flag, asked in (("--remat", remat), ("--batch-norm", batch_norm == "global")):
        if asked:
            raise ValueError(
                f"{flag}: model {model!r} has no blocks with batch normalisation: "
                "use resnet20"
            )
    if model == "lenet":
        return Network(
            init=lambda key: (lenet.init(key, classes, shape[-1]), ()),
            apply=lambda params, buffers, x, train: (lenet.apply(params, x), buffers),
        )
    return Network(
        init=lambda key: (mlp.init(key, (int(np.prod(shape)), 128, 128, classes)), ()),
        apply=lambda params, buffers, x, train: (
            mlp.apply(params, x.reshape(len(x), -1)),
            buffers,
        ),
        shardings=sharding.MATRICES,
    )


def fields(
    network: Network, prepare: Callable[[jax.Array, jax.Array, bool], jax.Array]
) -> dict[str, Any]:
    """Returns the fields of a Task that follow from its model.

    Args:
        network: the model.
        prepare: (images, key, train) -> its inputs.
    """

    def apply(params, buffers, batch, key, train):
        x = prepare(batch["x"], key, train)
        logits, buffers = network.apply(params, buffers, x, train)
        return values(logits, batch["y"]), buffers

    return {
        "init": network.init,
        "apply": apply,
        "sends": network.sends,
        "stacked": network.stacked,
        "shardings": network.shardings,
        "muon": muon.dimension_numbers,
    }


def labelled(train: Arrays, test: Arrays) -> Data:
    """Makes the data of a task whose groups are its labels."""
    return Data(train, test, groups={"label": train["y"]})


def values(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Per example, cross-entropy in nats and whether the likeliest class is right.

    Args:
        logits: (batch, classes).
        y: (batch,), the right classes.
    """
    hits = jnp.argmax(logits, axis=-1) == y
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {"loss": loss, "accuracy": jnp.float32(hits)}


def normalised(x: jax.Array, mean: Any, deviation: Any) -> jax.Array:
    """Converts bytes, (..., channels), to float32 of mean 0 and deviation 1."""
    # On the device: as float32 the data would take four times its memory.
    pixels = x.astype(jnp.float32) / 255
    return (pixels - jnp.asarray(mean)) / jnp.asarray(deviation)
