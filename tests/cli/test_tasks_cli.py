"""Every task from the command line: its flags, its figures, its data and its model.

Runs are real processes, compiled as quickly as the suite's own programs. Requests that
are refused go through the same `main` inside this process: a second less each.
"""

import hashlib
import json
import math
import os
import re
import sys

import jax
import numpy as np
import pytest
from commands import execute, two_at_a_time
from safetensors import safe_open
from small_tasks import BESIDE, SMALL, folder_of

from experiments import run
from experiments.cli import factories
from experiments.tasks.digits import digits
from experiments.training import export
from models import mlp, resnet
from syncalgos import Replica

# No test downloads anything: port 9 of this machine discards, or is closed.
OFFLINE = {
    name: "http://127.0.0.1:9"
    for proxy in ("http_proxy", "https_proxy", "all_proxy")
    for name in (proxy, proxy.upper())
}
NO_EXCEPTION = {"no_proxy": "", "NO_PROXY": ""}
DATA = str(os.environ.get("SYNCALGOS_DATA") or BESIDE)
PLAYS = SMALL["shakespeare"].files[0]
SHA256_OF_PLAYS = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

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
FAST = ("embeddings",)
FUNCTIONS = ("quadratic", "rosenbrock")
FIGURES = {  # of a loss in nats
    "shakespeare": ("bits_per_character", lambda nats: nats / math.log(2)),
    "embeddings": ("perplexity", math.exp),
}


def command_of(task):
    return f"{SHORT} --task {task} {TINY[task]}".strip()


@pytest.fixture(scope="module")
def run_once(request, tmp_path_factory):
    """Returns run(command), which makes each run once; the chosen tests' ahead."""
    environ = {**OFFLINE, **NO_EXCEPTION, "SYNCALGOS_DATA": DATA}
    with two_at_a_time(request, tmp_path_factory.mktemp("runs"), **environ) as run:
        yield run


