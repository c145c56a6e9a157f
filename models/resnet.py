"""Residual networks for images: ResNet-20 for small ones, ResNet-50 for large ones.

Source: He et al., "Deep residual learning for image recognition", CVPR 2016.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models import batch_norm
from models.convolution import conv, he_normal, overlapping_max_pool

PyTree = Any
Layer = Callable[[PyTree, PyTree, jax.Array, int], tuple[jax.Array, PyTree]]


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
    for blocks, block_channels, stride in spec.stages:
        first_shapes, width = _block_shapes(spec, width, block_channels, stride)
        later_shapes, width = _block_shapes(spec, width, block_channels, stride=1)
        stacked = {name: (blocks - 1, *shape) for name, shape in later_shapes.items()}
        weights["stages"].append({"first": first_shapes, "rest": stacked})
    weights = he_normal(key, {**weights, "dense": (width, classes)})
    dense = {"w": weights.pop("dense"), "b": jnp.zeros(classes)}

    def init_norm(w: jax.Array) -> tuple[PyTree, PyTree]:
        norms = batch_norm.init(w.shape[-1])
        return jax.tree.map(lambda x: jnp.tile(x, (*w.shape[:-4], 1)), norms)

    params = jax.tree.map(lambda w: {"w": w, **init_norm(w)[0]}, weights)
    for stage in params["stages"]:
        for block in stage.values():
            last_layer = block["conv3" if spec.bottleneck else "conv2"]
            last_layer["scale"] = jnp.zeros_like(last_layer["scale"])
    buffers = jax.tree.map(lambda w: init_norm(w)[1], weights)
    return {**params, "dense": dense}, buffers


class _BlockShapes(NamedTuple):
    weights: dict[str, tuple[int, ...]]
    output_channels: int


def _block_shapes(
    spec: Spec, input_channels: int, channels: int, stride: int
) -> _BlockShapes:
    """Returns the shapes of a block's weights, and its output channels."""
    if not spec.bottleneck:
        shapes = {
            "conv1": (3, 3, input_channels, channels),
            "conv2": (3, 3, channels, channels),
        }
        return _BlockShapes(shapes, channels)
    output_channels = 4 * channels
    shapes = {
        "conv1": (1, 1, input_channels, channels),
        "conv2": (3, 3, channels, channels),
        "conv3": (1, 1, channels, output_channels),
    }
    if stride > 1 or input_channels != output_channels:
        shapes["shortcut"] = (1, 1, input_channels, output_channels)
    return _BlockShapes(shapes, output_channels)


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

    def apply_layer(
        params: PyTree, buffers: PyTree, x: jax.Array, stride: int
    ) -> tuple[jax.Array, PyTree]:
        y = conv(x, params["w"], stride)
        return batch_norm.apply(params, buffers, y, train, axis_name)

    apply_block = functools.partial(_apply_block, apply_layer)
    if remat:
        apply_block = jax.checkpoint(apply_block, static_argnums=3)
    x, stem_buffers = apply_layer(params["stem"], buffers["stem"], x, spec.stem[-1])
    x = jax.nn.relu(x)
    if spec.pool:
        x = overlapping_max_pool(x)
    new_stages = []
    for (_, _, stride), stage, stage_buffers in zip(
        spec.stages, params["stages"], buffers["stages"], strict=True
    ):
        x, first_buffers = apply_block(
            stage["first"], stage_buffers["first"], x, stride
        )
        # No slower than block after block beyond noise (CPU time of a step: ResNet-20
        # 359 ms against 344, ResNet-50 448 against 454). Unrolled, XLA on CPU merges
        # the two computations of remat.
        x, later_buffers = lax.scan(
            lambda x, block: apply_block(*block, x, 1),
            x,
            (stage["rest"], stage_buffers["rest"]),
        )
        new_stages.append({"first": first_buffers, "rest": later_buffers})
    logits = x.mean((1, 2)) @ params["dense"]["w"] + params["dense"]["b"]
    return logits, {"stem": stem_buffers, "stages": new_stages}


def _apply_block(
    apply_layer: Layer, params: PyTree, buffers: PyTree, x: jax.Array, stride: int
) -> tuple[jax.Array, PyTree]:
    """Adds the output of a block's layers to its shortcut."""
    *_, strided_layer, last_layer = [name for name in params if name != "shortcut"]
    y = x
    new_buffers = {}
    for name, layer in params.items():
        if name == "shortcut":
            continue
        layer_stride = stride if name == strided_layer else 1
        y, new_buffers[name] = apply_layer(layer, buffers[name], y, layer_stride)
        if name != last_layer:
            y = jax.nn.relu(y)
    if "shortcut" in params:
        shortcut, new_buffers["shortcut"] = apply_layer(
            params["shortcut"], buffers["shortcut"], x, stride
        )
    else:
        shortcut = x[:, ::stride, ::stride]
        new_channels = y.shape[-1] - shortcut.shape[-1]
        shortcut = jnp.pad(shortcut, [(0, 0), (0, 0), (0, 0), (0, new_channels)])
    return jax.nn.relu(shortcut + y), new_buffers
