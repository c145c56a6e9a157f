"""What papers and published code say of an algorithm: defaults and updates."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import factories

DOCS = Path(__file__).parents[1]
DEFAULTS = DOCS / "defaults.toml"
DIFFERENCES = DOCS / "differences.toml"
HEAD = """\
| flag | here | paper | published code | `--preset paper` |
|---|---|---|---|---|"""


class Default(NamedTuple):
    """The values of one flag of an algorithm, as text.

    Attributes:
        flag: as on the command line.
        here: the default of the library.
        paper: the value of the paper; a star: not checked against the paper's text.
        code: the value of published code.
        preset: the value of `--preset paper`, or "" where it is the default.
    """

    flag: str
    here: str
    paper: str
    code: str
    preset: str


@cache
def read_toml(path: Path) -> Mapping[str, Any]:
    """Reads a file of this folder once."""
    return tomllib.loads(path.read_text("utf-8"))


def find_defaults(name: str) -> list[Default]:
    """Returns the flags of an algorithm, in the order of the file."""
    values = factories.describe_factory(factories.ALGORITHM, name).defaults
    presets = read_toml(factories.PUBLISHED).get(name, {})
    return [
        Default(
            flag=f"--{parameter.replace('_', '-')}",
            here=sources.get("here", in_words(values[parameter])),
            paper=sources["paper"],
            code=sources["code"],
            preset=in_words(presets.get(parameter, "")),
        )
        for parameter, sources in read_toml(DEFAULTS).get(name, {}).items()
    ]


def in_words(value: object) -> str:
    """Returns a value as the tables write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def defaults_table(name: str) -> str:
    """Returns where the defaults of an algorithm come from, or "" if it has none."""
    defaults = find_defaults(name)
    if not defaults:
        return ""
    rows = [
        f"| `{x.flag}` | {x.here} | {x.paper} | {x.code} | {x.preset} |"
        for x in defaults
    ]
    star = ""
    if any(x.paper.endswith("*") or x.code.endswith("*") for x in defaults):
        star = "\n\nA star marks a value that was not checked against the paper's text."
    return "**Where the defaults come from.**\n\n" + "\n".join([HEAD, *rows]) + star


def find_differences(name: str) -> list[str]:
    """Returns how the paper, its code and this library differ, a paragraph each."""
    return [
        difference["text"].strip()
        for difference in read_toml(DIFFERENCES)["difference"]
        if name in difference["algorithms"]
    ]


def differences_list(name: str) -> str:
    """Returns the section on differences, or "" if there is none."""
    differences = find_differences(name)
    if not differences:
        return ""
    items = "\n".join(f"- {' '.join(text.split())}" for text in differences)
    return f"## Where the paper, its code and this library differ\n\n{items}"
