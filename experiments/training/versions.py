"""The versions of the packages that a run uses, and the checkout's commit."""

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import syncalgos


@cache  # for checkpoints: reading the packages' metadata takes 30 ms
def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "syncalgos": syncalgos.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


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
        found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None
