"""Published comparisons, and the track, as data: NAME.toml here or in a folder."""

import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from experiments.cli.words import as_words, flag_groups, parameter
from experiments.study import variants
from experiments.study.variants import Words

FILES = {path.stem: path for path in Path(__file__).parent.rglob("*.toml")}
NAMES = tuple(sorted(FILES))


def load(name: str) -> dict[str, Any]:
    """Returns the content of a preset, one of `NAMES`."""
    return tomllib.loads(FILES[name].read_text("utf-8"))


def paper(name: str) -> dict[str, str]:
    """Returns a preset's name and texts: preset, title, source, found and differs."""
    content = load(name)
    return {"preset": name} | {
        key: content[key] for key in ("title", "source", "found", "differs")
    }


def under(words: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Returns a command line with a preset's flags, except those that it sets itself.

    Args:
        words: the preset's flags.
        argv: the user's flags.
    """
    given = set().union(*map(_sets, flag_groups(argv)))
    # Both flags set the global batch: the user's wins.
    if "batch_size" in given:
        given |= {"worker_batch"}
    # The preset's baseline is one of its own algorithms.
    if "algos" in given:
        given |= {"baseline"}
    kept = [group for group in flag_groups(words) if not given & _sets(group)]
    return [*chain.from_iterable(kept), *argv]


def _sets(group: Words) -> set[str]:
    """Returns the parameters that a flag sets: its own, and those that it varies."""
    flag, _, value = " ".join(group).replace(" ", "=", 1).partition("=")
    is_varied = flag in ("--tune", "--sweep")
    varied = variants.read_range(flag, value).flags if is_varied else ()
    return {parameter(flag), *varied}


def words(table: Mapping[str, Any]) -> list[str]:
    """Returns a table of flags as words of a command line."""
    # A flag with several values is repeated, except --algos, which joins them.
    joined = {"algos": ", ".join(table["algos"])} if "algos" in table else {}
    return as_words({**table, **joined})
