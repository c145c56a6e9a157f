"""Keeps compiled programs between runs: jax's persistent cache, on by default.

jax's keys hold the program, its options, XLA's flags, the versions, the devices and the
features of the CPU: machines and versions may share a folder. Of several processes jax
lets only the first one write, and on CPUs the others have keys of their own.
"""

import os
import re
import warnings
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path

import jax

from experiments.tasks.data.files import user_cache

# jax's settings; in the environment, in capitals.
ENABLED = "jax_enable_compilation_cache"
FOLDER = "jax_compilation_cache_dir"
SHORTEST = "jax_persistent_cache_min_compile_time_secs"

MOST = 2**28  # bytes of all programs; those of the default run have 0.3 MB
# Pruning halves the folder, so that few starts have anything to remove.
KEPT = MOST // 2

# Earlier ones log each program they load as an error, where the CPU has AVX-512.
QUIET = (0, 10, 2)

ENTRY = "-cache"  # how a file that holds a program ends

# jax's warning about a file cut short by a full disk or a kill, or just being written.
_BROKEN = re.compile(
    "Error (?:reading|writing) persistent compilation cache entry for '([^']*)'"
)


def use() -> None:
    """Turns the cache on, unless the environment or jax's settings say otherwise.

    It lies in the user's cache folder, and holds at most `MOST` bytes. One that cannot
    be written is not used; an entry that cannot be read is removed and made anew; the
    run goes on in silence. JAX_COMPILATION_CACHE_DIR moves the cache, to where nothing
    bounds it, and JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if not getattr(jax.config, ENABLED):
        return
    named = getattr(jax.config, FOLDER) is not None or FOLDER.upper() in os.environ
    if not named and jax.__version_info__ >= QUIET and (own := _own_folder()):
        jax.config.update(FOLDER, str(own))
    if folder := getattr(jax.config, FOLDER):
        _mend(Path(folder))
        if SHORTEST.upper() not in os.environ:
            # A run has some thirty programs: half its time in all, yet each below 1 s.
            jax.config.update(SHORTEST, 0.0)


def _own_folder() -> Path | None:
    """Returns the user's folder of programs, pruned; None if it cannot be written."""
    try:
        folder = user_cache() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder, MOST, KEPT)
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def prune(folder: Path, most: int, kept: int) -> None:
    """Removes the entries used least recently, if there is too much.

    Args:
        folder: the one with the entries.
        most: bytes that may be there.
        kept: bytes to which the entries are reduced where there are more.
    """
    with os.scandir(folder) as found:
        entries = [(x.stat(), x.path) for x in found if x.name.endswith(ENTRY)]
    size = sum(stat.st_size for stat, _ in entries)
    if size <= most:
        return
    # Most file systems record an access once a day: the time of writing counts, too.
    for stat, path in sorted(entries, key=lambda x: max(x[0].st_atime, x[0].st_mtime)):
        if size <= kept:
            return
        with suppress(OSError):  # another was quicker
            os.unlink(path)
        size -= stat.st_size


@cache
def _mend(folder: Path) -> None:
    """Removes an entry that jax warns about, and hides the warning."""
    # jax writes in place, and never over an entry: a broken one would cost a
    # compilation and a warning in every run.
    shown = warnings.showwarning

    def show(message, *arguments, **keywords):
        if (found := _BROKEN.match(str(message))) is None:
            return shown(message, *arguments, **keywords)
        for entry in folder.glob(f"{escape(found[1])}-*{ENTRY}"):
            with suppress(OSError):
                entry.unlink()

    warnings.showwarning = show
    warnings.filterwarnings("always", message=_BROKEN.pattern)
