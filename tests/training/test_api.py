"""Runs and comparisons from Python: `experiments.train` and `experiments.compare`."""

import html
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from support import tiny_tasks
from support.resumed_runs import run
from support.tiers import tiers

import experiments
import syncalgos
from experiments.api import RunConfig, compare, train
from experiments.command.errors import BadRequest, Unwritten
from experiments.study import page
from experiments.training.config import parse

TINY = RunConfig(
    task="support.tiny_tasks:drawing", workers=4, steps=24, eval_every=8, algo="diloco"
)
WORDS = (
    "--task support.tiny_tasks:drawing --workers 4 --steps 24 "
    "--eval-every 8 --algo diloco"
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(page, "DPI", 20)  # PNG takes most of a comparison's time


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command's run, of the same config."""
    return run(WORDS, tmp_path_factory.mktemp("command") / "out")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, syncalgos.diloco(16)])
def test_a_call_makes_the_run_of_the_command(strategy, command):
    """By the algorithm's name, or by an object in its place."""
    lines = []
    trained = train(TINY, strategy=strategy, on_evaluation=lines.append)
    assert command.code == 0
    for name in ("params_sha256", "bytes_per_worker", "effective_lr", "syncs"):
        assert trained.summary[name] == command.summary[name]
    assert trained.metrics == lines
    assert [line["step"] for line in lines] == [8, 16, 24]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained.center.params))


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
    ("changes", "objects", "message"),
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
def test_what_a_call_cannot_make_is_refused_in_a_line(changes, objects, message):
    with pytest.raises(BadRequest, match=message):
        train(replace(TINY, **changes), **objects)


# What stands in the way of an output from the first evaluation on, and its flags.
IN_THE_WAY = {
    "export": ("--export {0}.safetensors", "{0}.safetensors"),
    "best": ("--export {0}.safetensors --keep best", "{0}.safetensors"),
    "checkpoint": ("--checkpoint-every 24", "{0}/checkpoints/step-00000024.0-of-1.npz"),
    "summary": ("", "{0}/summary.json"),
    "metrics": ("", "{0}/metrics.jsonl"),
    "folder": ("", ""),
    "tracker": ("--track tensorboard", "{0}/tensorboard"),
}
DOORS = tiers(
    ["-".join(pair) for pair in itertools.product(IN_THE_WAY, ("run", "train"))],
    ("export-train",),
    tuple(f"{output}-run" for output in IN_THE_WAY),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", DOORS)
def test_an_output_that_cannot_be_written_is_no_success(case, tmp_path):
    output, door = case.split("-")
    out = tmp_path / "out"
    flags, path = (x.format(out) for x in IN_THE_WAY[output])
    words = f"{WORDS} {flags}"

    def block(*_):
        if not path:
            shutil.rmtree(out, ignore_errors=True)
        elif not Path(path).is_dir():
            Path(path).unlink(missing_ok=True)
            Path(path).mkdir(parents=True)

    if output == "tracker":  # it is opened before the first step
        pytest.importorskip("tensorboardX")
        out.mkdir()
        Path(path).touch()
    block = (lambda *_: None) if output == "tracker" else block
    if door == "run":
        ended = run(words, out, block).with_code(1)
        message = ended.stderr
        steps = re.search(r": (\d+) steps", ended.stdout)
        assert steps and steps[1] == "24"
    else:
        with pytest.raises(Unwritten) as raised:
            train(parse([*words.split(), "--out", str(out)]), on_evaluation=block)
        message = str(raised.value)
        assert raised.value.result.summary["steps"] == 24
    assert {"tracker": "--track", "checkpoint": "no checkpoint"}.get(
        output, str(out)
    ) in message


SHORT = {"workers": 2, "steps": 8, "lr": 0.1, "measure": "test_loss"}


@pytest.mark.slow
def test_a_comparison_has_the_commands_table_and_page(tmp_path):
    flags = SHORT | {"task": "support.tiny_tasks:drawing", "out": tmp_path / "study"}
    algos = {"all": "sync_sgd", "rounds": "bmuf --period 4"}
    study = compare(algos, seeds=2, flags=flags)
    assert [row["algorithm"] for row in study.rows] == ["all", "rounds"]
    run_keys = {(record["label"], record["seed"]) for record in study.runs}
    assert run_keys == {("all", 0), ("all", 1), ("rounds", 0), ("rounds", 1)}
    page_text = html.unescape(study.report(tmp_path / "page").read_text())
    assert "experiments.compare({'all': 'sync_sgd', 'rounds': 'bmuf " in page_text
    assert len(study.frame()) == 2
    # No run is made again.
    assert compare(algos, seeds=2, flags=flags).runs == study.runs


# Of Dask and of what it uses; a user's program may have them before Dask is imported.
LOGGERS = "distributed", "distributed.scheduler", "tornado", "tornado.access", "bokeh"


def logger_state(name: str | None):
    """Returns what can be set of a logger; None names the root."""
    logger = logging.getLogger(name)
    handlers = [(handler, handler.level) for handler in logger.handlers]
    return logger.level, logger.propagate, logger.disabled, handlers


def dask_threads():
    """Returns the threads that Dask keeps for the whole process, once it has any."""
    return {x for x in threading.enumerate() if x.name.startswith("Dask-Offload")}


def process():
    """Returns the state of the whole process."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "random": (random.getstate(), np.random.get_state()[1].tolist()),
        "warnings": [*warnings.filters],
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "jax": {name: getattr(jax.config, name, None) for name in jax.config.values},
        "signals": handlers,
        "hooks": (sys.excepthook, threading.excepthook, warnings.showwarning),
        "logging": {name: logger_state(name) for name in (None, *LOGGERS)},
        "threads": {*threading.enumerate()} - dask_threads(),
        "numpy": (np.geterr(), np.get_printoptions()),
    }


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch, request):
    """Has calls choose the folder of jax's cache, as in a user's process."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    undo = partial(jax.config.update, "jax_compilation_cache_dir", folder)
    request.addfinalizer(undo)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)


