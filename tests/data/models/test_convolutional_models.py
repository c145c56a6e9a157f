"""Convolutions, LeNet, batch normalisation and ResNets, against other codes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh
from support.mapped_workers import on_workers
from support.trees import assert_close

from models import batch_norm, convolution, lenet, resnet
from syncalgos import WORKERS
from syncalgos._engine.placement.make_layout import Placement, make_layout

SPECS = {"resnet20": resnet.RESNET20, "resnet50": resnet.RESNET50}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def relative_error(tree, other):
    """The distance of two trees, in units of the second's norm."""
    vector = flatten(tree)
    other_vector = flatten(other)
    return np.linalg.norm(vector - other_vector) / np.linalg.norm(other_vector)


def flatten(tree):
    """All leaves as one vector."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def shaken(tree, rng):
    """Moves all but weights off the zeros and ones under which much goes unseen."""

    def leaf(path, x):
        shift = 0.1 * rng.uniform(0.5, 1.5, x.shape).astype(x.dtype)
        return x if path[-1].key == "w" else x + shift

    return jax.tree.map_with_path(leaf, tree)


# What a function makes of several arrays, with its gradients by them, in one program.


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(function, *arguments):
    values, pull = jax.vjp(function, *arguments)
    weights = jax.tree.map(lambda y: jnp.sin(jnp.arange(y.size, dtype=y.dtype)), values)
    return values, pull(jax.tree.map(lambda w, y: w.reshape(y.shape), weights, values))


def lax_conv(x, w, stride=1, padding="SAME"):
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((1, 1), 2, "SAME"),
        ((3, 2), 1, "SAME"),
        ((3, 3), 3, "VALID"),
        pytest.param((7, 7), 2, "SAME", marks=pytest.mark.slow),
    ],
)
def test_convolution_by_patches_is_that_of_lax(kernel, stride, padding, rng, float64):
    images = [rng.normal(size=(2, *size, 3)) for size in [(8, 8), (7, 10), (9, 5)]]
    w = rng.normal(size=(*kernel, 3, 4))

    def convolved(form, images, w):
        return [form(x, w, stride, padding) for x in images]

    actual, expected = (
        values_and_gradients(functools.partial(convolved, form), images, w)
        for form in (convolution.by_patches, lax_conv)
    )
    assert_close(actual, expected, rtol=1e-10, atol=1e-11)
    for form in (convolution.conv, convolution.by_lax):
        assert_close(form(images[1], w, stride, padding), expected[0][1], 1e-10, 0)


@pytest.mark.parametrize(
    ("platform", "kernel", "is_lax"),
    [
        ("cpu", (3, 3), False),
        ("tpu", (3, 3), True),
        ("gpu", (3, 3), True),
        ("gpu", (1, 3), True),
        ("gpu", (1, 1), False),
    ],
)
def test_convolution_takes_the_form_of_the_devices_that_it_is_compiled_for(
    platform, kernel, is_lax, monkeypatch
):
    x = jnp.ones((1, 8, 8, 3))
    w = jnp.ones((*kernel, 3, 4))

    def assert_form():
        # jax remembers what it has traced.
        jaxpr = jax.make_jaxpr(lambda x, w: convolution.conv(x, w, 2))(x, w)
        assert ("conv_general_dilated" in str(jaxpr)) == is_lax
        assert ("dot_general" in str(jaxpr)) != is_lax

    device = AbstractDevice("kind", num_cores=1, platform=platform)
    mesh = AbstractMesh((1,), ("devices",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert_form()
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert_form()


def test_convolution_with_windows_larger_than_the_image_is_empty():
    x = jnp.ones((2, 3, 9, 1))
    w = jnp.ones((5, 5, 1, 4))
    for form in (convolution.by_patches, convolution.by_lax):
        assert form(x, w, padding="VALID").shape == (2, 0, 5, 4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        *(
            pytest.param(
                lambda x, n=n: convolution.max_pool(x, n),
                ((n, n), (n, n), "VALID"),
                marks=pytest.mark.slow if n == 3 else (),
            )
            for n in (2, 3)
        ),
        (convolution.overlapping_max_pool, ((3, 3), (2, 2), "SAME")),
    ],
    ids=["2", "3", "overlapping"],
)
def test_max_pooling_is_that_of_reduce_window(ours, theirs, rng, float64):
    # All below zero: padding with zeros would show.
    images = [rng.normal(size=(2, *s, 3)) - 9 for s in [(8, 8), (7, 7), (6, 9), (2, 3)]]

    def reference(x):
        return nn.max_pool(x, *theirs)

    def pool_all(pool):
        return values_and_gradients(lambda images: [*map(pool, images)], images)

    assert_close(pool_all(ours), pool_all(reference), 1e-14, 0)


@pytest.mark.slow
def test_lenet_is_the_one_of_lax_and_flax(rng, float64):
    params = shaken(lenet.init(jax.random.key(0)), rng)
    y = x = rng.normal(size=(2, 28, 28, 1))
    for layer in (params["conv1"], params["conv2"]):
        y = nn.relu(lax_conv(y, layer["w"], padding="VALID") + layer["b"])
        y = nn.max_pool(y, (2, 2), (2, 2))
    expected = y.reshape(2, 512) @ params["dense"]["w"] + params["dense"]["b"]
    np.testing.assert_allclose(lenet.apply(params, x), expected, rtol=1e-10)


def test_initial_weights_have_the_variance_of_he_and_differ_by_the_key():
    params = lenet.init(jax.random.key(0), classes=100, channels=3)
    for name, inputs in {"conv1": 3 * 25, "conv2": 400, "dense": 512}.items():
        w = np.asarray(params[name]["w"])
        assert w.size == inputs * len(params[name]["b"])
        # 1200 normals, the fewest, have a standard deviation within 2 % of its own.
        assert np.std(w) == pytest.approx((2 / inputs) ** 0.5, rel=0.1)
        assert not np.any(params[name]["b"])
    other = lenet.init(jax.random.key(1), classes=100, channels=3)
    assert relative_error(other, params) > 1


# Batch normalisation.


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_is_that_of_flax(train, rng):
    x = rng.normal(3, 2, (4, 5, 6, 7)).astype(np.float32)
    params, buffers = shaken(batch_norm.init(7), rng)
    flax = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False)

    def theirs(params, x):
        variables = {"params": params, "batch_stats": buffers}
        y, changed = flax.apply(variables, x, mutable=["batch_stats"])
        return y, changed["batch_stats"]

    def ours(params, x):
        return batch_norm.apply(params, buffers, x, train)

    actual, expected = (values_and_gradients(f, params, x) for f in (ours, theirs))
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    moved = relative_error(actual[0][1], buffers)
    assert moved > 0.1 if train else moved == 0


@pytest.mark.parametrize(
    ("dtype", "mean", "atol"),
    [
        # The mean itself is rounded to 6e-5, an ulp of 1000: it must not cancel.
        ("float32", 1000, 3e-4),
        ("bfloat16", 3, 0.02),
    ],
)
def test_batch_norm_keeps_statistics_in_float32(dtype, mean, atol, rng):
    x = jnp.asarray(rng.normal(mean, 1, (4096, 3)), dtype)
    params, buffers = batch_norm.init(3)
    y, moved = batch_norm.apply(params, buffers, x, train=True)
    assert y.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {np.dtype("float32")}
    inputs = np.asarray(x, np.float64)
    np.testing.assert_allclose(moved["mean"], 0.1 * inputs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moved["var"], 0.9 + 0.1 * inputs.var(0), rtol=1e-5)
    expected = (inputs - inputs.mean(0)) / inputs.std(0)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=atol)


def gradients_of_workers(loss, params, batch, backend, shape):
    """The mean of the workers' gradients, and each worker's loss and buffers."""
    devices, lanes = shape
    layout = make_layout(devices * lanes, backend, Placement(range(devices)))

    def program(batch, shared):
        (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(shared, batch)
        return value, buffers, grads

    worker_batches = jax.tree.map(lambda x: x.reshape(*shape, -1, *x.shape[1:]), batch)
    values, buffers, grads = on_workers(layout, program, worker_batches, params)
    mean = jax.tree.map(lambda g: np.asarray(g).mean((0, 1)), grads)
    return np.asarray(values), buffers, mean


@pytest.mark.parametrize(
    ("backend", "shape"), [("vmap", (1, 4)), ("pmap", (2, 2)), ("shard_map", (2, 2))]
)
def test_global_batch_norm_of_many_workers_is_that_of_one(backend, shape, rng, float64):
    """Outputs, running statistics, and the gradient of the mean loss."""
    batch = {"x": rng.normal(2, 3, (16, 5, 3)), "y": rng.normal(size=(16, 5, 4))}
    norm, buffers = shaken(batch_norm.init(4), rng)
    params = {"w": rng.normal(size=(3, 4)), **norm}

    def loss(params, batch, axis_name=None):
        x = batch["x"] @ params["w"]
        x, moved = batch_norm.apply(params, buffers, x, True, axis_name)
        return jnp.mean((jnp.tanh(x) - batch["y"]) ** 2), (x, moved)

    (value, (y, moved)), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    losses, (ys, stats), mean_grads = gradients_of_workers(
        functools.partial(loss, axis_name=WORKERS), params, batch, backend, shape
    )
    assert losses.mean() == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose(ys.reshape(y.shape), y, rtol=1e-10, atol=1e-12)
    for name, expected in moved.items():
        everywhere = np.broadcast_to(expected, (*shape, 4))
        np.testing.assert_allclose(stats[name], everywhere, rtol=1e-12)
    assert relative_error(mean_grads, grads) < 1e-12


# Residual networks.


def count_params(spec, classes, channels=3):
    params, _ = jax.eval_shape(
        lambda key: resnet.init(key, spec, classes, channels), jax.random.key(0)
    )
    return sum(x.size for x in jax.tree.leaves(params))


def test_resnets_count_their_parameters():
    assert (
        count_params(resnet.RESNET20, 10) == 269_722
    )  # 0.27 M in table 6 of the paper
    assert count_params(resnet.RESNET20, 10, channels=1) == 269_722 - 2 * 9 * 16
    # As published with PyTorch's torchvision.
    assert count_params(resnet.RESNET50, 1000) == 25_557_032


def literal_resnet(name, params, buffers, x, train):
    """The networks by the paper's tables, block after block."""

    def layer(stage_params, stats, x, stride=1):
        y = lax_conv(x, stage_params["w"], stride)
        if train:
            stats = {"mean": y.mean((0, 1, 2)), "var": y.var((0, 1, 2))}
        y = (y - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-5)
        return stage_params["scale"] * y + stage_params["bias"]

    def basic(stage_params, stats, x, stride):
        y = nn.relu(layer(stage_params["conv1"], stats["conv1"], x, stride))
        y = layer(stage_params["conv2"], stats["conv2"], y)
        if stride == 2:
            zeros = jnp.zeros((*x[:, ::2, ::2].shape[:3], y.shape[-1] - x.shape[-1]))
            x = jnp.concatenate([x[:, ::2, ::2], zeros], -1)
        return nn.relu(x + y)

    def bottleneck(stage_params, stats, x, stride):
        y = nn.relu(layer(stage_params["conv1"], stats["conv1"], x))
        y = nn.relu(layer(stage_params["conv2"], stats["conv2"], y, stride))
        y = layer(stage_params["conv3"], stats["conv3"], y)
        if "shortcut" in stage_params:
            x = layer(stage_params["shortcut"], stats["shortcut"], x, stride)
        return nn.relu(x + y)

    block, stem_stride, stages = {
        "resnet20": (basic, 1, [(3, 1), (3, 2), (3, 2)]),
        "resnet50": (bottleneck, 2, [(3, 1), (4, 2), (6, 2), (3, 2)]),
    }[name]
    x = nn.relu(layer(params["stem"], buffers["stem"], x, stem_stride))
    if name == "resnet50":
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for i, (blocks, stride) in enumerate(stages):
        stage_params = params["stages"][i]
        stats = buffers["stages"][i]
        x = block(stage_params["first"], stats["first"], x, stride)
        for b in range(blocks - 1):
            next_block = jax.tree.map(
                lambda leaf, b=b: leaf[b], (stage_params["rest"], stats["rest"])
            )
            x = block(*next_block, x, 1)
    return x.mean((1, 2)) @ params["dense"]["w"] + params["dense"]["b"]


