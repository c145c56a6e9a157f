"""Versions of the code that a study's numbers depend on."""

import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path

from experiments.training.versions import versions


def of_runs(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages, and of the user's own modules.

    Args:
        names: names of algorithms and tasks; those with a colon are the user's own.
    """
    # Runs of an edited algorithm must not be mixed with earlier ones.
    return {**versions(), **of_modules(names)}


def of_modules(names: Iterable[str]) -> dict[str, str]:
    """Returns a digest of each of the user's own modules.

    Args:
        names: names of algorithms and tasks; those with a colon are the user's own.
    """
    modules = {name.partition(":")[0] for name in names if ":" in name}
    return {name: _digest(_file(name)) for name in sorted(modules)}


def _file(module: str) -> Path:
    return Path(importlib.import_module(module).__file__ or "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
