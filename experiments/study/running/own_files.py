"""The names of the files that a study writes; other files are never removed."""

import os
import re
from contextlib import suppress
from pathlib import Path

from experiments.training import records


def _written(*names: str) -> str:
    """Returns a pattern for files that `records.write` writes, finished or not."""
    pattern = "|".join(map(re.escape, names))
    return rf"(?:{pattern}|\.(?:{pattern})\.tmp)"


_RUN = _written(*records.NAMES)
_RUN += r"|checkpoints/(?:step-\d+\.\d+-of-\d+\.npz|\.\d+-of-\d+\.unfinished)"
_TOP = _written("study.json", "metrics.jsonl", "finals.jsonl")
_TOP += "|" + _written("table.md", "table.csv", "report.html")

OF_RUN = re.compile(_RUN)
OF_STUDY = re.compile(
    rf"{_TOP}|figures/\.?[^/]+\.(?:svg|png)(?:\.tmp)?|(?:runs|tuning)/.+/(?:{_RUN})"
    r"|tensorboard/(?:.+/events\.out\.tfevents\.[^/]+|events\.out\.[^/]+\.syncalgos)"
    r"|\.syncalgos-[0-9a-f]{32}"
)
_FOLDERS = re.compile("(?:runs|tuning|figures|tensorboard)(?:/.+)?|checkpoints")


def remove(folder: Path, names: re.Pattern[str]) -> list[str]:
    """Removes the files with these names, and folders that are then empty.

    Links to folders are removed, too, but not the folders that they point to.

    Returns:
        The names of all other files in the folder.

    Raises:
        OSError: a file cannot be removed.
    """
    others = []
    # The outermost files come last: study.json identifies the folder.
    for top, folders, files in os.walk(folder, topdown=False):
        for path in (Path(top, name) for name in (*folders, *files)):
            name = path.relative_to(folder).as_posix()
            is_folder = path.is_dir()
            if is_folder and not path.is_symlink():
                with suppress(OSError):  # it holds others
                    if _FOLDERS.fullmatch(name):
                        path.rmdir()
            elif (_FOLDERS if is_folder else names).fullmatch(name):
                path.unlink()
            else:
                others.append(name)
    return sorted(others)
