"""The shapes of GPT-2: their size, precision and memory, and the model elsewhere."""

import json
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.commands import ROOT
from test_gpt import gpt_in_numpy

from examples import to_huggingface
from experiments.tasks.language import gpt2_synthetic, shakespeare
from experiments.training import export
from models import gpt
from syncalgos import Replica

TINY = gpt.SHAPES["gpt2-tiny"]
TOKENS = np.random.default_rng(0).integers(512, size=(3, 65), dtype=np.int32)


def make_params(shape=TINY):
    """Larger weights than those at the start, no bias zero."""
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)),
        jax.jit(shape.init)(jax.random.key(0)),
    )


def loss(params, dtype=None):
    """The cross-entropy of each token after those before it."""
    logits = gpt.apply(params, TOKENS[:, :-1], TINY.heads, dtype=dtype)
    assert logits.dtype == jnp.float32
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, TOKENS[:, 1:, None], 2).mean()


def count_params(shape):
    """The number of params, of which none is made."""
    params = jax.eval_shape(shape.init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # Of the published checkpoints; the paper's own counts are known to be wrong.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_as_many_params_as_published(name, count):
    assert count_params(gpt.SHAPES[name]) == count


@pytest.mark.parametrize("name", [x for x in gpt.SHAPES if x.startswith("diloco")])
def test_shapes_of_diloco_have_the_params_of_their_names(name):
    count = count_params(gpt.SHAPES[name]._replace(rotary=True))
    assert count == pytest.approx(1e6 * float(name[7:-1]), rel=0.03)


def test_the_page_has_the_sizes_of_all_shapes():
    """Columns: params, layers, width, heads, head, vocabulary, context."""
    sizes_by_shape = {}
    for line in (ROOT / "docs" / "gpt2.md").read_text().splitlines():
        row = re.match(r"\| `([\w-]+)` \|((?: [\d,]+ \|){7})$", line)
        if row:
            sizes = row[2].replace(",", "").split("|")[:-1]
            sizes_by_shape[row[1]] = [int(size) for size in sizes]
    expected = {
        name: [count_params(s), s.layers, s.width, s.heads, s.head_size, *s[:2]]
        for name, s in gpt.SHAPES.items()
    }
    assert sizes_by_shape == expected


@pytest.mark.slow
def test_half_the_bits_give_the_loss_and_the_gradient_of_all():
    """bfloat16 has 8 bits: a product errs by 2⁻⁹, and few of the errors add up."""
    params = make_params()
    exact, expected = jax.jit(jax.value_and_grad(loss))(params)
    half = jax.jit(jax.value_and_grad(partial(loss, dtype=jnp.bfloat16)))
    value, actual = half(params)
    assert 0 < abs(value - exact) < 2**-7 * exact
    for ours, theirs in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert ours.dtype == jnp.float32
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 0 < error < 0.05


# Where a GPT-2 of Hugging Face keeps what ours has in its blocks.
NAMES = {"norm1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj"}
NAMES |= {"norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def gpt2_in_numpy(folder, tokens):
    """The logits of a model in a folder, by the equations of test_gpt."""
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_norm_epsilon"] == 1e-5
    x = load_file(folder / "model.safetensors")
    x = {name.removeprefix("transformer."): np.float64(y) for name, y in x.items()}

    def layers(name, part):
        return np.stack([x[f"h.{n}.{name}.{part}"] for n in range(config["n_layer"])])

    blocks = {}
    for ours, theirs in NAMES.items():
        weight = "scale" if "norm" in ours else "w"
        blocks[ours] = {weight: layers(theirs, "weight"), "b": layers(theirs, "bias")}
    norm = {"scale": x["ln_f.weight"], "b": x["ln_f.bias"]}
    params = {"tokens": x["wte.weight"], "positions": x["wpe.weight"]}
    params |= {"blocks": blocks, "norm": norm}
    return [gpt_in_numpy(params, row, config["n_head"]) for row in tokens]


def exported(folder, params, task):
    """A file as --export writes it."""
    header = {"task_arguments": json.dumps(task)}
    path = folder / "model.safetensors"
    export.save(path, Replica(params, (), ()), header)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Params with logits of size 1, and the folder that the command makes of them."""
    params = make_params()
    folder = tmp_path_factory.mktemp("gpt2")
    path = exported(folder, params, {"model": "gpt2-tiny"})
    assert to_huggingface.main([str(path), str(folder / "made")]) == 0
    return params, folder / "made"


# Logits are up to 15 or so; float32 rounds at 1e-6 of that in each of 20 sums.
CLOSE = {"rtol": 0, "atol": 1e-4}


def test_a_converted_model_is_the_gpt2_of_the_paper(converted):
    params, folder = converted
    config = json.loads((folder / "config.json").read_text())
    # Transformers reads these, and NumPy below does not.
    assert (config["model_type"], config["activation_function"]) == ("gpt2", "gelu_new")
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    logits = gpt.apply(params, TOKENS[:, :64], TINY.heads)
    expected = gpt2_in_numpy(folder, TOKENS[:, :64])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, **CLOSE)


@pytest.mark.slow
def test_a_gpt_of_characters_is_a_gpt2_too(tmp_path):
    """Its queries, keys and values have no bias; its heads are a flag of the task."""
    task = shakespeare(context=8, width=16, layers=2, heads=2)
    params = jax.jit(task.init)(jax.random.key(0))[0]
    path = exported(tmp_path, params, {"model": "gpt", "heads": 2})
    to_huggingface.convert(path, tmp_path / "made")
    tokens = TOKENS[:1, :8] % 65
    expected = gpt2_in_numpy(tmp_path / "made", tokens)
    np.testing.assert_allclose(gpt.apply(params, tokens, heads=2), expected, **CLOSE)


NARROW = TINY._replace(head_size=8)
ROTARY = TINY._replace(rotary=True)


@pytest.mark.parametrize(
    ("params", "task", "line"),
    [
        (ROTARY, {"model": "gpt2-tiny"}, "has learnt positions, and this model rotary"),
        (
            NARROW,
            {"model": "gpt2-tiny"},
            "of a GPT-2 divide its width, 32; these are 2",
        ),
        (TINY, {"heads": 3}, "these are 3, of 32 numbers"),
        (TINY, {"hidden": 3}, "is not a GPT exported by experiments.run"),
        (None, {"model": "gpt2-tiny"}, "is not a GPT exported by experiments.run"),
    ],
)
def test_what_gpt2_cannot_be_is_refused_in_a_line(params, task, line, tmp_path, capfd):
    params = params.init(jax.random.key(0)) if params else {"w": np.ones(3)}
    path = exported(tmp_path, params, task)
    assert to_huggingface.main([str(path), str(tmp_path / "made")]) == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {path}") and line in error
    assert not (tmp_path / "made").exists()


def test_a_model_that_is_there_stays(converted, capfd):
    folder = converted[1]
    path = folder / "model.safetensors"
    old_bytes = path.read_bytes()
    assert to_huggingface.main([str(path), str(folder)]) == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error == f"error: {folder / 'config.json'} exists: use another folder"
    assert path.read_bytes() == old_bytes


def test_the_task_trains_the_shape_that_it_names():
    for positions in ("learnt", "rotary"):
        task = gpt2_synthetic("diloco-60m", positions)
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        assert ("positions" in params) == (positions == "learnt")
        assert params["blocks"]["qkv"]["w"].shape == (3, 896, 3 * 16 * 64)
