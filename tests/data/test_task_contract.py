"""A user's own task or algorithm with a mistake is refused in one line."""

from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from support import tiny_tasks
from support.commands import find_imports
from support.resumed_runs import refused

from experiments.command.errors import explaining_errors
from experiments.command.factories import YOUR_OWN
from experiments.command.stopping import Terminated
from experiments.tasks import TASKS
from experiments.tasks.task import Tables, Task, check_indices
from experiments.training.config import RunConfig
from experiments.training.prepare import prepare

BASE = tiny_tasks.drawing()
FINE = BASE.load()


def loading(**parts):
    return BASE._replace(load=lambda: FINE._replace(**parts))


def labelled(part, label):
    """The examples of a part, of which number 5 has another label than 0 to 3."""
    arrays = getattr(FINE, part)
    y = arrays["y"].copy()
    y[5] = label
    return {**arrays, "y": y}


BEYOND = labelled("train", 9)
SOURCE = [{"x": x, "y": y} for x, y in zip(BEYOND["x"], BEYOND["y"], strict=True)]


def applying(apply):
    return BASE._replace(apply=apply)


def exiting(*arguments, **options) -> NoReturn:
    raise SystemExit(7)


def values(params, buffers, batch, key, train):
    return BASE.apply(params, buffers, batch, key, train)[0]


def deciding(*arguments, **options):
    figures, buffers = BASE.apply(*arguments, **options)
    return {**figures, "decided": figures["loss"]}, buffers


# What a factory returns, and what the line must say.
WRONG = {
    "nothing": (None, ["experiments.tasks.task.Task", "got None"]),
    "a rate": (BASE._replace(lr=0.1), ["lr must map", "{'sgd': 0.1", "got 0.1"]),
    "rate below 0": (BASE._replace(lr={"": -1}), ["lr['']", "above 0", "got -1"]),
    "steps": (BASE._replace(steps=-3), ["steps must be", "at least 1", "got -3"]),
    "batch": (BASE._replace(batch_size=0), ["batch_size", "at least 1", "got 0"]),
    "dispatch": (BASE._replace(dispatch_steps=1.5), ["dispatch_steps", "got 1.5"]),
    "evaluation": (BASE._replace(eval_batch=0), ["eval_batch", "at least 1", "got 0"]),
    "schedule": (BASE._replace(schedule="cosin"), ["schedule", "mean 'cosine'"]),
    "no schedule": (BASE._replace(schedule=None), ["schedule None", "constant"]),
    "muon": (BASE._replace(muon=["w"]), ["muon must be a function", "got ['w']"]),
    "shardings": (
        BASE._replace(shardings={"w": 1}),
        ["shardings must be a function", "got {'w': 1}"],
    ),
    "tables": (BASE._replace(tables=["w"]), ["tables must be Tables", "got ['w']"]),
    "kept tables": (
        BASE._replace(tables=Tables({"w": "w"}, len, "both")),
        ["way of keeping tables 'both'", "replicated, shared, sharded"],
    ),
    "momentum": (BASE._replace(momentum=1), ["momentum", "below 1", "got 1"]),
    "decay": (BASE._replace(weight_decay=-1), ["weight_decay", "at least 0", "got -1"]),
    "clip": (BASE._replace(clip_norm=0), ["clip_norm", "above 0", "got 0"]),
    "warmup": (BASE._replace(warmup=3), ["warmup", "at most 1", "got 3"]),
    "optimizer": (BASE._replace(optimizer="adm"), ["'adm'", "did you mean 'adam'"]),
    "init": (BASE._replace(init=3), ["init must be a function", "got 3"]),
    "figure": (BASE._replace(figures={"bits": 1}), ["figures['bits']", "function"]),
    "text of a figure": (
        BASE._replace(figures={"bits": str}),
        ["figures['bits'] must return a number", "got '1.0'"],
    ),
    "figure that raises": (
        BASE._replace(figures={"bits": lambda loss: loss + "bits"}),
        ["TypeError", "(test_task_contract.py:"],
    ),
    "figure of a measure": (
        BASE._replace(figures={"accuracy": float}),
        ["'accuracy' is both a value of apply and a figure"],
    ),
    "decided": (applying(deciding), ["'decided'", "a reserved name"]),
    "lists": (loading(test={"x": [1], "y": [2]}), ["test['x']", "array", "got [1]"]),
    "a list": (loading(test=[1, 2]), ["test must be a dict of arrays", "got [1, 2]"]),
    "no source": (loading(train=3), ["train must be", "source", "got 3"]),
    "examples": (
        loading(train=[[1.0, 2.0]] * 40),
        ["train[0]", "dict of arrays", "[1.0, 2.0]"],
    ),
    "no data": (BASE._replace(load=dict), ["load must return a Data", "got {}"]),
    "no pair of init": (
        BASE._replace(init=lambda key: {"w": np.zeros(2, np.float32)}),
        ["init must return (params, buffers)"],
    ),
    "no pair of apply": (applying(values), ["apply must return (values, buffers)"]),
    "no dict of apply": (
        applying(lambda *a, **k: (values(*a, **k)["loss"], {})),
        ["apply must return (values, buffers)", "{'loss': (batch,)}"],
    ),
    "layered": (BASE._replace(layered=-1), ["layered must be", "got -1"]),
    "layered tree": (BASE._replace(layered={"no": 1}), ["layered", "tree like params"]),
    "a label": (loading(train=BEYOND), ["train['y'][5] holds 9", "4: use 0 to 3"]),
    "a label below 0": (
        loading(test=labelled("test", -5)),
        ["test['y'][5] holds -5", "has size 4: use 0 to 3"],
    ),
    "a label of a source": (
        loading(train=SOURCE, groups={"label": BEYOND["y"]}),
        ["train['y'][5] holds 9", "has size 4: use 0 to 3"],
    ),
    "exit in load": (BASE._replace(load=exiting), ["SystemExit: 7", "exiting)"]),
    "exit in init": (BASE._replace(init=exiting), ["SystemExit: 7", "exiting)"]),
    "exit in apply": (applying(exiting), ["SystemExit: 7", "exiting)"]),
}


