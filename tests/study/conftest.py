"""Studies that are made in this process, whose reports have small pictures."""

import shlex

import pytest
from support.commands import ROOT

from experiments.study import page
from experiments.study.main import main


@pytest.fixture(scope="session", autouse=True)
def small_pictures():
    """PNG takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "DPI", 20)
        yield


@pytest.fixture
def run_study(tmp_path, capsys, monkeypatch):
    """Makes a study in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)

    def run(words, out=tmp_path / "study"):
        capsys.readouterr()  # of runs between the studies
        return main([*shlex.split(words), "--out", str(out)]), *capsys.readouterr()

    return run
