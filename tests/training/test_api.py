"""Runs and comparisons from Python: `experiments.train` and `experiments.compare`."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import small_tasks
from lasting import run

import experiments
import syncalgos
from experiments.api import RunConfig, compare, train
from experiments.cli.errors import BadRequest
from experiments.training.config import parse

TINY = RunConfig(
    task="tiny_tasks:drawing", workers=4, steps=24, eval_every=8, algo="diloco"
)
WORDS = "--task tiny_tasks:drawing --workers 4 --steps 24 --eval-every 8 --algo diloco"


@pytest.fixture(autouse=True)
def three_devices(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")  # as they are


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command's run, of the same config."""
    return run(WORDS, tmp_path_factory.mktemp("command") / "out")


@pytest.mark.slow
def test_a_call_makes_the_run_of_the_command(command):
    lines = []
    trained = train(TINY, on_evaluation=lines.append)
    assert command.code == 0
    assert trained.summary["params_sha256"] == command.summary["params_sha256"]
    assert trained.metrics == lines
    assert [line["step"] for line in lines] == [8, 16, 24]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained.center.params))


def test_a_strategy_of_ones_own_takes_the_place_of_the_algorithm(command):
    trained = train(TINY, strategy=syncalgos.diloco(16))
    same = ("params_sha256", "bytes_per_worker", "effective_lr", "syncs")
    for name in same:
        assert trained.summary[name] == command.summary[name]
    assert trained.summary["algo"] == "your own"


@pytest.mark.slow
def test_a_task_of_ones_own_takes_the_place_of_the_named_one():
    task = small_tasks.make("digits")
    config = RunConfig(workers=2, steps=4, batch_size=8, algo="bmuf")
    trained = train(config, task=task)
    assert trained.summary["task"] == "your own"
    assert trained.summary["test_accuracy"] is not None


@pytest.mark.slow
def test_a_run_with_a_folder_leaves_the_commands_files_and_goes_on(command, tmp_path):
    config = replace(TINY, out=tmp_path / "out", checkpoint_every=8, steps=16)
    train(config)
    again = train(replace(config, steps=24, resume=True))
    assert again.summary["resumed_at"] == [16]
    assert again.summary["params_sha256"] == command.summary["params_sha256"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["params_sha256"] == command.summary["params_sha256"]


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"resume": True}, {}, "set out"),
        ({"export": Path("model.safetensors")}, {}, "set out"),
        ({"track": ("tensorboard",)}, {}, "set out|not installed"),
        ({"processes": 2}, {}, "train uses only this process"),
        ({"algo": "nothing"}, {}, "unknown algorithm 'nothing'"),
        ({}, {"strategy": syncalgos.bmuf}, r"call it: bmuf\(\)"),
        ({}, {"task": "digits"}, "Task"),
    ],
)
def test_what_a_call_cannot_make_is_refused_in_a_line(changes, given, message):
    with pytest.raises(BadRequest, match=message):
        train(replace(TINY, **changes), **given)


@pytest.mark.slow
def test_a_preset_gives_an_algorithm_its_papers_flags():
    config = replace(TINY, preset="paper", algo="slowmo", steps=128)
    paper = parse([*WORDS.split(), "--algo", "slowmo", "--preset", "paper"])
    summary = train(config).summary
    assert summary["arguments"] == paper.arguments
    assert summary["arguments"] != parse(["--algo", "slowmo"]).arguments


@pytest.mark.slow
def test_a_comparison_has_the_commands_table_and_page(tmp_path):
    flags = {"task": "tiny_tasks:drawing", "workers": 2, "steps": 16, "lr": 0.1}
    flags |= {"out": tmp_path / "study", "measure": "test_loss"}
    algos = {"all": "sync_sgd", "rounds": "bmuf --period 4"}
    study = compare(algos, seeds=2, flags=flags)
    assert [row["algorithm"] for row in study.rows] == ["all", "rounds"]
    assert {(x["label"], x["seed"]) for x in study.runs} == {
        (label, seed) for label in algos for seed in (0, 1)
    }
    page = study.report(tmp_path / "page")
    assert "rounds" in page.read_text()
    assert len(study.frame()) == 2
    again = compare(algos, seeds=2, flags=flags)  # no run is made again
    assert again.runs == study.runs


def test_the_package_has_both_even_after_the_command_was_imported():
    import experiments.compare as command_of_compare

    assert experiments.train is train
    with pytest.raises(BadRequest, match="unknown algorithm"):
        command_of_compare("nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = experiments.nothing  # pyright: ignore[reportAttributeAccessIssue]
