"""The machine of a run: its CPU devices, packages, and kept programs.

Compiled programs are kept between runs in jax's persistent cache, which is on by
default. jax's keys include the program, its options, XLA's flags, the versions, the
devices and the features of the CPU, so that machines and versions may share a folder.
With several processes jax lets only the first one write, and on CPUs the others have
other keys.
"""

import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
from filelock import FileLock
from jax.experimental.compilation_cache import compilation_cache

import syncalgos
from experiments.data.downloads import user_cache

# jax's settings; their environment variables have capitals.
ENABLED = "jax_enable_compilation_cache"
FOLDER = "jax_compilation_cache_dir"
LARGEST = "jax_compilation_cache_max_size"
SHORTEST = "jax_persistent_cache_min_compile_time_secs"

# The most bytes of all programs; the default run's have 0.2 MB. To add a program, jax
# reads the times of all: 0.04 s in a full cache of 64 MiB, 0.2 s in one of 256 MiB.
MOST_BYTES = 2**26

_threads = list[int]()  # that `use_devices` has set

# Earlier versions log each loaded program as an error on CPUs with AVX-512.
QUIET = (0, 10, 2)


def use_cpu_devices(count: int) -> None:
    """Sets the number of virtual CPU devices, unless the environment sets it."""
    # The setting would silently override the device count in XLA_FLAGS.
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if in_flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    with suppress(RuntimeError):  # the backend already runs, and keeps its devices
        jax.config.update("jax_num_cpu_devices", count)


def use_devices(count: int) -> None:
    """Sets the number of virtual CPU devices, and of threads.

    Raises:
        ValueError: the backend already runs with another number.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise ValueError(
                f"jax already runs with {jax.device_count()} devices, not {count}"
            ) from None
        return
    # Threads, too: XLA splits sums over threads, so their number changes results. XLA
    # reads it once; a program that embeds Python may start others, with all threads.
    environ_before = {name: os.environ.get(name) for name in environment(count, count)}
    os.environ |= environment(count, count)
    try:
        jax.devices()
    finally:
        for name, value in environ_before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    _threads.append(count)


def threads() -> int:
    """Returns the number of threads with which jax runs on CPUs here."""
    return _threads[-1] if _threads else int(os.environ.get("NPROC", cores()))


def environment(devices: int, threads: int) -> dict[str, str]:
    """Returns environment variables that set the CPU devices and threads."""
    return {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(threads)}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


@cache  # for checkpoints: reading the packages' metadata takes 30 ms
def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "syncalgos": syncalgos.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


@cache
def processor() -> str:
    """Returns the processor's name; another one rounds otherwise."""
    path = Path("/proc/cpuinfo")  # Linux: platform.processor() is empty there
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache  # edits of files during a run do not change the code that runs
def commit() -> str | None:
    """Returns the checkout's commit, "-dirty" if files differ; None without one."""
    root = Path(syncalgos.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    # --exclude keeps tags out; --no-optional-locks does not block other git commands.
    words = ("git", "--no-optional-locks", "describe", "--always", "--dirty")
    words += ("--abbrev=12", "--exclude=*")
    try:
        answer = subprocess.run(words, cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return answer.stdout.strip() or None


def use_cache() -> None:
    """Turns the cache on, unless the environment or jax's settings say otherwise.

    The cache is in the user's cache folder, and holds at most `MOST_BYTES`. It is not
    used if the folder cannot be written. An entry that cannot be read or written is
    silently ignored. JAX_COMPILATION_CACHE_DIR moves the cache, which then has no
    limit, and JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if not getattr(jax.config, ENABLED):
        return
    is_set = getattr(jax.config, FOLDER) is not None or FOLDER.upper() in os.environ
    folder = None
    if not is_set and jax.__version_info__ >= QUIET:
        folder = _user_folder()
    if folder is not None:
        jax.config.update(FOLDER, str(folder))
        jax.config.update(LARGEST, MOST_BYTES)
    if getattr(jax.config, FOLDER):
        entry = "Error (reading|writing) persistent compilation cache entry"
        warnings.filterwarnings("ignore", f"{entry}|Cache value for key")
        if SHORTEST.upper() not in os.environ:
            # A run compiles some fifteen programs: below 1 s each, but half its time.
            jax.config.update(SHORTEST, 0.0)


@contextmanager
def cache_as_before() -> Iterator[None]:
    """Gives jax its settings of the cache back at the end."""
    names = (FOLDER, LARGEST, SHORTEST)
    earlier_settings = {name: getattr(jax.config, name) for name in names}
    try:
        yield
    finally:
        has_moved = getattr(jax.config, FOLDER) != earlier_settings[FOLDER]
        for name, value in earlier_settings.items():
            jax.config.update(name, value)
        if has_moved:  # jax opens a folder once
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
