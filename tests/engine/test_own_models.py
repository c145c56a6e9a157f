"""Models of flax and equinox, tasks of the user's own, and models in files."""

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open
from support.commands import ROOT, execute, run_python
from support.trees import largest

from experiments.command.errors import BadRequest
from experiments.training import export
from experiments.training.config import RunConfig
from experiments.training.prepare import prepare
from syncalgos import WORKERS, DataParallel, Replica, bmuf, sync_sgd

ROUNDING = 1e-9  # of float64: means over workers in another order, after 30 steps
CLEARLY = 1e-3
STEPS = 30
BATCH = 24
LR = 0.2
RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(STEPS, BATCH, 2))
BATCHES = {"x": POINTS, "y": np.int32(POINTS[..., 0] > POINTS[..., 1])}


def doubled(tree):
    return jax.tree.map(lambda x: x.astype(np.float64), tree)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


class Model(NamedTuple):
    """A library's model: how it starts, trains and predicts."""

    params: Any
    buffers: Any
    loss: Any
    predict: Any


def of_nnx(dropout, axis_name):
    rngs = nnx.Rngs(0)
    layers: list[Any] = [nnx.Linear(2, 8, rngs=rngs)]
    layers += [nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs), nnx.relu]
    layers += [nnx.Dropout(dropout), nnx.Linear(8, 2, rngs=rngs)]
    graph, params, buffers = nnx.split(nnx.Sequential(*layers), nnx.Param, ...)

    def loss(params, buffers, batch, key):
        model = nnx.merge(graph, params, buffers)
        model.train()
        logits = model(batch["x"], rngs=nnx.Rngs(key))
        return cross_entropy(logits, batch), (nnx.state(model, nnx.BatchStat), {})

    def predict(params, buffers, x):
        model = nnx.merge(graph, params, buffers, copy=True)
        model.eval()
        return model(x)

    return Model(params, buffers, loss, predict)


class Normed(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(2, 8, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.second = eqx.nn.Linear(8, 2, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.second(jax.nn.relu(x)), state


def of_equinox():
    model, buffers = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def forward(model, buffers, x):
        return jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, buffers)

    def loss(params, buffers, batch, key):
        logits, buffers = forward(eqx.combine(params, static), buffers, batch["x"])
        return cross_entropy(logits, batch), (buffers, {})

    def predict(params, buffers, x):
        model = eqx.nn.inference_mode(eqx.combine(params, static))
        return forward(model, buffers, x)[0]

    return Model(params, buffers, loss, predict)


def train(model, strategy):
    """Returns the center and each step's loss."""
    trainer = DataParallel(model.loss, optax.sgd(LR), strategy, workers=4)
    state = trainer.init(model.params, model.buffers)
    state, metrics = trainer.run(state, BATCHES)
    return trainer.center(state), np.asarray(metrics["loss"])


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (lambda: of_nnx(0.2, None), sync_sgd()),
        (of_equinox, bmuf(5, block_momentum=0.5)),
    ],
    ids=["nnx", "equinox"],
)
def test_models_of_other_libraries_learn_and_are_loaded_as_they_were(
    model, strategy, tmp_path
):
    model = model()
    path = tmp_path / "model.safetensors"
    center, losses = train(model, strategy)
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
    assert jax.tree.structure(center.params) == jax.tree.structure(model.params)
    export.save(path, center, {})
    loaded = export.load(path, like=Replica(model.params, (), model.buffers))
    assert_same_bits(loaded, center)
    logits = model.predict(loaded.params, loaded.buffers, np.float32(POINTS[0]))
    assert (logits.argmax(-1) == BATCHES["y"][0]).mean() > 0.8


@pytest.mark.slow
def test_batch_statistics_over_all_workers_are_those_of_the_global_batch(float64):
    local, joint = (of_nnx(0.0, axis) for axis in (None, WORKERS))
    start = doubled(local.params), doubled(local.buffers)

    @jax.jit
    def alone(params, buffers, batch):
        """A step of one worker, without the library."""

        def loss(params, buffers):
            buffers = jax.tree.map(lambda x: x, buffers)  # a module writes into them
            return local.loss(params, buffers, batch, jax.random.key(0))

        grads, (buffers, _) = jax.grad(loss, has_aux=True)(params, buffers)
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), buffers

    expected = start
    for step in range(STEPS):
        expected = alone(*expected, {name: x[step] for name, x in BATCHES.items()})
    for model in (joint, local):
        model = model._replace(params=start[0], buffers=start[1])
        center, _ = train(model, sync_sgd())
        difference = largest((center.params, center.buffers), expected)
        if model.loss is local.loss:
            assert difference > CLEARLY
        else:
            assert difference < ROUNDING


