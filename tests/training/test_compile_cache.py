"""Programs that are kept between processes: found again, the same, and in silence."""

import json
import sys

import jax
import pytest
from support.commands import BASE, CACHE, ROOT, SHARED, execute, run_program

from experiments.training import machine
from experiments.training.machine import ENABLED, FOLDER, LARGEST, SHORTEST

# What a process compiles, and what it has to do with the cache; then a program.
PROBE = """
import json, sys
from collections import Counter
import jax
from experiments.training import machine

seen = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
machine.use_cache()
y = jax.jit(lambda x: (x @ x).sum() / 3)(jax.numpy.arange(16.0).reshape(4, 4))
asked, hits, misses = (
    seen[f"/jax/compilation_cache/{name}"]
    for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")
)
print(json.dumps([asked, hits, misses, float(y).hex()]))
"""
USER_ENVIRONMENT: dict = dict.fromkeys(SHARED)  # as a user has it, who says nothing


def probed(**variables):
    """Tells what a process with these variables says of the cache."""
    ended = run_program([sys.executable, "-c", PROBE], PYTHONPATH=ROOT, **variables)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


def entries(folder):
    """The files of programs."""
    return [*folder.glob("syncalgos/jax/*-cache")]


@pytest.fixture(autouse=True)
def linux_only():
    if sys.platform != "linux":
        pytest.skip("XDG_CACHE_HOME moves the cache on Linux alone")


@pytest.fixture
def unnamed(monkeypatch, tmp_path):
    """This process as one in which nobody has said anything of a cache yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(FOLDER.upper(), raising=False)
    monkeypatch.delenv(SHORTEST.upper(), raising=False)
    settings = ENABLED, FOLDER, LARGEST, SHORTEST
    old_settings = {name: getattr(jax.config, name) for name in settings}
    jax.config.update(ENABLED, True)
    jax.config.update(FOLDER, None)
    jax.config.update(SHORTEST, 1.0)
    yield monkeypatch
    for name, value in old_settings.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_second_process_finds_every_program(tmp_path):
    variables = {**USER_ENVIRONMENT, "XDG_CACHE_HOME": tmp_path}
    requests, hits, misses, result = probed(**variables)
    assert requests == misses == len(entries(tmp_path)) > hits == 0
    assert probed(**variables) == [requests, requests, 0, result]


def test_entry_that_a_kill_has_cut_short_is_removed(unnamed, tmp_path):
    """jax's last word on an entry is its time; without it, jax would never write it."""
    folder = tmp_path / "syncalgos" / "jax"
    folder.mkdir(parents=True)
    for name in ("torn-cache", "whole-cache", "whole-atime"):
        (folder / name).touch()
    machine.use_cache()
    assert {x.name for x in folder.glob("*-*")} == {"whole-cache", "whole-atime"}


def test_default_folder_is_the_users_cache(unnamed, tmp_path):
    machine.use_cache()
    assert getattr(jax.config, FOLDER) == str(tmp_path / "syncalgos" / "jax")
    assert getattr(jax.config, SHORTEST) == 0
    assert getattr(jax.config, LARGEST) == machine.MOST_BYTES


def test_folder_that_cannot_be_made_is_not_used(unnamed, tmp_path):
    (tmp_path / "file").touch()
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    machine.use_cache()
    assert getattr(jax.config, FOLDER) is None


def test_folder_that_is_set_already_wins(unnamed, tmp_path):
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    unnamed.setenv(SHORTEST.upper(), "1")
    jax.config.update(FOLDER, str(tmp_path / "named"))
    machine.use_cache()
    assert getattr(jax.config, FOLDER) == str(tmp_path / "named")
    assert getattr(jax.config, SHORTEST) == 1
    assert getattr(jax.config, LARGEST) == -1
    assert not (tmp_path / "own").exists()


def test_cache_that_is_switched_off_stays_off(unnamed, tmp_path):
    jax.config.update(ENABLED, False)
    machine.use_cache()
    assert getattr(jax.config, FOLDER) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_from_the_cache_are_the_same_bit_for_bit(tmp_path):
    def run(name, **variables):
        variables = {
            **USER_ENVIRONMENT,
            "XDG_CACHE_HOME": tmp_path / "cache",
            **variables,
        }
        return execute(BASE, tmp_path / name, **variables)

    runs = [run("cold"), run("warm"), run("off", **{CACHE: "false"})]
    assert entries(tmp_path / "cache")
    assert len({x.summary["params_sha256"] for x in runs}) == 1
    assert len({x.stderr for x in runs}) == 1
