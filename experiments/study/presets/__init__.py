"""Published comparisons as data: experiments/study/presets/NAME.toml."""

import tomllib
from itertools import chain
from typing import Any, NamedTuple

from experiments.study import search_space
from experiments.study.analysis.results import Paper
from experiments.study.config import FOLDER
from experiments.study.entries import groups_of_flags, parameter


class Preset(NamedTuple):
    """A comparison that somebody published.

    Attributes:
        paper: what it repeats.
        words: its flags, as on the command line.
    """

    paper: Paper
    words: list[str]

    def under(self, argv: list[str]) -> list[str]:
        """A command line with the preset's flags, but for what it says otherwise."""
        given = set().union(*map(_sets, groups_of_flags(argv)))
        if "batch_size" in given:
            given |= {"worker_batch"}
        mine = groups_of_flags(self.words)
        kept = [group for group in mine if not given & _sets(group)]
        return [*chain.from_iterable(kept), *argv]


def _sets(group: search_space.Words) -> set[str]:
    """What a flag decides: its parameter, and that of which it gives the values."""
    flag, _, value = " ".join(group).replace(" ", "=", 1).partition("=")
    varied = (
        {search_space.values(flag, value).flag} if flag in ("--tune", "--sweep") else ()
    )
    return {parameter(flag), *varied}


def load(name: str) -> Preset:
    """Reads a preset, one of `request.PRESETS`."""
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    paper = Paper(name, *(content[k] for k in ("title", "source", "found", "differs")))
    return Preset(paper, words(content["flags"]))


def words(table: dict[str, Any]) -> list[str]:
    """A table of flags as a command line has them; a list is joined with commas."""
    found = []
    for flag, value in table.items():
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list) and flag == "algos":
            found += [f"--{flag}", ", ".join(value)]
        elif isinstance(value, list):  # a flag that may be repeated
            found += [word for each in value for word in (f"--{flag}", str(each))]
        else:
            found += [f"--{flag}", str(value)]
    return found
