"""Classification of the user's own table, a .csv or .npz file, without a factory."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tasks.classify import fields, labelled, perceptron
from experiments.tasks.data.files import sha256
from experiments.tasks.task import Task
from syncalgos import checks


class Rows(NamedTuple):
    """The content of a file.

    Attributes:
        x: (examples, …) numbers.
        y: (examples,) the names of classes.
        held_out: the number of first examples that are held out; None if the file does
            not hold out any.
        lines: the line of each example, for errors; None for an .npz file.
    """

    x: np.ndarray
    y: np.ndarray
    held_out: int | None = None
    lines: list[int] | None = None


def table(file: str, target: str = "", hidden: int = 128) -> Task:
    """Classification of rows of numbers, one fifth of them held out.

    Args:
        file: .csv with a header, or .npz with x (examples, …) and y (examples,). If it
            has x_test and y_test, these are held out instead.
        target: column with the classes; by default the last one.
        hidden: units of each of two hidden layers.
    """
    checks.whole("--hidden", hidden, least=1)
    path = Path(file)
    found = _csv(path, target) if path.suffix.lower() == ".csv" else _npz(path)
    x, y, classes = _checked(path, found)
    # The same split for every seed, so that runs differ only in training.
    order, count = np.random.default_rng(0).permutation(len(y)), len(y) // 5
    if found.held_out is not None:
        order, count = np.arange(len(y)), found.held_out
    if not 0 < count < len(y):
        raise ValueError(f"{path}: {count} of {len(y)} rows are held out")
    train, test = order[count:], order[:count]
    mean, deviation = x[train].mean(0), x[train].std(0)
    x = (x - mean) / np.where(deviation == 0, 1, deviation)
    parts = [{"x": x[rows], "y": y[rows].astype(np.int32)} for rows in (train, test)]
    data = labelled(*parts)._replace(sha256=sha256(path))
    return Task(
        **fields(perceptron(x.shape[1], hidden, hidden, classes)),
        load=lambda: data,
        batch_size=64,
        steps=480,
        lr={"sgd": 0.05, "": 1e-3},
        dispatch_steps=48,
    )


def _checked(path: Path, found: Rows) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns x, (examples, numbers), the class of each row, and how many there are."""

    def where(row: int) -> str:
        return f"{path}, line {found.lines[row]}" if found.lines else str(path)

    if not found.x.size:
        raise ValueError(f"{path} holds no rows of numbers")
    with np.errstate(over="ignore"):  # reported below
        x = found.x.reshape(len(found.y), -1).astype(np.float32)
    if not (finite := np.isfinite(x).all(1)).all():
        raise ValueError(f"{where(int(finite.argmin()))}: a number of x is not finite")
    names, rows, y = np.unique(found.y, return_index=True, return_inverse=True)
    for name, row in zip(names.tolist(), rows.tolist(), strict=True):
        if not _is_class(str(name)):
            raise ValueError(
                f"{where(row)}: the class {name!r} is neither a whole number nor a word"
            )
    if len(names) < 2:
        raise ValueError(f"{path}: all rows have the same class, {names[0]}")
    return x, y, len(names)


def _is_class(name: str) -> bool:
    """Whether a name is a whole number or a word, not a fraction or empty."""
    try:
        return float(name).is_integer()
    except ValueError:
        return bool(name.strip())


def _csv(path: Path, target: str) -> Rows:
    """Reads columns of numbers, and a column of classes."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            rows = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a .csv file: {error}") from None
    (_, header), *rows = rows or [(0, [])]
    if len(header) < 2:
        raise ValueError(
            f"{path} must have a header of two columns or more, separated by "
            f"commas, got {','.join(header)!r}"
        )
    if target and target not in header:
        have = f"{path} has {', '.join(header)}"
        raise ValueError(f"--target: there is no column {target!r}: {have}")
    at = header.index(target) if target else len(header) - 1
    x, y = np.empty((len(rows), len(header) - 1)), []
    for number, (line, row) in enumerate(rows):
        if len(row) != len(header):
            found = f"{len(row)} columns, and {len(header)} in the header"
            raise ValueError(f"{path}, line {line}: {found}")
        y.append(row.pop(at))
        try:
            x[number] = [float(word) for word in row]
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    return Rows(x, np.array(y), lines=[line for line, _ in rows])


def _npz(path: Path) -> Rows:
    """Reads x and y, and the held-out examples."""
    with path.open("rb") as file:
        try:
            arrays = {**np.load(file)}
        except Exception:  # a file may hold anything
            raise ValueError(
                f"{path} is neither a .csv file nor an .npz file of numbers and words"
            ) from None
    ends = ["_test", ""] if {"x_test", "y_test"} & {*arrays} else [""]
    if missing := {f"{name}{end}" for name in "xy" for end in ends} - {*arrays}:
        raise ValueError(f"{path} has no {min(missing)} (it has: {', '.join(arrays)})")
    for end in ends:
        x, y = arrays[f"x{end}"], arrays[f"y{end}"]
        if x.dtype.kind not in "biuf" or x.shape[1:] != arrays["x"].shape[1:]:
            shape = ", ".join(["examples", *map(str, arrays["x"].shape[1:])])
            raise ValueError(
                f"{path}: x{end} must be numbers, ({shape}), got {x.dtype} {x.shape}"
            )
        if y.ndim != 1 or x.shape[:1] != y.shape:
            raise ValueError(
                f"{path}: y{end} must have shape {x.shape[:1]}, a class for each row "
                f"of x{end}, got {y.shape}"
            )
    x, y = (np.concatenate([arrays[f"{name}{end}"] for end in ends]) for name in "xy")
    return Rows(x, y, len(arrays["y_test"]) if len(ends) == 2 else None)
