"""What an adapter says of its project."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

SOURCES = "CONFORMANCE_SOURCES"  # the folder of checkouts, from --sources
CauseName = Literal["differs by choice", "departs from the paper", "fault", "undecided"]


class Cause(NamedTuple):
    """Why an implementation's params differ from those of a file.

    Attributes:
        verdict: "fault" only where the project's documents, the paper or its authors'
            code say something else, which is to be read first.
        reason: what is different, and where that is documented; no full stop.
        reproduction: a program of conformance/repros/ that shows it, if one does.
        error: the kind of error that it raises; "" if it has other params.
    """

    verdict: CauseName
    reason: str
    reproduction: str = ""
    error: str = ""


class AgreementRow(NamedTuple):
    """An implementation with its settings, and the file on which it runs.

    Attributes:
        implementation: the class or function, and settings that the file does not give.
        file: the name of the vectors.
        run: takes the content of the file, returns the workers' params after each step,
            (steps, workers, size).
        tolerance: the largest difference of an entry that agrees: 1e-9, or 1e-5 and so
            on for code that computes in float32.
        help: what the adapter does beyond public arguments; no full stop.
        cause: why the params differ, if they do.
    """

    implementation: str
    file: str
    run: Callable[[dict[str, Any]], Any]
    tolerance: float = 1e-9
    help: str = ""
    cause: Cause | None = None


class Project(NamedTuple):
    """A project, its version or commit, and its rows, of unlike implementations."""

    name: str
    version: str
    rows: Sequence[AgreementRow]


def add_checkout(folder: str, *parts: str) -> str:
    """Makes a checkout of a project importable, which is on no package index.

    Args:
        folder: the name of the checkout in the folder of checkouts.
        parts: the folder in it from which its modules are imported.

    Returns:
        The commit.

    Raises:
        ModuleNotFoundError: there is no such checkout.
    """
    checkout = Path(os.environ.get(SOURCES, "")) / folder
    if SOURCES not in os.environ or not checkout.is_dir():
        raise ModuleNotFoundError(f"no checkout {folder} in --sources")
    sys.path.insert(0, str(checkout.joinpath(*parts)))
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return subprocess.check_output(command, text=True).strip()
