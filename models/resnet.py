"""Residual networks for images: ResNet-20 for small ones, ResNet-50 for large ones.

Source: He et al., "Deep residual learning for image recognition", CVPR 2016.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models import batch_norm
from models.convolution import conv, he_normal, overlapping_max_pool

PyTree = Any


class Spec(NamedTuple):
    """The shape of a residual network.

    Attributes:
        bottleneck: blocks of 1×1, 3×3 and 1×1 convolutions, the last with four times
            the channels, and projections where shapes change; else two of 3×3, and no
            weights in shortcuts (option A: pixels skipped, channels of zeros added).
        stages: (blocks, channels, stride of the first block) of each stage.
        stem: (kernel size, channels, stride) of the first convolution.
        pool: whether 3×3 max pooling, stride 2, follows the stem.
    """

    bottleneck: bool
    stages: tuple[tuple[int, int, int], ...]
    stem: tuple[int, int, int]
    pool: bool


RESNET20 = Spec(False, ((3, 16, 1), (3, 32, 2), (3, 64, 2)), (3, 16, 1), pool=False)
"""Section 4.2 of the paper, for CIFAR's 32×32 pixels."""

RESNET50 = Spec(
    True, ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)), (7, 64, 2), pool=True
)
"""Table 1 of the paper, for ImageNet's 224×224 pixels, strides in the 3×3 (v1.5)."""


def layered(spec: Spec) -> PyTree:
    """Returns how many leading axes of the params that `init` makes count layers."""
    stages = [{"first": 0, "rest": 1} for _ in spec.stages]
    return {"stem": 0, "stages": stages, "dense": 0}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def init(
    key: Any, spec: Spec, classes: int, channels: int = 3
) -> tuple[PyTree, PyTree]:
    """Draws He-normal weights for images with so many channels.

    Returns:
        params: stem, stages and dense. A stage is {"first": block, "rest": blocks}: its
            other blocks are equal, and theirs are stacked along a leading axis. A block
            holds convolutions and their norms, {"w", "scale", "bias"} each.
        buffers: the running statistics of each norm, {"mean", "var"}.

    The last scale of a block starts at zero, so that at first blocks are identities: an
    improvement for ResNet-50 (Goyal et al., "Accurate, large minibatch SGD", 2017).
    """
    kernel, width, _ = spec.stem
    weights = {"stem": (kernel, kernel, channels, width), "stages": []}
    for blocks, inner, stride in spec.stages:
        first, outer = _block_shapes(spec, width, inner, stride)
        rest, width = _block_shapes(spec, outer, inner, stride=1)
        stacked = {name: (blocks - 1, *shape) for name, shape in rest.items()}
        weights["stages"].append({"first": first, "rest": stacked})
    weights = he_normal(key, {**weights, "dense": (width, classes)})
    dense = {"w": weights.pop("dense"), "b": jnp.zeros(classes)}

    def norm(w: jax.Array) -> tuple[PyTree, PyTree]:
        norms = batch_norm.init(w.shape[-1])
        return jax.tree.map(lambda x: jnp.tile(x, (*w.shape[:-4], 1)), norms)

    params = jax.tree.map(lambda w: {"w": w, **norm(w)[0]}, weights)
    for stage in params["stages"]:
        for block in stage.values():
            last = block["conv3" if spec.bottleneck else "conv2"]
            last["scale"] = jnp.zeros_like(last["scale"])
    return {**params, "dense": dense}, jax.tree.map(lambda w: norm(w)[1], weights)


def _block_shapes(
    spec: Spec, width: int, inner: int, stride: int
) -> tuple[dict[str, tuple[int, ...]], int]:
    """Returns the shapes of a block's weights, and its output channels."""
    if not spec.bottleneck:
        return {"conv1": (3, 3, width, inner), "conv2": (3, 3, inner, inner)}, inner
    outer = 4 * inner
    shapes = {"conv1": (1, 1, width, inner), "conv2": (3, 3, inner, inner)}
    shapes["conv3"] = (1, 1, inner, outer)
    if stride > 1 or width != outer:
        shapes["shortcut"] = (1, 1, width, outer)
    return shapes, outer


def apply(
    spec: Spec,
    params: PyTree,
    buffers: PyTree,
    x: jax.Array,
    train: bool,
    axis_name: str | tuple[str, ...] | None = None,
    remat: bool = False,
) -> tuple[jax.Array, PyTree]:
    """Maps images to logits.

    Args:
        spec: what `init` was given.
        params: of `init`.
        buffers: of `init`, or of an earlier call.
        x: (batch, height, width, channels).
        train: normalise by the batch and update the buffers; else normalise by them.
        axis_name: see `batch_norm.apply`.
        remat: keep only the inputs of blocks, and compute the rest again for the
            gradient: less memory for a second forward pass, in which global statistics
            are sent again.

    Returns:
        Logits, (batch, classes), and the buffers.

    Padding is SAME: on images of even size a window of stride 2 lies one pixel further
    right and down than in PyTorch.
    """

    def layer(params, buffers, x, stride):
        y = conv(x, params["w"], stride)
        return batch_norm.apply(params, buffers, y, train, axis_name)

    block = functools.partial(_block, layer)
    if remat:
        block = jax.checkpoint(block, static_argnums=3)
    x, stem = layer(params["stem"], buffers["stem"], x, spec.stem[-1])
    x = jax.nn.relu(x)
    if spec.pool:
        x = overlapping_max_pool(x)
    stages = []
    for (_, _, stride), own, stats in zip(
        spec.stages, params["stages"], buffers["stages"], strict=True
    ):
        x, first = block(own["first"], stats["first"], x, stride)
        # No slower than block after block beyond noise (CPU time of a step: ResNet-20
        # 359 ms against 344, ResNet-50 448 against 454). Unrolled, XLA on CPU merges
        # the two computations of remat.
        x, rest = lax.scan(
            lambda x, other: block(*other, x, 1), x, (own["rest"], stats["rest"])
        )
        stages.append({"first": first, "rest": rest})
    logits = x.mean((1, 2)) @ params["dense"]["w"] + params["dense"]["b"]
    return logits, {"stem": stem, "stages": stages}


def _block(layer, params, buffers, x, stride):
    """Adds the output of a block's layers to its shortcut."""
    y, stats = x, {}
    *names, strided, last = [name for name in params if name != "shortcut"]
    for name in (*names, strided, last):
        y, stats[name] = layer(
            params[name], buffers[name], y, stride if name == strided else 1
        )
        y = y if name == last else jax.nn.relu(y)
    if "shortcut" in params:
        x, stats["shortcut"] = layer(params["shortcut"], buffers["shortcut"], x, stride)
    else:
        x = x[:, ::stride, ::stride]
        x = jnp.pad(x, [*[(0, 0)] * 3, (0, y.shape[-1] - x.shape[-1])])
    return jax.nn.relu(x + y), stats