def call_train(folder: Path) -> None:
    """Trains objects, with all outputs."""
    files = {"checkpoint_every": 8, "export": folder / "model.safetensors"}
    config = replace(TINY, steps=8, eval_every=8, out=folder / "run", **files)
    trained = train(config, task=fed_by_a_source(), strategy=syncalgos.diloco(4))
    assert trained.summary["task"] == trained.summary["algo"] == "your own"


def call_overlapping(ends_first: str) -> None:
    """Trains in two threads: "outer" begins first, and both train at one time."""
    begun = {name: threading.Event() for name in ("outer", "inner")}
    ended = {name: threading.Event() for name in ("outer", "inner")}
    ends_last = "inner" if ends_first == "outer" else "outer"

    def call(name: str) -> None:
        def wait(_: object) -> None:
            begun[name].set()
            assert begun["inner"].wait(120)
            if name == ends_last:
                assert ended[ends_first].wait(120)

        train(replace(TINY, steps=8), on_evaluation=wait)
        ended[name].set()

    threads = {name: threading.Thread(target=call, args=[name]) for name in begun}
    threads["outer"].start()
    assert begun["outer"].wait(120)
    threads["inner"].start()
    for thread in threads.values():
        thread.join(120)
    assert ended["outer"].is_set() and ended["inner"].is_set()


def call_compare(folder: Path, **flags: object) -> None:
    """Compares, with further flags."""
    all_flags = SHORT | {"task": "digits", "out": folder / "study"} | flags
    assert len(compare("sync_sgd", seeds=1, flags=all_flags).runs) == 1


def call_in_vain(folder: Path) -> None:
    """Looks for a scheduler that is not there."""
    with pytest.raises(BadRequest, match="no answer"):
        call_compare(folder, scheduler="tcp://127.0.0.1:1")


def call_comparisons_at_once(folder: Path) -> None:
    """Compares by jobs in two threads."""
    threads = []
    for number in range(2):
        call = partial(call_compare, folder / str(number), jobs=2)
        threads.append(threading.Thread(target=call))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


