"""Checks that files beside the code agree with it: workflows, releases, an image.

Hooks check the form of these files: .pre-commit-config.yaml.
"""

import importlib.util
import itertools
import re
import shlex
import tomllib

import pytest
import yaml
from support.commands import ROOT

import syncalgos

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CI = GITHUB / "workflows" / "ci.yml"
# A path of this repository within a command.
PATH = re.compile(r"(?:\./)?((?:\.ci|\.github|docs|examples|tests|syncalgos)(?:/.*)?)")


def read(path):
    return yaml.safe_load(path.read_text("utf-8"))


def triggers(workflow):
    """The value at `on`, a word that YAML 1.1 reads as True."""
    return workflow[True]


def steps(workflow):
    return [
        *itertools.chain.from_iterable(
            job.get("steps", []) for job in workflow["jobs"].values()
        )
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_workflow_name_files_that_exist(path):
    for step in steps(read(path)):
        for word in shlex.split(step.get("run", ""), comments=True):
            path_match = PATH.fullmatch(word)
            if path_match and not path_match[1].startswith("docs/_"):
                assert (ROOT / path_match[1]).exists(), word


def test_extras_that_workflows_install_exist():
    extras = PROJECT["optional-dependencies"]
    commands = [(ROOT / ".ci" / "run").read_text("utf-8")]
    for workflow in WORKFLOWS:
        commands += [step.get("run", "") for step in steps(read(workflow))]
    extra_lists = re.findall(r"\.\[([\w,-]+)\]", "\n".join(commands))
    installed = {*",".join(extra_lists).split(",")}
    assert {"test", "docs", "tpu-compiler"} <= installed <= extras.keys()


def test_pythons_of_the_matrix_are_those_that_the_project_promises():
    matrix = read(CI)["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    classifiers = {x.removeprefix(prefix) for x in PROJECT["classifiers"]}
    assert {x for x in classifiers if re.fullmatch(r"3\.\d+", x)} == set(matrix)
    assert PROJECT["requires-python"] == f">={matrix[0]}"


def test_oldest_versions_are_tested_with_the_oldest_python():
    job = read(CI)["jobs"]["oldest"]
    [python] = [
        step["with"]["python-version"]
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/setup-python@")
    ]
    assert f">={python}" == PROJECT["requires-python"]
    assert any("lowest-direct" in step.get("run", "") for step in job["steps"])


def test_release_waits_for_the_checks_and_has_no_password():
    release = read(GITHUB / "workflows" / "release.yml")
    assert triggers(release) == {"push": {"tags": ["v*"]}}
    jobs = release["jobs"]
    assert jobs["checks"]["uses"] == f"./{CI.relative_to(ROOT)}"
    assert "workflow_call" in triggers(read(CI))
    assert jobs["pypi"]["needs"] == "checks"
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert jobs["pypi"]["environment"]["name"] == "pypi"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text("utf-8")


def release_notes():
    path = ROOT / ".ci" / "release_notes.py"
    spec = importlib.util.spec_from_file_location("release_notes", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_release_notes_read_the_version_without_an_import():
    assert release_notes().version(ROOT) == syncalgos.__version__


def test_release_notes_are_the_section_of_the_tag(tmp_path):
    (tmp_path / "syncalgos").mkdir()
    (tmp_path / "syncalgos" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## Unreleased\n\n- Later.\n\n## 1.2.0 (2026-12-01)\n\n"
        "### Added\n\n- This.\n\n## 1.1.0\n\n- Before.\n"
    )
    notes = release_notes().notes
    assert notes(tmp_path, "v1.2.0") == "### Added\n\n- This."
    with pytest.raises(SystemExit, match=r"v1\.2\.1.*1\.2\.0"):
        notes(tmp_path, "v1.2.1")
    changelog.write_text("# Changelog\n\n## Unreleased\n\n- Later.\n")
    with pytest.raises(SystemExit, match="no text below"):
        notes(tmp_path, "v1.2.0")


def test_image_takes_extras_that_exist():
    text = (ROOT / "Containerfile").read_text("utf-8")
    extras = {*",".join(re.findall(r"extras=([\w,]+)", text)).split(",")}
    assert (
        extras == {"experiments", "cuda13"} <= PROJECT["optional-dependencies"].keys()
    )
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
