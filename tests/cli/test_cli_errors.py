"""Bad requests, folders and strategies of the user's own, as real processes."""

import subprocess
import sys

import pytest
from answers import MODULES, write_modules
from commands import BASE, ROOT, SUMMARY, execute

from experiments.run import main

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return write_modules(tmp_path_factory.mktemp("modules"))


def test_module_that_is_here_is_named_with_its_factories(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MODULES["mine"])
    monkeypatch.chdir(tmp_path)
    assert main(["--algo", "mine"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "mine.py is here: use --algo mine:FACTORY (its functions: pull, " in line


def test_the_package_names_its_commands():
    shown = subprocess.run(
        [sys.executable, "-m", "experiments"], cwd=ROOT, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for name in ("run", "compare", "aim"):
        assert f"python -m experiments.{name} " in shown.stdout


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


@pytest.mark.parametrize(
    ("words", "out", "named"),
    [
        (BASE, "run", ["run", "--overwrite"]),
        ("--lr nan --overwrite", "run", ["--lr"]),
        (BASE, "file", ["--out", "file is a file"]),
        pytest.param(BASE, "file/a", ["--out", "file is a file"], marks=SLOW),
        pytest.param(BASE, "file/a/b", ["--out", "file is a file"], marks=SLOW),
        (BASE, "/proc/run", ["/proc/run"]),
    ],
)
def test_a_folder_that_is_not_the_runs_is_refused_and_kept(words, out, named, tmp_path):
    if out.startswith("/proc") and sys.platform != "linux":
        pytest.skip("/proc is Linux's")
    kept = tmp_path / "file", tmp_path / "run" / "config.json"
    kept[1].parent.mkdir()
    for path in kept:
        path.write_text("earlier")
    ended = execute(words, tmp_path / out, JAX_LOG_COMPILES="1")
    assert (ended.code, ended.stdout) == (2, "")
    # jax writes a line for each trace, too: an optimizer is tried out on shapes alone.
    lines = ended.stderr.splitlines()
    [line] = [x for x in lines if not x.startswith("Finished tracing")]
    assert all(text in line for text in named)
    assert {x for x in tmp_path.rglob("*") if x.is_file()} == {*kept}
    assert all(path.read_text() == "earlier" for path in kept)
