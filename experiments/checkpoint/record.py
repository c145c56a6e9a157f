"""The record of a shard: what a run needs beside its arrays, checked field by field."""

import dataclasses
import reprlib
from itertools import pairwise
from typing import Any, NamedTuple

from experiments.training.measurements import displacements
from experiments.training.records import Progress

# Earlier versions wrote none of these.
LATER = {"run_id", "start_id"}
LATER_OF_PROGRESS = {"lane_form", "run_id", "saved", "decided"}

# Of a line of metrics.jsonl; more begin with test_.
OF_LINES = {"step", "train_loss", "test_loss", "test_accuracy", "bytes_per_worker"}
OF_LINES |= {"divergence", "seconds"}

MOST = 1e300  # of a number; JSON has larger whole ones
DEEPEST = 4  # lists in each other, of a flag's value


class Record(NamedTuple):
    """The record of a shard.

    Attributes:
        progress: of the run until then.
        settings: what its numbers depend on, by flag, as JSON has it.
        versions: of all that its numbers depend on.
        sent: bytes that each worker has sent; None: they are not known.
        run_id: of the run; "": it has none.
        start_id: drawn at random where its process began or went on; likewise.
    """

    progress: Progress
    settings: dict[str, Any]
    versions: dict[str, str]
    sent: float | None
    run_id: str = ""
    start_id: str = ""


def read(record: dict[str, Any], step: int) -> Record:
    """Reads the record of a shard.

    Args:
        record: as JSON has it.
        step: of the shard.

    Raises:
        ValueError: in one line, a field that is unknown, missing, or not as it is
            written.
    """
    _check_names("", record, Record._fields, LATER)
    for name, value in record.items():
        _check("", name, value, _OF_RECORD[name](value, step))
    progress = record["progress"]
    names = [x.name for x in dataclasses.fields(Progress)]
    _check_names("progress.", progress, names, LATER_OF_PROGRESS)
    for name, value in progress.items():
        _check("progress.", name, value, _OF_PROGRESS[name](value, step))
    last = progress["lines"][-1]["step"] if progress["lines"] else 0
    losses = progress["losses"]
    _check("progress.", "losses", losses, len(losses) == step - last)
    run_id = record.get("run_id", "")
    _check("", "run_id", run_id, run_id == progress.get("run_id", ""))
    return Record(**{**record, "progress": Progress(**progress)})


def _check_names(prefix: str, found: dict[str, Any], known: Any, later: set) -> None:
    """Raises a ValueError for a field that is unknown or missing."""
    for name in found:
        if name not in known:
            raise ValueError(f"its record has the unknown field {prefix}{name}")
    for name in known:
        if name not in found and name not in later:
            raise ValueError(f"its record has no {prefix}{name}")


def _check(prefix: str, name: str, value: Any, fits: bool) -> None:
    """Raises a ValueError for the value of a field that does not fit."""
    if not fits:
        raise ValueError(f"its record's {prefix}{name} cannot be {reprlib.repr(value)}")


# Whether a value fits, in a shard of a step


def _is_number(x: Any, step: int) -> bool:
    return type(x) in (int, float) and -MOST <= x <= MOST  # NaN is not


def _is_amount(x: Any, step: int) -> bool:
    return _is_number(x, step) and x >= 0


def _is_maybe_amount(x: Any, step: int) -> bool:
    return x is None or _is_amount(x, step)


def _is_step(x: Any, step: int) -> bool:
    return type(x) is int and 0 <= x <= step


def _is_text(x: Any, step: int) -> bool:
    return isinstance(x, str)


def _are_lines(x: Any, step: int) -> bool:
    if not isinstance(x, list) or not all(_is_line(line, step) for line in x):
        return False
    return all(a["step"] < b["step"] for a, b in pairwise(x))


def _is_line(x: Any, step: int) -> bool:
    if not isinstance(x, dict) or not OF_LINES.issubset(x):
        return False
    others = x.keys() - OF_LINES - {"learning_rate", *displacements.NAMES}
    return (
        all(name.startswith("test_") for name in others)
        and all(value is None or _is_number(value, step) for value in x.values())
        and _is_step(x["step"], step)
    )


def _are_decisions(x: Any, step: int) -> bool:
    return isinstance(x, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and _is_step(pair[0], step - 1)
        and _is_step(pair[1], 2**31)
        for pair in x
    )


def _is_flag_value(x: Any, depth: int = DEEPEST) -> bool:
    if isinstance(x, dict):
        x = [*x.values()]
    if isinstance(x, list):
        return depth > 0 and all(_is_flag_value(each, depth - 1) for each in x)
    return x is None or isinstance(x, str | bool) or _is_number(x, 0)


def _are_settings(x: Any, step: int) -> bool:
    return isinstance(x, dict) and all(map(_is_flag_value, x.values()))


def _are_versions(x: Any, step: int) -> bool:
    return isinstance(x, dict) and all(isinstance(each, str) for each in x.values())


_OF_RECORD = {
    "progress": lambda x, step: isinstance(x, dict),
    "settings": _are_settings,
    "versions": _are_versions,
    "sent": _is_maybe_amount,
    "run_id": _is_text,
    "start_id": _is_text,
}
_OF_PROGRESS = {
    "step": lambda x, step: _is_step(x, step) and x == step,
    "lines": _are_lines,
    "losses": lambda x, step: isinstance(x, list) and all(_is_number(y, 0) for y in x),
    "seconds": _is_amount,
    "first_loss": lambda x, step: _is_number(x, step) if step else x is None,
    "resumed_at": lambda x, step: (
        isinstance(x, list) and all(_is_step(y, step) for y in x)
    ),
    "sent_before": _is_maybe_amount,
    "sent_since": _is_step,
    "earlier_seconds": _is_amount,
    "lane_form": lambda x, step: x is None or isinstance(x, str),
    "run_id": _is_text,
    "saved": _is_step,
    "decided": _are_decisions,
}
