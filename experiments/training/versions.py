"""The code that makes a run: versions of the packages, and the checkout's commit."""

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import syncalgos


@cache  # each checkpoint asks, and reading the packages' metadata takes 30 ms
def versions() -> dict[str, str]:
    """Returns the versions of all that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "syncalgos": syncalgos.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


@cache  # code that is edited while runs are made is not the code that makes them
def commit() -> str | None:
    """Returns the checkout's commit, "-dirty" if files differ; None without one."""
    root = Path(syncalgos.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    # By --exclude no tag is named; a status of others' must not wait for this one.
    words = ("git", "--no-optional-locks", "describe", "--always", "--dirty")
    words += ("--abbrev=12", "--exclude=*")
    try:
        found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None
