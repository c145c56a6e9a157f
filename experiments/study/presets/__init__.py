"""Published comparisons as data: NAME.toml here or in a folder."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.command.words import Words, parameter
from experiments.study.command_line import parse_axis

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


def under(name: str, given: Sequence[Words]) -> dict[str, Any]:
    """Returns a preset's flags by parameter, except what the user sets.

    Args:
        name: the name of the preset.
        given: the user's flags, each with its value.
    """
    pairs = [" ".join(group).replace(" ", "=", 1).partition("=") for group in given]
    theirs = set().union(*(_sets(flag, value) for flag, _, value in pairs))
    # Both flags set the global batch: the user's wins.
    if "batch_size" in theirs:
        theirs |= {"worker_batch"}
    # The preset's baseline is one of its own algorithms.
    if "algos" in theirs:
        theirs |= {"baseline"}
    kept = {}
    for flag, value in load(name)["flags"].items():
        several = value if isinstance(value, list) else [value]
        left = [x for x in several if not theirs & _sets(flag, x)]
        if left:
            kept[parameter(flag)] = left if isinstance(value, list) else value
    if "algos" in kept:
        kept["algos"] = ", ".join(kept["algos"])
    return kept


def _sets(flag: str, value: Any) -> set[str]:
    """Returns the parameters that a flag sets: its own, and those that it varies."""
    name = parameter(flag)
    varied = parse_axis(f"--{name}", value).flags if name in ("tune", "sweep") else ()
    return {name, *varied}
