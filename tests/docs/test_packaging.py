"""The wheel holds the library alone, and works with nothing but its dependencies."""

import inspect
import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from support.commands import ROOT, run_program

import syncalgos

USE = """
import importlib.util, numpy as np, optax, runpy, syncalgos
for absent in ("experiments", "models", "sklearn", "rich"):
    assert importlib.util.find_spec(absent) is None, absent
runpy.run_module("syncalgos", run_name="__main__")
loss = syncalgos.stateless(lambda params, batch: ((params["w"] - batch) ** 2).mean())
trainer = syncalgos.DataParallel(loss, optax.sgd(0.1), syncalgos.bmuf(2), workers=4)
state = trainer.init({"w": np.zeros(1, np.float32)})
state, metrics = trainer.run(state, np.ones((4, 8, 1), np.float32))
assert metrics["loss"].shape == (4,)
print(syncalgos.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("syncalgos-*.whl")
    return built


def test_wheel_holds_the_library_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"syncalgos"}
    assert "syncalgos/py.typed" in names
    modules = {
        f.relative_to(ROOT).as_posix() for f in (ROOT / "syncalgos").rglob("*.py")
    }
    assert modules <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_depends_on_jax_and_optax_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist")]
    always = {line for line in needed if "extra ==" not in line}
    assert always == {"Requires-Dist: jax>=0.10.1", "Requires-Dist: optax>=0.2.8"}


def test_links_of_the_shown_readme_need_no_checkout(wheel):
    archive = zipfile.ZipFile(wheel)
    [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    shown_readme = message_from_bytes(archive.read(metadata)).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", shown_readme)
    checkout_links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) == len(checkout_links) > 0
    for link, path in zip(links, checkout_links, strict=True):
        assert link.startswith(("https://", "#")), link
        assert link.endswith(path) and ("//raw." in link) == path.endswith(".svg")


def test_package_says_what_it_holds_and_where_its_command_line_is():
    ended = run_program([sys.executable, "-m", "syncalgos"])
    assert (ended.returncode, ended.stderr) == (0, "")
    heading, *lines = ended.stdout.splitlines()
    assert heading == f"syncalgos {syncalgos.__version__}"
    listed = dict(x.split(maxsplit=1) for x in lines)
    for name, factory in syncalgos.ALGORITHMS.items():
        assert listed[name] == (inspect.getdoc(factory) or "").partition("\n")[0]
    assert "python -m experiments.run" in ended.stdout


@pytest.mark.slow  # it installs jax
def test_wheel_works_in_a_bare_environment(wheel, tmp_path):
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
    }
    for arguments in (["-m", "pip", "install", "-q", str(wheel)], ["-c", USE]):
        ended = subprocess.run([python, *arguments], timeout=900, **options)
        assert ended.returncode == 0, ended.stderr
    version_line, *_, path_line = ended.stdout.splitlines()
    assert version_line == f"syncalgos {syncalgos.__version__}"
    assert Path(path_line).is_relative_to(tmp_path)