def staged(task):
    """The folder of a task's data, whatever a test has made of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCALGOS_DATA", DATA)
        return folder_of(task)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """This process with no network, and with an empty data folder as default."""
    for name, value in {**OFFLINE, **NO_EXCEPTION}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")  # as they are
    monkeypatch.setenv("SYNCALGOS_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("COLUMNS", "1000")


def commands():
    for task in TINY:
        marks = () if task in FAST else pytest.mark.slow
        yield pytest.param(command_of(task), task, id=task, marks=marks)


@pytest.mark.parametrize(("command", "task"), list(commands()))
def test_every_task_runs_and_tells_its_figures(run_once, command, task):
    staged(task)
    ended = run_once(command)
    assert ended.code == 0, ended.stderr
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
    others = {name for other, (name, _) in FIGURES.items() if other != task}
    assert not {f"test_{name}" for name in others} & ended.summary.keys()
    last = "distance" if task in FUNCTIONS else "accuracy"
    shown = ["train loss", "test loss", f"test {last}"]
    if task in FIGURES:
        shown.append(f"test {FIGURES[task][0].replace('_', ' ')}")
    first, second = (x for x in ended.stderr.splitlines() if x.startswith("step "))
    for name in shown:
        assert re.search(rf"  {name} \d", first) and re.search(rf"  {name} \d", second)
        assert re.search(rf"\n  {name} +\d", ended.stdout)
    for folder in (ended.summary, ended.config):
        assert folder["task"] == task
    given = [x for x in TINY[task].split() if x.startswith("--")]
    own = {f"--{name.replace('_', '-')}" for name in ended.summary["task_arguments"]}
    assert {x for x in given if x != "--batch-size"} <= own


@pytest.mark.long
@pytest.mark.parametrize("command", [f"{command_of('embeddings')} --seed 1"])
def test_one_command_gives_one_model_though_negatives_are_drawn(
    run_once, command, tmp_path
):
    environ = {"SYNCALGOS_DATA": staged("embeddings")}
    again = execute(command, tmp_path / "again", **environ).summary
    first, other = run_once(command).summary, run_once(command_of("embeddings")).summary
    for name in ("params_sha256", "test_loss"):
        assert first[name] == again[name] != other[name]


# Requests that are refused once the task's data is read, and what the line must name.
BAD_FOR_DATA = {
    "--task shakespeare --context 111540": ["--context 111540", "111540 characters"],
    "--task mnist --batch-size 60008": ["60008", "60000 examples"],
    "--task spoken_digits --batch-size 2704": ["2704", "2700 examples"],
}


def refused(capfd, words, out):
    """The one line that a refused request leaves on stderr; nothing is made."""
    assert run.main([*words, "--out", str(out)]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert not out.exists()
    [line] = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("asked", "named"), BAD_FOR_DATA.items(), ids=BAD_FOR_DATA)
def test_request_that_does_not_fit_the_data_is_refused(asked, named, capfd, tmp_path):
    folder = staged(asked.split()[1])
    words = [*asked.split(), "--data-dir", str(folder)]
    line = refused(capfd, words, tmp_path / "out")
    for text in named:
        assert text in line


def test_refused_task_is_so_as_a_process_too(tmp_path):
    ended = execute("--task shakespeare --model resnet20", tmp_path / "out")
    assert (ended.code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line == "error: argument --model: unknown value 'resnet20' (one of: gpt)"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_header_tells_a_batch_that_workers_and_microbatches_divide(capfd, tmp_path):
    """72, the multiple of 8 × 3 nearest to 64: 64 itself is one of 8."""
    words = "--accumulate 3 --steps 2 --eval-every 2 --backend vmap --out"
    assert run.main([*words.split(), str(tmp_path)]) == 0
    batch = "batch 72 (9 per worker), the multiple of 24 nearest to the task's 64"
    assert batch in capfd.readouterr().err


def test_a_data_file_that_differs_is_refused_and_left_alone(tmp_path):
    whole = (staged("shakespeare") / PLAYS).read_bytes()
    altered = b"?" + whole[1:]
    path = tmp_path / "data" / PLAYS
    path.parent.mkdir(parents=True)
    path.write_bytes(altered)
    words = f"--task shakespeare --data-dir {tmp_path / 'data'}"
    ended = execute(words, tmp_path / "out", **OFFLINE)
    assert (ended.code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    for content in (whole, altered):
        assert hashlib.sha256(content).hexdigest() in line
    assert str(path) in line and path.read_bytes() == altered
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert not (tmp_path / "out").exists()


def test_missing_data_ends_a_process_with_one_error_line(tmp_path):
    """SYNCALGOS_DATA names the folder where --data-dir does not."""
    folder = tmp_path / "data"
    environ = {**OFFLINE, **NO_EXCEPTION, "SYNCALGOS_DATA": folder}
    ended = execute("--task shakespeare", tmp_path / "out", **environ)
    assert (ended.code, ended.stdout) == (2, "")
    *attempts, last = ended.stderr.splitlines()
    assert attempts and not any(x.startswith(("error", "Trace")) for x in attempts)
    assert last.startswith("error: ")
    for text in (PLAYS, str((folder / PLAYS).parent), SHA256_OF_PLAYS):
        assert text in last
    assert not [x for x in tmp_path.rglob("*") if x.is_file()]
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("offline")
def test_data_dir_wins_over_the_environment(capfd, tmp_path, monkeypatch):
    """Told by what is refused once the data is read: a batch that is too large."""
    full = staged("mnist")
    large = "--task mnist --batch-size 60008"
    words = [*large.split(), "--data-dir", str(full)]
    assert "60000 examples" in refused(capfd, words, tmp_path / "out")
    monkeypatch.setenv("SYNCALGOS_DATA", str(full))
    assert "60000 examples" in refused(capfd, large.split(), tmp_path / "out")
    empty = tmp_path / "chosen"
    words = [*large.split(), "--data-dir", str(empty), "--out", str(tmp_path / "out")]
    assert run.main(words) == 2
    assert str(empty / "mnist") in capfd.readouterr().err.splitlines()[-1]


def exported(words, tmp_path, name="deep/er/model.safetensors"):
    path = tmp_path / name
    ended = execute(f"{words} --export {path}", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    assert ended.summary["export"] == str(path)
    assert re.search(rf"model +{path}", ended.stdout)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return ended.summary, path


@pytest.mark.slow
def test_exported_digits_model_has_the_accuracy_of_the_summary(tmp_path):
    words = "--steps 32 --eval-every 32 --algo model_averaging --workers 4"
    summary, path = exported(words, tmp_path)
    replica = export.load(path)
    test = digits().load().test
    logits = np.asarray(mlp.apply(replica.params, test["x"]))
    accuracy = np.mean(logits.argmax(1) == test["y"])
    assert 0.2 < accuracy < 1
    assert summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(np.asarray(leaf).tobytes())
    assert digest.hexdigest() == summary["params_sha256"]
    with safe_open(path, "np") as file:
        assert "params.0.w" in file.keys()  # noqa: SIM118, no mapping
    header = {name: json.loads(x) for name, x in export.facts(path).items()}
    assert header["task"] == "digits" and header["steps"] == 32
    assert header["arguments"] == summary["arguments"]


@pytest.mark.long
def test_exported_resnet_keeps_its_running_statistics(tmp_path):
    """With them the exported model gives the summary's held-out loss."""
    summary, path = exported(command_of("imagenet_synthetic"), tmp_path)
    task = factories.named(factories.TASK, "imagenet_synthetic")(
        model="resnet20", image_size=32
    )
    params, buffers = resnet.init(jax.random.key(5), resnet.RESNET20, 1000)
    replica = export.load(path, like=Replica(params, (), buffers))
    values, _ = task.apply(
        replica.params, replica.buffers, task.load().test, None, train=False
    )
    assert float(values["loss"].mean()) == pytest.approx(summary["test_loss"], 1e-4)
    fresh, _ = task.apply(replica.params, buffers, task.load().test, None, train=False)
    assert float(fresh["loss"].mean()) != pytest.approx(summary["test_loss"], 1e-3)


@pytest.mark.usefixtures("offline")
def test_export_over_a_file_needs_overwrite(capfd, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("earlier")
    words = ["--steps", "2", "--export", str(path)]
    line = refused(capfd, words, tmp_path / "out")
    assert str(path) in line and "--overwrite" in line
    assert path.read_text() == "earlier"
    allowed = [*words, "--overwrite", "--out", str(tmp_path / "out")]
    assert run.main([*allowed, "--workers", "2", "--eval-every", "2"]) == 0
    assert export.load(path).params[0]["w"].shape == (64, 128)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("file/model.safetensors", ""),
        ("file/folder/model.safetensors", ""),
        ("folder.safetensors", ""),
        ("folder.safetensors", "--overwrite"),
        ("/proc/models/model.safetensors", ""),  # not even root can make it
    ],
)
def test_export_to_where_no_file_can_be_is_refused(path, words, capfd, tmp_path):
    if path.startswith("/proc") and sys.platform != "linux":
        pytest.skip("/proc is Linux's")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder.safetensors").mkdir()
    given = ["--export", str(tmp_path / path), *words.split()]
    line = refused(capfd, given, tmp_path / "out")
    assert str(tmp_path / path) in line or path.partition("/models")[0] in line
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "folder.safetensors").is_dir()