def make(case: str) -> Task:
    """Returns a task that is wrong in one way."""
    return WRONG[case][0]


def leave() -> Task:
    """Ends the process, as a script does that was never meant to be imported."""
    exiting()


NUMBER = 3


@pytest.mark.parametrize("case", WRONG)
def test_a_task_that_is_not_one_is_refused_by_what_is_wrong(case, tmp_path):
    line = refused(f"--task {__name__}:make --case '{case}'", tmp_path / "out")
    for text in WRONG[case][1]:
        assert text in line
    is_theirs = "TypeError" in WRONG[case][1]  # of ours no kind is told
    assert ("Error: " in line.replace("error: ", "")) == is_theirs


@pytest.mark.parametrize("flag", ["--task", "--algo"])
def test_a_factory_that_ends_the_process_is_refused(flag, tmp_path):
    line = refused(f"{flag} {__name__}:leave", tmp_path / "out")
    assert f"{flag} {__name__}:leave: SystemExit: 7 (test_task_contract.py:" in line


@pytest.mark.parametrize("flag", ["--task", "--algo"])
def test_what_is_no_factory_is_told_by_its_value(flag, tmp_path):
    line = refused(f"{flag} {__name__}:NUMBER", tmp_path / "out")
    assert "'NUMBER' must be a function" in line and line.endswith("got 3")


def test_sigterm_in_a_users_code_is_no_mistake_of_theirs():
    with pytest.raises(Terminated), explaining_errors("task", "a:b"):
        raise Terminated


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("--accumulate 1000", ["8 workers × 1000 microbatches", "8000", "40 examples"]),
        ("--workers 64", ["64 workers need a batch of at least 64", "40 examples"]),
        ("--batch-size 64", ["--batch-size 64 is larger", "40 examples"]),
    ],
)
def test_a_batch_nobody_asked_for_is_not_blamed(words, texts, tmp_path):
    line = refused(f"--task support.tiny_tasks:drawing {words}", tmp_path / "out")
    for text in texts:
        assert text in line


@pytest.mark.parametrize(("steps", "is_told"), [(3, True), (1, False)])
def test_slow_convolutions_are_told_before_the_run(steps, is_told, capfd):
    def apply(params, buffers, batch, key, train):
        x = jax.lax.conv(batch["x"][:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0]
        return BASE.apply(params, buffers, {**batch, "x": x}, key, train)

    config = RunConfig("sync_sgd", YOUR_OWN, workers=1, steps=8, dispatch_steps=steps)
    prepare(config, task=applying(apply))
    line = "slower on CPUs in dispatches of 3 steps: try --dispatch-steps 1"
    assert (line in capfd.readouterr().err) == is_told


def test_code_whose_indices_cannot_be_checked_is_named():
    """A checker's error must not end the run, nor hide what it did not check."""

    @custom_partitioning
    def partitioned(x):
        return x

    partitioned.def_partition(  # by callbacks that jax no longer takes
        infer_sharding_from_operands=lambda *_: None, partition=lambda *_: None
    )

    def apply(*arguments, **options):
        results, buffers = BASE.apply(*arguments, **options)
        return {**results, "loss": partitioned(results["loss"])}, buffers

    params, buffers = BASE.init(jax.random.key(0))
    assert check_indices(BASE, params, buffers, FINE) == ""
    why = check_indices(applying(apply), params, buffers, FINE)
    assert why.startswith("NotImplementedError: ") and "\n" not in why


@pytest.mark.slow
def test_tasks_and_data_import_nothing_of_the_harness():
    names = find_imports(f"from experiments.tasks import {', '.join(TASKS.values())}")
    ours = {x for x in names if x.startswith("experiments.")}
    own_packages = "experiments.tasks", "experiments.data"
    other_modules = {x for x in ours if not x.startswith(own_packages)}
    assert other_modules == {
        "experiments.files",
        "experiments.command",
        "experiments.command.errors",
        "experiments.command.stopping",
        # The bar of a download fits the terminal.
        "experiments.command.terminal",
        "experiments.command.text_tables",
    }
