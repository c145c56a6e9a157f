"""Bad requests, folders and strategies of the user's own, as real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from answers import MODULES, write_modules
from commands import BASE, ROOT, SUMMARY, execute

from experiments.run import main


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return write_modules(tmp_path_factory.mktemp("modules"))


def assert_refused(ended, *named):
    assert ended.code == 2
    assert ended.stdout == ""
    # JAX_LOG_COMPILES logs traces too, and an optimizer is tried out on shapes alone.
    lines = [
        x for x in ended.stderr.splitlines() if not x.startswith("Finished tracing")
    ]
    assert len(lines) == 1, lines[:3]
    for text in named:
        assert text in lines[0]


def test_module_that_is_here_is_named_with_its_factories(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MODULES["mine"])
    monkeypatch.chdir(tmp_path)
    assert main(["--algo", "mine"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "mine.py is here: say --algo mine:FACTORY; its functions are pull, " in line


def test_the_package_names_its_commands():
    shown = subprocess.run(
        [sys.executable, "-m", "experiments"], cwd=ROOT, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for name in ("run", "compare", "aim"):
        assert f"python -m experiments.{name} " in shown.stdout


@pytest.mark.slow
def test_form_that_the_strategy_cannot_take_is_refused_in_a_line(tmp_path):
    ended = execute(f"{BASE} --algo bmuf --lane-form merged", tmp_path / "out")
    assert ended.code == 2
    told = "error: --lane-form: lanes cannot run merged: the strategy does not take "
    assert ended.stderr.splitlines()[-1] == f"{told}the mean of all gradients"


def test_strategy_of_the_users_own_runs_with_its_parameters_as_flags(modules, tmp_path):
    own = "--algo mine:pull --strength 0.25 --period 8 --steps 16 --eval-every 8"
    ended = execute(own, tmp_path / "out", PYTHONPATH=modules)
    assert ended.code == 0
    assert ended.summary["arguments"] == {"period": 8, "strength": 0.25}
    assert ended.summary["syncs"] == 2
    assert ended.summary["algo"] == "mine:pull"


def test_help_explains_the_parameters_of_the_users_own_strategy(modules, tmp_path):
    shown = execute("--algo mine:pull --help", tmp_path, PYTHONPATH=modules)
    assert (shown.code, shown.stderr) == (0, "")
    assert "Pulls replicas to their mean." in shown.stdout
    assert "--period" in shown.stdout and "steps between pulls." in shown.stdout
    assert "how far replicas go, where 1 is 100% of the way." in shown.stdout


def test_folder_that_holds_a_run_is_refused_and_kept(tmp_path):
    (tmp_path / "config.json").write_text("earlier")
    assert_refused(execute(BASE, tmp_path), str(tmp_path), "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "earlier"


@pytest.mark.slow
def test_overwrite_replaces_the_runs_files_alone(tmp_path):
    for name in ("config.json", "metrics.jsonl", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("earlier\n")
    ended = execute("--steps 16 --eval-every 16 --overwrite", tmp_path)
    assert ended.code == 0
    assert set(ended.summary) >= SUMMARY
    assert ended.config["settings"]["steps"] == 16
    assert [line["step"] for line in ended.lines] == [16]
    assert (tmp_path / "notes.txt").read_text() == "earlier\n"


def test_bad_request_overwrites_nothing(tmp_path):
    (tmp_path / "summary.json").write_text("earlier")
    assert_refused(execute("--lr nan --overwrite", tmp_path), "--lr")
    assert (tmp_path / "summary.json").read_text() == "earlier"


@pytest.mark.sample(1)
@pytest.mark.parametrize("below", [".", "folder", "folder/deeper"])
def test_out_at_or_under_a_file_is_refused(below, tmp_path):
    (tmp_path / "file").write_text("kept")
    ended = execute(BASE, tmp_path / "file" / below, JAX_LOG_COMPILES="1")
    assert_refused(ended, "--out", f"{tmp_path / 'file'} is a file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_out_in_an_unwritable_place_is_refused_before_any_compilation():
    ended = execute(BASE, Path("/proc/run"), JAX_LOG_COMPILES="1")
    assert_refused(ended, "/proc/run")