CALLS = {
    "train": call_train,
    "overlapping, outer first": lambda _: call_overlapping("outer"),
    "overlapping, inner first": lambda _: call_overlapping("inner"),
    "compare": call_compare,
    "devices": partial(call_compare, devices_per_job=jax.device_count()),
    "jobs": partial(call_compare, jobs=2),
    "jobs at once": call_comparisons_at_once,
    "no scheduler": call_in_vain,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_was(name, fresh_cache, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.study.study.ANSWER", 1.0)
    pytest.importorskip("distributed")  # its import sets the levels of its loggers
    old_process = process()
    CALLS[name](tmp_path)
    for part, value in process().items():
        assert value == old_process[part], part


@pytest.mark.slow
def test_a_call_leaves_the_loggers_of_a_program_that_has_no_dask(tmp_path):
    """Only those that are there before: Dask's import makes its own."""
    program = f"""
import logging, random
from experiments import compare

logger = logging.getLogger("tornado")
logger.setLevel(logging.INFO)
state = random.getstate()
flags = {{"task": "digits", "workers": 2, "steps": 8, "jobs": 2}}
compare("sync_sgd", seeds=1, flags=flags | {{"out": {str(tmp_path / "study")!r}}})
assert (logger.level, logger.handlers, logger.propagate) == (logging.INFO, [], True)
assert logging.getLogger("distributed").level == logging.INFO  # as Dask sets it
assert random.getstate() == state
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def fed_by_a_source():
    """A task whose examples grain's threads read."""
    task = tiny_tasks.drawing()
    data = task.load()
    assert isinstance(data.train, dict)
    names = [*data.train]
    rows = [*zip(*data.train.values(), strict=True)]
    source = [dict(zip(names, row, strict=True)) for row in rows]
    return task._replace(load=lambda: data._replace(train=source))


@pytest.mark.slow
def test_importing_the_harness_draws_no_number():
    program = """
import random
before = random.getstate()
import experiments, experiments.api, experiments.aim, experiments.compare
assert random.getstate() == before"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_comparison_takes_objects_as_train_does(tmp_path):
    flags = SHORT | {"task": tiny_tasks.drawing(), "out": tmp_path / "study"}
    algos = [
        syncalgos.bmuf(4),
        lambda: syncalgos.bmuf(4),
        RunConfig(algo="bmuf", arguments={"period": 4}),
        "sync_sgd",
    ]
    study = compare(algos, seeds=1, flags=flags)
    losses = {x["label"]: x["test_loss"] for x in study.runs}
    bmuf_losses = {losses[x] for x in ("strategy 1", "strategy 2", "bmuf --period 4")}
    assert len(losses) == 4 and len(bmuf_losses) == 1
    assert losses["sync_sgd"] not in bmuf_losses
    # Other objects may have the same names.
    with pytest.raises(BadRequest, match="holds a study with other settings"):
        compare(algos, seeds=1, flags=flags)


@pytest.mark.slow
def test_a_factory_of_a_program_is_tuned_by_its_own_numbers(tmp_path):
    def average(weight: float = 0.5) -> syncalgos.Strategy:
        return syncalgos.bmuf(4, block_momentum=weight)

    flags = SHORT | {"task": tiny_tasks.drawing, "out": tmp_path / "study"}
    algos = {"mine": average, "bmuf": "bmuf --period 4 --block-momentum 0.2"}
    study = compare(algos, seeds=1, tune={"weight": "0.2,0.4"}, flags=flags)
    assert {x["weight"] for x in study.runs if x["label"] == "mine"} == {0.2, 0.4}
    reported_runs = {
        record["label"]: record for record in study.runs if record["reported"]
    }
    mine = reported_runs["mine"]
    bmuf = reported_runs["bmuf"]
    if mine["weight"] == 0.2:
        assert mine["test_loss"] == bmuf["test_loss"]


@pytest.mark.slow
def test_jobs_run_objects_that_other_processes_can_import(tmp_path):
    pytest.importorskip("distributed")
    flags = SHORT | {"task": "digits", "jobs": 2}
    by_jobs = compare(
        {"mine": syncalgos.bmuf(4)}, seeds=2, flags=flags | {"out": tmp_path / "a"}
    )
    in_process = compare(
        "mine=bmuf --period 4", seeds=2, flags=flags | {"out": tmp_path / "b"}
    )
    assert [x["test_loss"] for x in by_jobs.runs] == [
        x["test_loss"] for x in in_process.runs
    ]


def test_what_a_comparison_cannot_take_is_refused_in_a_line():
    with pytest.raises(BadRequest, match="names, objects and factories, got 3"):
        compare({"mine": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match=r"jobs import by name .* function "):
        compare([lambda: syncalgos.bmuf(4)], flags={"jobs": 2})
    with pytest.raises(BadRequest, match="has 'bmuf' twice: give another label"):
        compare(["bmuf", RunConfig(algo="bmuf")])
    with pytest.raises(BadRequest, match="one task: name 'mnist1d' in flags"):
        compare([RunConfig(task="mnist1d")])


def test_the_package_has_both():
    assert experiments.train is train
    assert experiments.compare is compare
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = experiments.nothing  # pyright: ignore[reportAttributeAccessIssue]
