"""Keeps compiled programs between runs: jax's persistent cache, on by default.

jax's keys include the program, its options, XLA's flags, the versions, the devices and
the features of the CPU, so that machines and versions may share a folder. With several
processes jax lets only the first one write, and on CPUs the others have other keys.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from filelock import FileLock
from jax.experimental.compilation_cache import compilation_cache

from experiments.data.downloads import user_cache

# jax's settings; their environment variables have capitals.
ENABLED = "jax_enable_compilation_cache"
FOLDER = "jax_compilation_cache_dir"
LARGEST = "jax_compilation_cache_max_size"
SHORTEST = "jax_persistent_cache_min_compile_time_secs"

# The most bytes of all programs; the default run's have 0.2 MB. To add a program, jax
# reads the times of all: 0.04 s in a full cache of 64 MiB, 0.2 s in one of 256 MiB.
MOST = 2**26

# Earlier versions log each loaded program as an error on CPUs with AVX-512.
QUIET = (0, 10, 2)


def use() -> None:
    """Turns the cache on, unless the environment or jax's settings say otherwise.

    The cache is in the user's cache folder, and holds at most `MOST` bytes. It is not
    used if the folder cannot be written. An entry that cannot be read or written is
    silently ignored. JAX_COMPILATION_CACHE_DIR moves the cache, which then has no
    limit, and JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if not getattr(jax.config, ENABLED):
        return
    named = getattr(jax.config, FOLDER) is not None or FOLDER.upper() in os.environ
    if not named and jax.__version_info__ >= QUIET and (folder := _user_folder()):
        jax.config.update(FOLDER, str(folder))
        jax.config.update(LARGEST, MOST)
    if getattr(jax.config, FOLDER):
        entry = "Error (reading|writing) persistent compilation cache entry"
        warnings.filterwarnings("ignore", f"{entry}|Cache value for key")
        if SHORTEST.upper() not in os.environ:
            # A run compiles some thirty programs: below 1 s each, but half its time.
            jax.config.update(SHORTEST, 0.0)


@contextmanager
def as_before() -> Iterator[None]:
    """Gives jax its settings of the cache back at the end."""
    before = {name: getattr(jax.config, name) for name in (FOLDER, LARGEST, SHORTEST)}
    try:
        yield
    finally:
        moved = getattr(jax.config, FOLDER) != before[FOLDER]
        for name, value in before.items():
            jax.config.update(name, value)
        if moved:  # jax opens a folder once
            compilation_cache.reset_cache()


def _user_folder() -> Path | None:
    """Returns the cache folder for programs; None if it cannot be written."""
    try:
        folder = user_cache() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        _remove_cut_short(folder)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return folder


def _remove_cut_short(folder: Path) -> None:
    """Removes the entries that a kill or a full disk cut short."""
    # jax writes an entry, and then its time. While an entry has no time, jax writes
    # neither this entry nor any other.
    with FileLock(folder / ".lockfile", timeout=10):  # jax's own
        timed = {path.name.removesuffix("-atime") for path in folder.iterdir()}
        entries = [*folder.glob("*-cache")]
        for entry in (x for x in entries if x.name.removesuffix("-cache") not in timed):
            entry.unlink()
