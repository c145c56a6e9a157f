"""Every task from the command line: its flags, its figures, its data and its model.

Runs and requests that are refused are made in this process: seconds less each.
"""

import hashlib
import json
import math
import os
import re

import jax
import numpy as np
import pytest
from support import resumed_runs
from support.small_tasks import BESIDE, SMALL, task_folder
from support.tiers import tiers

from experiments import run
from experiments.command import factories
from experiments.training import export
from models import resnet
from syncalgos import Replica

# No test downloads anything: port 9 of this machine discards, or is closed.
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
OFFLINE = dict.fromkeys((*PROXIES, *map(str.upper, PROXIES)), "http://127.0.0.1:9")
NO_EXCEPTION = {"no_proxy": "", "NO_PROXY": ""}
DATA = str(os.environ.get("SYNCALGOS_DATA") or BESIDE)
PLAYS = SMALL["shakespeare"].files[0]
SHORT = "--steps 4 --eval-every 2 --workers 2 --algo sync_sgd"
TINY = {
    "digits": "",
    "mnist": "--model mlp",
    "fashion_mnist": "--batch-size 8",
    "spoken_digits": "--hidden 8 --frames 10 --remat",
    "shakespeare": "--context 16 --width 16 --layers 1 --heads 1",
    "gpt2_synthetic": "--model gpt2-tiny --positions rotary",
    "embeddings": "--width 8 --order 3 --negatives 8",
    "imagenet_synthetic": "--model resnet20 --image-size 32 --batch-size 4",
    "mnist1d": "--model mlp",
    "quadratic": "--dimensions 4",
    "rosenbrock": "--noise 0.5",
}
FUNCTIONS = ("quadratic", "rosenbrock")
FIGURES = {  # of a loss in nats
    "shakespeare": ("bits_per_character", lambda nats: nats / math.log(2)),
    "embeddings": ("perplexity", math.exp),
}


def staged(task):
    """The folder of a task's data, whatever a test has made of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCALGOS_DATA", DATA)
        return task_folder(task)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """This process with no network, and with an empty data folder as default."""
    for name, value in {**OFFLINE, **NO_EXCEPTION}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SYNCALGOS_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.mark.usefixtures("offline")
# That with pictures, which are slow, is run by the test of its export, too.
@pytest.mark.parametrize(
    "task", tiers(TINY, ["quadratic"], {*TINY} - {"imagenet_synthetic"})
)
def test_every_task_runs_and_tells_its_figures(task, tmp_path):
    command = f"{SHORT} --task {task} {TINY[task]} --data-dir {staged(task)}"
    ended = resumed_runs.run(command, tmp_path / "out").with_code(0)
    assert [line["step"] for line in ended.lines] == [2, 4]
    for line in (*ended.lines, ended.summary):
        if task in FUNCTIONS:
            assert line["test_accuracy"] is None and line["test_distance"] > 0
        else:
            assert 0 <= line["test_accuracy"] <= 1
        assert 0 < line["test_loss"] < 25
        if task in FIGURES:
            name, figure = FIGURES[task]
            assert line[f"test_{name}"] == pytest.approx(figure(line["test_loss"]))
    other_figures = {name for other, (name, _) in FIGURES.items() if other != task}
    assert not {f"test_{name}" for name in other_figures} & ended.summary.keys()
    last_measure = "distance" if task in FUNCTIONS else "accuracy"
    labels = ["train loss", "test loss", f"test {last_measure}"]
    if task in FIGURES:
        labels.append(f"test {FIGURES[task][0].replace('_', ' ')}")
    first_line, second_line = (
        x for x in ended.stderr.splitlines() if x.startswith("step ")
    )
    for name in labels:
        assert re.search(rf"  {name} \d", first_line) and re.search(
            rf"  {name} \d", second_line
        )
        assert re.search(rf"\n  {name} +\d", ended.stdout)
    for folder in (ended.summary, ended.config):
        assert folder["task"] == task
    flags = [x for x in TINY[task].split() if x.startswith("--")]
    own_flags = {
        f"--{name.replace('_', '-')}" for name in ended.summary["task_arguments"]
    }
    assert {x for x in flags if x != "--batch-size"} <= own_flags


# Requests that are refused once the task's data is read, and what the line must name.
BAD_FOR_DATA = {
    "--task shakespeare --context 111540": ["--context 111540", "111540 characters"],
}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("command", "expected_words"), BAD_FOR_DATA.items(), ids=BAD_FOR_DATA
)
def test_request_that_does_not_fit_the_data_is_refused(
    command, expected_words, tmp_path
):
    folder = staged(command.split()[1])
    line = resumed_runs.refused(f"{command} --data-dir {folder}", tmp_path / "out")
    for word in expected_words:
        assert word in line


@pytest.mark.usefixtures("offline")
def test_missing_data_ends_a_run_with_one_error_line(capfd, tmp_path):
    """SYNCALGOS_DATA names the folder where --data-dir does not."""
    assert run.main(["--task", "shakespeare", "--out", str(tmp_path / "out")]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    *attempts, error = output.err.splitlines()
    assert attempts and not any(x.startswith(("error", "Trace")) for x in attempts)
    assert error.startswith("error: ")
    assert PLAYS in error and str((tmp_path / "empty" / PLAYS).parent) in error
    assert not [x for x in tmp_path.rglob("*") if x.is_file()]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_exported_model_has_the_figures_of_the_summary(tmp_path):
    """With the running statistics of its batch norms, and not without."""
    path = tmp_path / "deep" / "er" / "model.safetensors"
    words = f"{SHORT} --task imagenet_synthetic {TINY['imagenet_synthetic']}"
    ended = resumed_runs.run(f"{words} --export {path}", tmp_path / "out")
    summary = ended.summary
    assert summary["export"] == str(path)
    assert re.search(rf"model +{path}", ended.stdout)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    task = factories.find_function(factories.TASK, "imagenet_synthetic")(
        model="resnet20", image_size=32
    )
    params, buffers = resnet.init(jax.random.key(5), resnet.RESNET20, 1000)
    replica = export.load(path, like=Replica(params, (), buffers))
    test = task.load().test
    values, _ = task.apply(replica.params, replica.buffers, test, None, train=False)
    assert float(values["loss"].mean()) == pytest.approx(summary["test_loss"], 1e-4)
    fresh, _ = task.apply(replica.params, buffers, test, None, train=False)
    assert float(fresh["loss"].mean()) != pytest.approx(summary["test_loss"], 1e-3)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(np.asarray(leaf).tobytes())
    assert digest.hexdigest() == summary["params_sha256"]
    header = {name: json.loads(x) for name, x in export.facts(path).items()}
    assert header["task"] == "imagenet_synthetic" and header["steps"] == 4
    assert header["arguments"] == summary["arguments"]
