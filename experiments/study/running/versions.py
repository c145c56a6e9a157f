"""Versions of the code that a study's numbers depend on."""

import hashlib
import importlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import experiments
import syncalgos
from experiments.training.prepared import versions


def of_runs(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages, and of the user's own modules.

    Args:
        names: of algorithms and tasks; those with a colon are the user's own.
    """
    # Runs of an edited algorithm must not be mixed with those before.
    modules = {name.partition(":")[0] for name in names if ":" in name}
    return {**versions(), **{name: _digest([_file(name)]) for name in sorted(modules)}}


def of_code(names: Iterable[str]) -> dict[str, str]:
    """Returns the same and the code of this program, which a version may not tell."""
    return {**of_runs(names), "code": _own()}


@cache
def _own() -> str:
    """Returns a digest of the packages' own files."""
    roots = (Path(package.__path__[0]) for package in (experiments, syncalgos))
    return _digest(path for root in roots for path in sorted(root.rglob("*.py")))


def _file(module: str) -> Path:
    return Path(importlib.import_module(module).__file__ or "")


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()
