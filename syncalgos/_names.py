"""Public names, and what to use for wrong ones; nothing here imports jax."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from syncalgos import checks

Function = TypeVar("Function", bound=Callable[..., Any])

_SOURCES = "_public.py", "algorithms/__init__.py"

ALIASES = {
    "allreduce": "sync_sgd",
    "d_psgd": "gossip",
    "ddp": "sync_sgd",
    "fedadam": "fedopt",
    "local_sgd": "model_averaging",
    "qsgd": "quantized_sgd",
    "sgp": "push_sum",
}
"""Names that algorithms have elsewhere, and their names here."""

_INSTEAD = {alias: f"use {name!r}" for alias, name in ALIASES.items()}


class Registry(dict[str, Function]):
    """Algorithms by name; a wrong name is answered with the nearest one."""

    def __init__(self, algorithms: Iterable[Function]):
        super().__init__({algorithm.__name__: algorithm for algorithm in algorithms})

    def __missing__(self, name: str) -> Function:
        try:
            checks.one_of("algorithm", name, self, _INSTEAD)
        except ValueError as error:
            raise KeyError(str(error)) from None
        raise AssertionError  # a name that is registered is not missing


def read_public_names() -> set[str]:
    """Reads the names that the package's lists of imports make public."""
    names = set()
    for source in _SOURCES:
        tree = ast.parse((Path(__file__).parent / source).read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if name.isidentifier() and name[0] != "_"}


def suggest(name: str) -> str:
    """Says what to use for a name that the package does not have."""
    if name in _INSTEAD:
        return f": {_INSTEAD[name]}"
    nearest = checks.nearest(name, sorted(read_public_names()))
    return nearest or ": dir(syncalgos) lists its names"
