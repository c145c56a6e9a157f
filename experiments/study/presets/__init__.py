"""Published comparisons as data: NAME.toml here or in a folder."""

import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from experiments.command.words import Words, parameter
from experiments.study.command_line import parse_axis

FILES = {path.stem: path for path in Path(__file__).parent.rglob("*.toml")}
NAMES = tuple(sorted(FILES))


def load_preset(name: str) -> dict[str, Any]:
    """Returns the content of a preset, one of `NAMES`."""
    return tomllib.loads(FILES[name].read_text("utf-8"))


def paper(name: str) -> dict[str, str]:
    """Returns a preset's name and texts: preset, title, source, found and differs."""
    content = load_preset(name)
    texts = {"preset": name}
    for key in ("title", "source", "found", "differs"):
        texts[key] = content[key]
    return texts


def under(name: str, user_names: Collection[str]) -> dict[str, Any]:
    """Returns a preset's flags by parameter, except what the user sets.

    Args:
        name: the name of the preset.
        user_names: the parameters that the user sets, sweeps or tunes.
    """
    left_out = {*user_names}
    # Both flags set the global batch: the user's wins.
    if "batch_size" in left_out:
        left_out.add("worker_batch")
    # The preset's baseline is one of its own algorithms.
    if "algos" in left_out:
        left_out.add("baseline")
    values: dict[str, Any] = {}
    for flag, value in load_preset(name)["flags"].items():
        items = value if isinstance(value, list) else [value]
        items = [item for item in items if not left_out & _list_names(flag, item)]
        if items:
            values[parameter(flag)] = items if isinstance(value, list) else value
    if "algos" in values:
        values["algos"] = ", ".join(values["algos"])
    return values


def list_set_names(groups: Iterable[Words]) -> set[str]:
    """Returns the parameters that flags set, sweep or tune, each with its value."""
    names: set[str] = set()
    for group in groups:
        flag, _, value = " ".join(group).replace(" ", "=", 1).partition("=")
        names |= _list_names(flag, value)
    return names


def _list_names(flag: str, value: Any) -> set[str]:
    """Returns the parameters that a flag sets: its own, and those that it varies."""
    name = parameter(flag)
    if name in ("tune", "sweep"):
        return {name, *parse_axis(f"--{name}", value).flags}
    return {name}
