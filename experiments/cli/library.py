"""The library as the command line reads it: its files, as its import imports jax."""

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING


def _folder() -> Path:
    """Returns the package's folder."""
    package = importlib.util.find_spec("syncalgos")
    assert package is not None and package.submodule_search_locations is not None
    return Path(next(iter(package.submodule_search_locations)))


FOLDER = _folder()
ALGORITHMS: dict[str, Path] = {
    file.stem: file for file in sorted((FOLDER / "algorithms").glob("[!_]*.py"))
}
"""The registry's names, which are those of its files."""


def version() -> str:
    """Returns the library's version."""
    text = (FOLDER / "__init__.py").read_text("utf-8")
    [found] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def _checks():
    """Loads `syncalgos.checks` without the package around it."""
    # The package imports jax, which takes two seconds; this file needs none of it.
    spec = importlib.util.spec_from_file_location("checks", FOLDER / "checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from syncalgos import checks as checks
else:
    checks = _checks()
