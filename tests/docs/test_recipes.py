"""The recipes of docs/many-hosts.md: shell, Kubernetes' own schema, and our flags."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from support.commands import ROOT

from experiments.training.config import parse
from syncalgos.algorithms import ALGORITHMS

RECIPES = sorted((ROOT / "docs" / "recipes").iterdir())
SCRIPTS = [path for path in RECIPES if path.suffix == ".sh"]
MANIFESTS = [x for x in RECIPES if "apiVersion" in x.read_text()]


def with_paths(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@with_paths(SCRIPTS)
def test_shellcheck_finds_nothing(path):
    program = shutil.which("shellcheck")
    if not program:
        pytest.skip("shellcheck is not installed")
    ended = subprocess.run([program, path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def find_kubernetes_parts(manifest):
    """Returns the parts of a manifest that are Kubernetes' own, as manifests."""
    spec = manifest["spec"]
    kind = manifest["kind"]
    about = {"metadata": {"name": "part"}}
    if kind in ("Service", "Job"):
        return [manifest]
    if kind == "JobSet":
        job = {"apiVersion": "batch/v1", "kind": "Job", **about}
        return [
            {**job, **replicated_job["template"]}
            for replicated_job in spec["replicatedJobs"]
        ]
    if kind == "PyTorchJob":
        pod = {"apiVersion": "v1", "kind": "Pod", **about}
        return [{**pod, **x["template"]} for x in spec["pytorchReplicaSpecs"].values()]
    assert kind == "TrainJob"  # it has none
    return []


@with_paths(MANIFESTS)
def test_kubernetes_knows_each_field(path):
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in yaml.safe_load_all(path.read_text()):
        for part in find_kubernetes_parts(manifest):
            validate(part, "1.31", strict=True)


def texts(value):
    """The strings of a manifest; a list of a command's words is one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and "experiments.run" in value:
        yield shlex.join(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


def commands(path):
    """The flags of each command of `experiments.run` in a recipe."""
    text = path.read_text().replace("\\\n", "")
    parts = [*texts([*yaml.safe_load_all(text)])] if path.suffix == ".yaml" else [text]
    for flags in re.findall(r"experiments\.run (.*?)\"?$", "\n".join(parts), re.M):
        # What the shell fills in is a number, or part of a path.
        yield shlex.split(re.sub(r"\$\w+", "1", flags))


@with_paths(RECIPES)
def test_its_command_is_one_of_ours_and_goes_on(path):
    found_commands = [*commands(path)]
    assert found_commands
    for words in found_commands:
        arguments = parse(words)
        assert arguments.algo in ALGORITHMS
        assert arguments.resume and arguments.out and arguments.checkpoint_every