@pytest.mark.slow
def test_equinox_batch_statistics_of_the_example_are_those_of_the_global_batch(float64):
    """By the example's program, as running means and variances in NumPy."""
    program = runpy.run_path(str(ROOT / "examples" / "equinox_batch_norm.py"))

    inputs = np.random.default_rng(1).normal(3, size=(STEPS, BATCH, 3))
    means = np.zeros(3)
    variances = np.ones(3)
    for batch in inputs:
        means = 0.99 * means + 0.01 * batch.mean(0)
        variances = 0.99 * variances + 0.01 * batch.var(0)
    centers = []
    for workers in (1, 3, 4):
        trainer = DataParallel(
            program["loss"], optax.sgd(0.05), sync_sgd(), workers=workers
        )
        state = trainer.init(doubled(program["params"]), program["buffers"])
        state, _ = trainer.run(state, inputs)
        center = trainer.center(state)
        running_statistics = center.buffers.get(program["model"].norm.batch_state_index)
        assert largest(running_statistics, (means, variances)) < ROUNDING
        centers.append(center.params)
    assert largest(centers[1], centers[0]) < ROUNDING
    assert largest(centers[2], centers[0]) < ROUNDING


def test_bytes_leave_out_what_batch_statistics_send():
    traffic_by_layout = []
    for axis_name in (None, WORKERS):
        model = of_nnx(0.0, axis_name)
        trainer = DataParallel(model.loss, optax.sgd(LR), sync_sgd(), workers=4)
        state = trainer.init(model.params, model.buffers)
        traffic_by_layout.append(
            trainer.communication(state, steps=3).per_step.tolist()
        )
    assert traffic_by_layout[0] == traffic_by_layout[1] and traffic_by_layout[0][0] > 0


# Every kind of float, no dimensions and many, and more than ten in a list.
TREES = Replica(
    {
        "blocks": [{"w": jnp.full((2, 1), i), "b": jnp.zeros(3)} for i in range(12)],
        "half": jnp.array([0.1, -0.0, jnp.inf], jnp.bfloat16),
        "deep": {"er": {"scale": jnp.float32(3.5), "float16": jnp.ones(2, "float16")}},
    },
    (),
    {"norm": {"mean": jnp.arange(6.0).reshape(1, 2, 3), "count": jnp.int32(7)}},
)


@pytest.mark.parametrize(
    "replica",
    [TREES, *map(Replica, (jnp.arange(3.0), [jnp.ones(2)], {"w": jnp.ones(1)}))],
    ids=["nested", "array", "list", "without buffers"],
)
def test_models_are_loaded_as_they_were(replica, tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    export.save(path, replica, {})
    assert_same_bits(export.load(path), replica)
    assert_same_bits(export.load(str(path), like=replica), replica)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_tensors_are_named_by_their_place_beside_the_facts(tmp_path):
    path = tmp_path / "model.safetensors"
    export.save(path, TREES, {"algo": "bmuf"})
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        assert file.metadata().keys() == {"algo", "sha256"}
        np.testing.assert_array_equal(file.get_tensor("params.blocks.11.w"), [[11]] * 2)
    assert export.facts(path) == {"algo": "bmuf"}
    places = {"deep.er.scale", "deep.er.float16", "half"}
    for block in range(12):
        places |= {f"blocks.{block}.w", f"blocks.{block}.b"}
    expected = {f"params.{place}" for place in places}
    assert names == expected | {"buffers.norm.mean", "buffers.norm.count"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": 1, "a.b": 2}, r"--export: params\.a\.b would lie inside params\.a$"),
        ({"x": {"a.b": 1, "a": 2}}, r"\.x\.a\.b would lie inside params\.x\.a$"),
        ({"a.b": {"c": 1}, "a": {"b": 2}}, r"a\.b\.c would lie inside params\.a\.b$"),
        ({"a": {"b": 1}, "a.b": 2}, "two arrays have the name"),
    ],
)
def test_names_with_dots_that_no_file_tells_apart_are_refused(params, message):
    replica = Replica(jax.tree.map(jnp.float32, params))
    with pytest.raises(ValueError, match=message):
        export.name_tensors(replica)


@pytest.mark.slow
def test_a_run_starts_from_an_exported_model(tmp_path):
    path = tmp_path / "model.safetensors"
    config = RunConfig(workers=2, seed=1)
    run = prepare(config)
    params = jax.tree.map(lambda x: x + 1, run.trainer.center(run.state).params)
    export.save(path, Replica(params), {})
    run = prepare(replace(config, seed=0, init_from=path))
    assert_same_bits(run.trainer.center(run.state), Replica(params))
    other_layer = {"w": jnp.ones((64, 3)), "b": jnp.ones(3)}

    def as_type(dtype):
        return jax.tree.map(lambda x: x.astype(dtype), params)

    for other, message in [
        ([*params, other_layer], "has params.3.b, which this model does not have"),
        (params[:2], r"has no params.2.b \(it has: params.0.b, "),
        ([other_layer, *params[1:]], r"params.0.b has shape \(3,\), not \(128,\)"),
        (as_type("float8_e4m3fn"), "params.0.b has type F8_E4M3, which cannot be read"),
        (as_type("complex64"), "params.0.b has type complex64, which is no float32"),
        (as_type("int32"), "params.0.b has type int32, which is no float32"),
        (jax.tree.map(lambda x: x * jnp.nan, params), "params.0.b .* not finite"),
    ]:
        export.save(path, Replica(other), {})
        with pytest.raises(BadRequest, match=f"^--init-from: .*{message}") as refused:
            prepare(replace(config, init_from=path))
        assert "\n" not in str(refused.value)
    path.write_text("no model")
    with pytest.raises(BadRequest, match=r"^--init-from .*model.safetensors: .*header"):
        prepare(replace(config, init_from=path))


