"""docs/adding-an-algorithm.md, followed to the letter in a copy of the project."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import ROOT, run_program

FOLDERS = ("syncalgos", "experiments", "models", "benchmarks", "conformance", "tests")
FOLDERS += ("docs",)
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")


def list_blocks() -> list[str]:
    page = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    return re.findall(r"^```(?:python|text|toml)\n(.*?)^```$", page, re.M | re.S)


def insert(file: Path, line: str, prefix: str) -> None:
    """Puts a line in front of the first that starts as `before` does."""
    lines = file.read_text().splitlines()
    index = next(i for i, text in enumerate(lines) if text.startswith(prefix))
    file.write_text("\n".join([*lines[:index], line, *lines[index:]]) + "\n")


def read_files(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A copy of the project with the page's algorithm, and the files that changed."""
    copy = tmp_path_factory.mktemp("project")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "_build", "_made")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    old_files = read_files(copy)

    algorithm, registry, row, recurrence, mutant, line = list_blocks()
    (copy / "syncalgos/algorithms/lagging.py").write_text(algorithm)
    names = copy / "syncalgos/algorithms/__init__.py"
    insert(names, registry.strip(), "from syncalgos.algorithms.loco")
    insert(names, row.rstrip(), "        model_averaging,")
    (copy / "tests/recurrences/lagging.py").write_text(recurrence)
    mutants = copy / "tests/mutants.toml"
    mutants.write_text(f"{mutants.read_text()}\n{mutant}")
    insert(copy / "CHANGELOG.md", line.strip(), "- ")
    for command in ("pages.table", "conformance.make"):
        process = run(copy, "-m", command)
        assert process.returncode == 0, process.stderr

    new_files = read_files(copy)
    return copy, {name for name in new_files if new_files[name] != old_files.get(name)}


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy, whose packages come before the installed ones."""
    paths = [copy, *(copy / x for x in ("docs", "tests"))]
    places = ":".join(map(str, paths))
    return run_program([sys.executable, *arguments], copy, None, PYTHONPATH=places)


@pytest.mark.slow
def test_a_new_algorithm_touches_no_other_files(project):
    # jax 0.12, which Python 3.12 has, draws another last digit.
    changed_vectors = ["conformance/dion.json"] * (sys.version_info > (3, 12))
    assert project[1].difference(changed_vectors) == {
        "conformance/lagging.json",
        "syncalgos/algorithms/lagging.py",
        "syncalgos/algorithms/__init__.py",
        "tests/recurrences/lagging.py",
        "tests/mutants.toml",
        "docs/tables/algorithms.csv",
        "docs/conformance.md",
        "docs/studies.md",
        "README.md",
        "CHANGELOG.md",
    }


@pytest.mark.slow
def test_a_new_algorithm_trains_from_the_command_line(project):
    copy, _ = project
    out_flags = ["--out", str(copy / "out")]
    process = run(
        copy, "-m", "experiments.run", "--algo", "lagging", "--rate", "0.5", *out_flags
    )
    assert process.returncode == 0, process.stderr
    assert "lagging on digits" in process.stdout
    assert re.search(r"0\.05 nominal, 0\.025 effective", process.stdout)


@pytest.mark.slow
def test_a_new_algorithm_has_a_mutant_that_its_recurrence_notices(project):
    copy, _ = project
    path = "syncalgos/algorithms/lagging.py"
    [mutant] = tomllib.loads((copy / "tests/mutants.toml").read_text())[path]
    text = (copy / path).read_text()
    assert text.count(mutant["before"]) == 1
    (copy / path).write_text(text.replace(mutant["before"], mutant["after"]))
    recurrences = "tests/library/algorithms/test_recurrences.py"
    process = run(copy, "-m", "pytest", "-q", "-x", "-k", "lagging-", recurrences)
    (copy / path).write_text(text)
    assert "AssertionError: replicas after these steps" in process.stdout


@pytest.mark.parametrize(
    ("marks", "files"),
    [
        pytest.param(
            "not (slow or long)",
            ("test_recurrences", "test_conformance", "test_vectors"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "slow", ("test_conformance", "test_drift"), marks=pytest.mark.long
        ),
    ],
)
def test_a_new_algorithm_is_tested_by_existing(project, marks, files):
    copy, _ = project
    folder = "tests/library"  # of the tests of all algorithms
    process = run(
        copy, "-m", "pytest", "-q", "-rp", "-m", marks, "-k", "lagging", folder
    )
    assert process.returncode == 0, process.stdout
    for file in files:
        assert f"{file}.py::" in process.stdout
