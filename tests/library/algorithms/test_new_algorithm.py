"""docs/adding-an-algorithm.md, followed to the letter in a copy of the project."""

import re
import shutil
import sys
import tomllib

import pytest
from support.commands import ROOT, run_program

FOLDERS = ("syncalgos", "experiments", "models", "benchmarks", "conformance", "tests")
FOLDERS += ("docs",)
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")


def blocks_of_the_page():
    page = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    return re.findall(r"^```(?:python|text|toml)\n(.*?)^```$", page, re.M | re.S)


def insert(file, line, before):
    """Puts a line in front of the first that starts as `before` does."""
    lines = file.read_text().splitlines()
    at = next(i for i, text in enumerate(lines) if text.startswith(before))
    file.write_text("\n".join([*lines[:at], line, *lines[at:]]) + "\n")


def snapshot(folder):
    files = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the page's algorithm, and the files that changed."""
    copy = tmp_path_factory.mktemp("project")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "_build", "_made")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    before = snapshot(copy)

    algorithm, registry, row, recurrence, mutant, line = blocks_of_the_page()
    (copy / "syncalgos/algorithms/lagging.py").write_text(algorithm)
    names = copy / "syncalgos/algorithms/__init__.py"
    insert(names, registry.strip(), "from syncalgos.algorithms.loco")
    insert(names, row.rstrip(), "        model_averaging,")
    (copy / "tests/recurrences/lagging.py").write_text(recurrence)
    mutants = copy / "tests/mutants.toml"
    mutants.write_text(f"{mutants.read_text()}\n{mutant}")
    insert(copy / "CHANGELOG.md", line.strip(), "- ")
    for command in ("pages.table", "conformance.make"):
        made = run(copy, "-m", command)
        assert made.returncode == 0, made.stderr

    after = snapshot(copy)
    return copy, {name for name in after if after[name] != before.get(name)}


def run(copy, *arguments):
    """Runs Python in the copy, whose packages come before the installed ones."""
    paths = [copy, *(copy / x for x in ("docs", "tests"))]
    places = ":".join(map(str, paths))
    return run_program([sys.executable, *arguments], copy, None, PYTHONPATH=places)


@pytest.mark.slow
def test_a_new_algorithm_touches_no_other_files(project):
    # jax 0.12, which Python 3.12 has, draws another last digit.
    drawn = ["conformance/dion.json"] * (sys.version_info > (3, 12))
    assert project[1].difference(drawn) == {
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
    out = ["--out", str(copy / "out")]
    done = run(
        copy, "-m", "experiments.run", "--algo", "lagging", "--rate", "0.5", *out
    )
    assert done.returncode == 0, done.stderr
    assert "lagging on digits" in done.stdout
    assert re.search(r"0\.05 nominal, 0\.025 effective", done.stdout)


@pytest.mark.slow
def test_a_new_algorithm_has_a_mutant_that_its_recurrence_notices(project):
    copy, _ = project
    path = "syncalgos/algorithms/lagging.py"
    [mutant] = tomllib.loads((copy / "tests/mutants.toml").read_text())[path]
    text = (copy / path).read_text()
    assert text.count(mutant["before"]) == 1
    (copy / path).write_text(text.replace(mutant["before"], mutant["after"]))
    recurrences = "tests/library/algorithms/test_recurrences.py"
    ended = run(copy, "-m", "pytest", "-q", "-x", "-k", "lagging-", recurrences)
    (copy / path).write_text(text)
    assert "AssertionError: replicas after these steps" in ended.stdout


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
    most = "tests/library"  # of the tests of all algorithms
    done = run(copy, "-m", "pytest", "-q", "-rp", "-m", marks, "-k", "lagging", most)
    assert done.returncode == 0, done.stdout
    for file in files:
        assert f"{file}.py::" in done.stdout