def test_an_export_of_the_same_model_has_the_same_bytes(tmp_path):
    params = {f"layer{i}": jnp.arange(3.0) + i for i in range(4)}
    facts = {f"fact{i}": f'value {i} with ä, " and \\' for i in range(20)}
    path = tmp_path / "model.safetensors"
    written = set()
    for facts_in_some_order in (facts, dict(reversed(facts.items()))):
        for _ in range(3):
            export.save(path, Replica(params), facts_in_some_order)
            written.add(path.read_bytes())
    assert len(written) == 1
    assert export.facts(path) == facts
    assert_same_bits(export.load(path), Replica(params))


def test_exports_where_no_model_can_be_written_are_refused(tmp_path):
    existing = tmp_path / "old.safetensors"
    folder = tmp_path / "folder.safetensors"
    existing.write_bytes(b"old")
    folder.mkdir()
    for path, overwrite, message in [
        (tmp_path / "model.npz", False, "must end in .safetensors"),
        (existing, False, "--overwrite"),
        (existing / "model.safetensors", True, "a file, not a folder"),
        (folder, True, "folder"),
        (Path("/proc/models/model.safetensors"), False, "/proc"),  # not even by root
    ]:
        with pytest.raises(BadRequest, match=re.escape(message)) as refused:
            export.check_path(path, overwrite)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    export.check_path(existing, overwrite=True)
    export.check_path(tmp_path / "new" / "model.safetensors", overwrite=False)
    assert existing.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


PAGE = (ROOT / "docs" / "models-and-tasks.md").read_text()


def blocks(language):
    """The page's blocks in a language, each with the block that follows it."""
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
    following = [*(text for _, text in fences[1:]), ""]
    return [
        (text, following_text)
        for (kind, text), following_text in zip(fences, following, strict=True)
        if kind == language
    ]


def commands():
    """The page's command lines, without the program's name."""
    program = "python -m experiments.run "
    texts = [text.replace("\\\n", "") for text, _ in blocks("sh")]
    lines = "".join(texts).splitlines()
    assert all(line.startswith(program) for line in lines)
    return [line.removeprefix(program) for line in lines]


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A folder with the page's mytask.py."""
    folder = tmp_path_factory.mktemp("modules")
    (task_source,) = (
        text for text, _ in blocks("python") if text.startswith("# mytask.py")
    )
    (folder / "mytask.py").write_text(task_source)
    return folder


@pytest.mark.slow
def test_the_pages_task_trains_with_its_parameters_as_flags(modules, tmp_path):
    path = tmp_path / "rings.safetensors"
    (command,) = (line for line in commands() if "--hidden" in line)
    command = command.replace(path.name, str(path)) + " --noise 0.2"
    ended = execute(command, tmp_path / "out", PYTHONPATH=modules).with_code(0)
    summary = ended.summary
    assert summary["task"] == "mytask:rings"
    assert summary["task_arguments"] == {"hidden": 64, "noise": 0.2}
    assert summary["export"] == str(path)
    assert summary["test_accuracy"] > 0.9
    assert export.load(path).params["layers_0"]["kernel"].shape == (2, 64)


@pytest.mark.slow
def test_the_pages_exported_model_predicts_what_the_page_shows(tmp_path):
    (command,) = (line for line in commands() if "--task digits" in line)
    path = tmp_path / "model.safetensors"
    execute(command.replace(path.name, str(path)), tmp_path / "out").with_code(0)
    *_, (source, output) = blocks("py")
    assert run_python(["-c", source], tmp_path) == (output, "")


@pytest.mark.slow
def test_a_modules_own_random_state_draws_apart_on_each_worker():
    """One that is equal on all workers would drop the same units on all of them."""
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graph, buffers = nnx.split(dropout)

    def loss(params, buffers, batch, key):
        dropout = nnx.merge(graph, buffers)
        is_kept = dropout(jnp.ones(64)) > 0
        one_hot = jnp.arange(4) == batch[0]
        masks = jnp.where(
            one_hot[:, None], 4 * is_kept, 0
        )  # each worker's, in the mean
        return params.sum(), (nnx.state(dropout), {"masks": masks})

    def masks(workers, steps=3):
        trainer = DataParallel(loss, optax.sgd(LR), bmuf(2), workers=workers)
        state = trainer.init(np.ones(1, np.float32), buffers)
        state, metrics = trainer.run(state, np.tile(np.arange(workers), (steps, 1)))
        assert int(jax.tree.leaves(trainer.center(state).buffers)[0]) == steps
        return np.asarray(metrics["masks"]) * (workers / 4)

    several = masks(4)
    alone = masks(1)[:, 0]
    drawn = {*map(tuple, several.reshape(-1, several.shape[-1]))}
    assert len(drawn) == 4 * 3  # on each worker and at each step
    np.testing.assert_array_equal(several[:, 0], alone)
