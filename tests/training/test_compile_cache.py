"""Programs that are kept between processes: found again, the same, and in silence."""

import json
import os
import subprocess
import sys

import jax
import pytest
from commands import BASE, CACHE, ROOT, SHARED, environment, execute

from experiments.training import compile_cache
from experiments.training.compile_cache import ENABLED, FOLDER, LARGEST, SHORTEST

# What a process compiles, and what it has to do with the cache; then a program.
PROBE = """
import json, sys
from collections import Counter
import jax
from experiments.training import compile_cache

seen = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
compile_cache.use()
y = jax.jit(lambda x: (x @ x).sum() / 3)(jax.numpy.arange(16.0).reshape(4, 4))
asked, hits, misses = (
    seen[f"/jax/compilation_cache/{name}"]
    for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")
)
folder = jax.config.jax_compilation_cache_dir
print(json.dumps([asked, hits, misses, float(y).hex(), folder]))
"""
OWN: dict = dict.fromkeys(SHARED)  # as a user has it, who says nothing


class Probed:
    """The cache, as a process with these variables reports it."""

    def __init__(self, **variables):
        ended = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment(PYTHONPATH=ROOT, **variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        told = json.loads(ended.stdout)
        self.asked, self.hits, self.misses, self.result, self.folder = told


def entries(folder):
    """The files of programs, by name."""
    return {x.name: x for x in folder.glob("syncalgos/jax/*-cache")}


@pytest.fixture(autouse=True)
def linux_only():
    if sys.platform != "linux":
        pytest.skip("XDG_CACHE_HOME moves the cache on Linux alone")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache folder in which a first process has left its programs."""
    folder = tmp_path_factory.mktemp("cache")
    first = Probed(**OWN, XDG_CACHE_HOME=folder)
    assert first.asked == first.misses == len(entries(folder)) > 0
    return folder, first


@pytest.fixture
def unnamed(monkeypatch):
    """This process as one in which nobody has said anything of a cache yet."""
    monkeypatch.delenv(FOLDER.upper(), raising=False)
    monkeypatch.delenv(SHORTEST.upper(), raising=False)
    settings = ENABLED, FOLDER, LARGEST, SHORTEST
    before = {name: getattr(jax.config, name) for name in settings}
    jax.config.update(ENABLED, True)
    jax.config.update(FOLDER, None)
    jax.config.update(SHORTEST, 1.0)
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


def test_second_process_finds_every_program(cache):
    folder, first = cache
    second = Probed(**OWN, XDG_CACHE_HOME=folder)
    assert (second.hits, second.misses) == (first.asked, 0)
    assert second.result == first.result


def test_entry_that_is_not_whole_is_made_anew_in_silence(cache):
    folder, first = cache
    sizes = {name: x.stat().st_size for name, x in entries(folder).items()}
    for name, entry in entries(folder).items():
        os.truncate(entry, sizes[name] // 2)
        # jax's last words on it, which a kill prevents.
        entry.with_name(name.replace("-cache", "-atime")).unlink()
    again = Probed(**OWN, XDG_CACHE_HOME=folder)
    assert (again.hits, again.result) == (0, first.result)
    found = {name: x.stat().st_size for name, x in entries(folder).items()}
    assert found == sizes


def test_folder_that_becomes_full_loses_what_was_used_least_recently(cache):
    folder, first = cache
    large = folder / "syncalgos" / "jax" / "jit_old-cache"
    large.write_bytes(bytes(compile_cache.MOST))
    (large.parent / "jit_old-atime").write_bytes(bytes(8))
    again = Probed(**OWN, XDG_CACHE_HOME=folder)
    assert again.result == first.result
    assert len(entries(folder)) == first.asked
    assert not large.exists()


def test_default_folder_is_the_users_cache(unnamed, tmp_path):
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cache.use()
    assert getattr(jax.config, FOLDER) == str(tmp_path / "syncalgos" / "jax")
    assert getattr(jax.config, SHORTEST) == 0
    assert getattr(jax.config, LARGEST) == compile_cache.MOST


def test_folder_that_cannot_be_made_is_not_used(unnamed, tmp_path):
    (tmp_path / "file").touch()
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compile_cache.use()
    assert getattr(jax.config, FOLDER) is None


def test_folder_that_is_set_already_wins(unnamed, tmp_path):
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    unnamed.setenv(SHORTEST.upper(), "1")
    jax.config.update(FOLDER, str(tmp_path / "named"))
    compile_cache.use()
    assert getattr(jax.config, FOLDER) == str(tmp_path / "named")
    assert getattr(jax.config, SHORTEST) == 1
    assert getattr(jax.config, LARGEST) == -1
    assert not (tmp_path / "own").exists()


def test_cache_that_is_switched_off_stays_off(unnamed, tmp_path):
    unnamed.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(ENABLED, False)
    compile_cache.use()
    assert getattr(jax.config, FOLDER) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_from_the_cache_are_the_same_bit_for_bit(tmp_path):
    def run(name, **variables):
        variables = {**OWN, "XDG_CACHE_HOME": tmp_path / "cache", **variables}
        return execute(BASE, tmp_path / name, **variables)

    runs = [run("cold"), run("warm"), run("off", **{CACHE: "false"})]
    assert entries(tmp_path / "cache")
    assert len({x.summary["params_sha256"] for x in runs}) == 1
    assert len({x.stderr for x in runs}) == 1