# Sizes of 18 and 9 rows are halved: an even and an odd one.
@pytest.mark.parametrize(
    ("name", "image", "train"),
    [
        pytest.param("resnet20", (18, 18, 1), False, marks=pytest.mark.slow),
        ("resnet20", (18, 18, 1), True),
        pytest.param("resnet50", (64, 64, 3), True, marks=pytest.mark.slow),
    ],
)
def test_resnet_is_the_one_written_block_by_block(name, image, train, rng, float64):
    (kernel, width, step), stages = SPECS[name].stem, SPECS[name].stages
    narrow = tuple((blocks, size // 8, stride) for blocks, size, stride in stages)
    spec = SPECS[name]._replace(stem=(kernel, width // 8, step), stages=narrow)
    params, buffers = shaken(resnet.init(jax.random.key(0), spec, 10, image[-1]), rng)
    x = rng.normal(size=(3, *image))
    apply = jax.jit(resnet.apply, static_argnums=(0, 4))
    logits, moved = apply(spec, params, buffers, x, train)
    literal = jax.jit(literal_resnet, static_argnums=(0, 4))
    expected = literal(name, params, buffers, x, train)
    assert logits.shape == (3, 10)
    assert relative_error(logits, expected) < 1e-5
    assert relative_error(logits[:1], logits[1:2]) > 1e-4  # the images do matter
    assert jax.tree.structure(moved) == jax.tree.structure(buffers)
    for new_buffer, old_buffer in zip(
        jax.tree.leaves(moved), jax.tree.leaves(buffers), strict=True
    ):
        assert (
            relative_error(new_buffer, old_buffer) > 1e-3
            if train
            else (new_buffer == old_buffer).all()
        )


@pytest.mark.slow
def test_blocks_of_a_new_resnet_are_identities(rng):
    spec = resnet.RESNET20._replace(stages=((2, 16, 1), (2, 32, 2)))
    params, buffers = jax.jit(lambda key: resnet.init(key, spec, 10))(jax.random.key(0))
    x = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
    apply = jax.jit(resnet.apply, static_argnums=(0, 4))
    logits, _ = apply(spec, params, buffers, x, False)
    stem = nn.relu(lax_conv(x, params["stem"]["w"]) / np.sqrt(1 + 1e-5))
    skipped = stem[:, ::2, ::2].mean((1, 2)) @ params["dense"]["w"][:16]
    np.testing.assert_allclose(logits, skipped, rtol=1e-4, atol=1e-5)
