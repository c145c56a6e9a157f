"""The names of the files that a study's run writes; other files are never removed."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from experiments.training.files import UNFINISHED
from experiments.training.run_folder import NAMES

_NAMES = "|".join(map(re.escape, NAMES))
_OF_RUN = re.compile(
    rf"{_NAMES}|\.(?:{_NAMES}){UNFINISHED}|checkpoints/"
    rf"(?:step-\d+\.\d+-of-\d+\.npz|\.\d+-of-\d+{UNFINISHED})"
)
_FOLDER = "checkpoints"


def remove(folder: Path) -> None:
    """Removes the files of a run, and its folder of checkpoints if it is then empty.

    A link to such a folder is removed, but not what it points to.

    Raises:
        OSError: a file cannot be removed.
    """
    for path in _inside(folder):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir():
            if _OF_RUN.fullmatch(name):
                path.unlink()
        elif name == _FOLDER:
            with suppress(OSError):  # it holds others
                path.unlink() if path.is_symlink() else path.rmdir()


def _inside(folder: Path) -> Iterator[Path]:
    """Yields all that is in a folder, the innermost first."""
    for top, folders, files in os.walk(folder, topdown=False):
        yield from (Path(top, name) for name in (*folders, *files))
