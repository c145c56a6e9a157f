"""Versions of the code that a study's numbers depend on."""

import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path

from experiments.training.versions import versions

PACKAGES = "syncalgos", "models", "experiments"


def of_runs(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages, and of the user's own modules.

    Args:
        names: names of algorithms and tasks; those with a colon are the user's own.
    """
    # Runs of an edited algorithm must not be mixed with earlier ones.
    own = {name: _digest([_file(name)]) for name in modules(names)}
    return {**versions(), **own}


def modules(names: Iterable[str]) -> list[str]:
    """Returns the user's own modules among the names of algorithms and tasks."""
    return sorted({name.partition(":")[0] for name in names if ":" in name})


def of_code(module: str) -> str:
    """Returns a digest of a module's code: of all files, if it is one of `PACKAGES`."""
    path = _file(module)
    return _digest(path.parent.rglob("*.py") if module in PACKAGES else [path])


def _file(module: str) -> Path:
    return Path(importlib.import_module(module).__file__ or "")


def _digest(paths: Iterable[Path]) -> str:
    # Lock files of text editors are broken links.
    contents = (path.read_bytes() for path in sorted(paths) if path.is_file())
    return hashlib.sha256(b"".join(contents)).hexdigest()
