"""Checks that files beside the code agree with it: workflows, citations, an image.

Hooks check the form of these files: .pre-commit-config.yaml.
"""

import importlib.util
import re
import shlex
import tomllib
from functools import cache

import pytest
import yaml
from commands import ROOT
from pages.papers import BIBLIOGRAPHY, entries, words

import syncalgos

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CI = GITHUB / "workflows" / "ci.yml"
SOURCES = "syncalgos", "models", "experiments", "benchmarks", "examples", "tests"
# A path of this repository within a command.
PATH = re.compile(r"(?:\./)?((?:\.ci|\.github|docs|examples|tests|syncalgos)(?:/.*)?)")
ARXIV = re.compile(r"\b(?:0[7-9]|[1-3]\d)(?:0[1-9]|1[0-2])\.\d{5}\b")
# The last name before a title in quotes, the title, and a year behind it.
CITED = re.compile(
    r'([^\W\d_][\w-]+)(?: et al\.)?, "([^"]{4,250}?)",? [^";()\d]{0,60}\b(?:19|20)\d\d'
)


def read(path):
    return yaml.safe_load(path.read_text("utf-8"))


def triggers(workflow):
    """The value at `on`, a word that YAML 1.1 reads as True."""
    return workflow[True]


def steps(workflow):
    return [x for job in workflow["jobs"].values() for x in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_workflow_name_files_that_exist(path):
    for step in steps(read(path)):
        for word in shlex.split(step.get("run", ""), comments=True):
            if (found := PATH.fullmatch(word)) and not found[1].startswith("docs/_"):
                assert (ROOT / found[1]).exists(), word


def test_extras_that_workflows_install_exist():
    extras = PROJECT["optional-dependencies"]
    commands = [step.get("run", "") for x in WORKFLOWS for step in steps(read(x))]
    commands.append((ROOT / ".ci" / "run").read_text("utf-8"))
    found = re.findall(r"\.\[([\w,-]+)\]", "\n".join(commands))
    installed = {x for names in found for x in names.split(",")}
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


def test_addresses_of_the_project_agree():
    home = PROJECT["urls"]["Repository"]
    assert read(ROOT / "CITATION.cff")["repository-code"] == home
    for path in [*GITHUB.rglob("*.yml"), ROOT / "SECURITY.md"]:
        text = path.read_text("utf-8")
        for found in re.findall(r"https://github\.com/syncalgos/\w+", text):
            assert found == home, path


def test_citation_has_the_version_of_the_package_and_of_the_license():
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == syncalgos.__version__
    assert f"{{{syncalgos.__version__}}}" in (ROOT / "README.md").read_text()
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == [{"name": "The syncalgos authors"}]
    assert PROJECT["authors"] == citation["authors"]


def test_image_takes_extras_that_exist():
    text = (ROOT / "Containerfile").read_text("utf-8")
    extras = {
        x for found in re.findall(r"extras=([\w,]+)", text) for x in found.split(",")
    }
    assert (
        extras == {"experiments", "cuda13"} <= PROJECT["optional-dependencies"].keys()
    )
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name


def fields():
    """The entries of the bibliography: key to fields."""
    field = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)
    found = {re.findall(r"{(\w+)", x)[0]: field.findall(x) for x in entries().values()}
    assert len(found) == BIBLIOGRAPHY.read_text("utf-8").count("\n@")
    return {key: dict(pairs) for key, pairs in found.items()}


@cache
def texts():
    """The pages and sources that cite: the text of each as one line, by its path."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/[!_]*/*.md")]
    for name in SOURCES:
        paths += [*(ROOT / name).rglob("*.py"), *(ROOT / name).rglob("*.toml")]
    read = {x.relative_to(ROOT): x.read_text("utf-8") for x in paths}
    return {
        path: re.sub(r"\s+(?:# )?", " ", text.replace('\\"', '"'))
        for path, text in read.items()
    }


BIB = fields()


@cache
def citations():
    """(title, name, path)s."""
    return {
        (title, name, path)
        for path, text in texts().items()
        for name, title in CITED.findall(text)
    }


@pytest.mark.parametrize("key", BIB)
def test_entry_of_the_bibliography_is_whole_and_cited(key):
    entry = BIB[key]
    assert {"author", "title", "year"} <= entry.keys()
    assert re.fullmatch(r"(?:19|20)\d\d", entry["year"])
    assert re.fullmatch(r"\d{4}\.\d{4,5}", entry.get("eprint", "1604.00981"))
    title = words(entry["title"])
    assert any(words(x) in title and by(name, entry) for x, name, _ in citations())


def by(name, entry):
    """Whether an author, or who published it, has this name."""
    published = entry.get("institution", "") + entry.get("howpublished", "")
    return words(name) in words(entry["author"] + " " + published)


def test_papers_that_code_and_docs_cite_are_in_the_bibliography():
    assert not {
        (str(path), name, title)
        for title, name, path in citations()
        if not any(
            words(title) in words(x["title"]) and by(name, x) for x in BIB.values()
        )
    }
    assert len(citations()) > 100


def test_arxiv_numbers_that_code_and_docs_cite_are_in_the_bibliography():
    cited = {number for text in texts().values() for number in ARXIV.findall(text)}
    assert cited <= {entry.get("eprint") for entry in BIB.values()}
    assert len(cited) >= 10
