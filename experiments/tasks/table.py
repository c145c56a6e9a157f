"""Classification of the user's own table, a .csv or .npz file, without a factory."""

import csv
import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from experiments.command.stopping import say
from experiments.data import downloads
from experiments.tasks import classify
from experiments.tasks.task import Data, Task
from syncalgos import checks
from syncalgos.collectives import WORKERS


class Rows(NamedTuple):
    """The content of a file.

    Attributes:
        path: the file.
        x: (examples, …) numbers.
        y: the names of the classes, (examples,).
        remarks: lines for the user, to which others are added.
        names: the names of x's columns, then of the classes' column; () for an .npz.
        lines: the line of each example, for errors; () for an .npz.
        held_out: the number of first examples that are held out; None if the file does
            not hold out any.
    """

    path: Path
    x: np.ndarray
    y: Sequence[str]
    remarks: list[str]
    names: Sequence[str] = ()
    lines: Sequence[int] = ()
    held_out: int | None = None


def table(
    file: str,
    column: str = "",
    hidden: int = 128,
    model: Literal["mlp", "lenet", "resnet20"] = "mlp",
) -> Task:
    """Classification of the rows of your own .csv or .npz file, a fifth held out.

    Args:
        file: .csv with a header, or .npz with x (examples, …) and y (examples,). If it
            has x_test and y_test, these are held out instead.
        column: column of a .csv with the classes; by default the last one.
        hidden: units of each of two hidden layers of the mlp.
        model: mlp; lenet or resnet20 for pictures, (examples, height, width) or
            (examples, height, width, channels).
    """
    if checks.whole("--hidden", hidden, least=1) != 128 and model != "mlp":
        raise ValueError(f"--hidden is for --model mlp, not for {model}: leave it out")
    path = Path(file)
    stamp = path.stat().st_size, path.stat().st_mtime_ns
    data, shape, classes, remarks = _read(path, column, model != "mlp", stamp)
    if model == "mlp":
        network = classify.perceptron(*shape, hidden, hidden, classes)
    else:
        height, width, channels = shape
        size = height, width, channels
        network = classify.network(model, size, classes, "worker", False, WORKERS)

    def load() -> Data:
        for remark in remarks:
            say(f"{path}: {remark}")
        return data

    return Task(
        **classify.fields(network),
        load=load,
        batch_size=64,
        steps=480,
        lr={"sgd": 0.05, "": 1e-3},
        dispatch_steps=48,
    )


# A run and a study ask for the same task many times.
@functools.lru_cache(maxsize=1)
def _read(
    path: Path, column: str, pictures: bool, stamp: tuple[int, int]
) -> tuple[Data, tuple[int, ...], int, list[str]]:
    """Reads and standardizes a file; returns also the shape of x, classes, remarks."""
    is_csv = path.suffix.lower() == ".csv"
    if column and not is_csv:
        raise ValueError(f"--column: {path} has its classes in y: leave it out")
    found = _csv(path, column) if is_csv else _npz(path)
    if not found.x.size:
        raise ValueError(f"{path} holds no rows of numbers")
    y, names = _classes(found)
    # The same split for every seed, so that runs differ only in training.
    order, count = np.random.default_rng(0).permutation(len(y)), len(y) // 5
    if found.held_out is not None:
        order, count = np.arange(len(y)), found.held_out
    if not 0 < count < len(y):
        raise ValueError(f"{path}: {count} of {len(y)} rows are held out")
    train, test = order[count:], order[:count]
    if alone := len(names) - len({*y[train].tolist()}):
        found.remarks.append(f"{alone} of {len(names)} classes have no row to train on")
    shape = _shape(found, pictures)
    x = found.x.reshape(len(y), -1, shape[-1])
    x = _standardized(found, x, train).reshape(len(y), *shape)
    where = f" in {found.names[-1]!r}" if found.names else ""
    by = "×".join(map(str, shape))
    what = f"pictures of {by}" if pictures else f"columns: {by}"
    size = f"rows: {len(y)}; {what}; classes: {len(names)}{where}"
    found.remarks.insert(0, f"{size} ({_listed(names)}); held out: {count} rows")
    parts = [{"x": x[rows], "y": y[rows]} for rows in (train, test)]
    data = classify.labelled(*parts)._replace(sha256=downloads.sha256(path))
    return data, shape, len(names), found.remarks


def _shape(found: Rows, pictures: bool) -> tuple[int, ...]:
    """Returns the shape of an example for the model."""
    shape = found.x.shape[1:]
    looks = len(shape) in (2, 3) and min(shape[:2]) > 4
    if pictures and not looks:
        what = f"holds no pictures, but x {found.x.shape}"
        raise ValueError(f"{found.path} {what}: --model mlp")
    if pictures:
        return (*shape, 1)[:3]
    if looks:
        size = "×".join(map(str, shape))
        found.remarks.append(f"pictures of {size}? --model lenet reads them as such")
    return (found.x[0].size,)


def _standardized(found: Rows, x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Returns x, (rows, pixels, columns or channels), as float32 for training.

    Each column has mean 0 and deviation 1 over the rows to train on.
    """
    scaled, equal, numbered = np.zeros(x.shape, np.float32), [], []
    for at in range(x.shape[-1]):
        name = found.names[at] if found.names else f"x[…, {at}]"
        # Times and identifiers are large beside their differences: offset first.
        wide = _without_offset(x[..., at])
        with np.errstate(all="ignore"):  # reported below
            # The range spares most columns the sorting.
            if 20 <= len(x) <= np.ptp(wide) + 1 and not (wide % 1).any():
                numbered += [name] if len(np.unique(wide)) == wide.size else []
            if np.ptp(wide[train]) == 0:
                equal.append(name)
                continue
            wide -= wide[train].mean()
            wide /= np.abs(wide[train]).max()  # the squares stay in range
            scaled[..., at] = wide / wide[train].std()
        if not np.isfinite(scaled[..., at]).all():
            far = f"{name!r} has numbers that are too far apart"
            raise ValueError(f"{found.path}: {far}")
    told = {
        "left out, as all rows to train on are equal": equal,
        "other whole numbers in each row, as of ids": numbered,
    }
    found.remarks.extend(f"{why}: {_listed(x)}" for why, x in told.items() if x)
    return scaled


def _without_offset(x: np.ndarray) -> np.ndarray:
    """Returns the numbers' differences from one of them, exactly, as float64."""
    if x.dtype.kind in "iu":  # differences may need all bits
        return (x - x.min()).view(f"u{x.itemsize}").astype(np.float64)
    wide = x.astype(np.promote_types(x.dtype, np.float64))
    with np.errstate(over="ignore"):  # reported by the caller
        return (wide - wide.flat[0]).astype(np.float64)


def _classes(found: Rows) -> tuple[np.ndarray, list[str]]:
    """Returns the class of each row, and the classes' names in order."""
    path, remarks = found.path, found.remarks
    values = {name: _value(name) for name in found.y}
    if None in values.values():
        row = next(i for i, name in enumerate(found.y) if values[name] is None)
        where = f"{path}, line {found.lines[row]}" if found.lines else str(path)
        name = repr(found.y[row])
        told = f"the class {name} is neither a whole number nor a word"
        if found.names:
            told += f" (--column NAME reads another column than {found.names[-1]!r})"
        raise ValueError(f"{where}: {told}")
    order = sorted({*values.values()}, key=lambda x: (isinstance(x, str), x))
    names = [str(value) for value in order]
    if len(names) < 2:
        raise ValueError(f"{path}: all rows have the same class, {names[0]}")
    folded = Counter(name.casefold() for name in names)
    if alike := [name for name in names if folded[name.casefold()] > 1]:
        remarks.append(f"classes that differ only in case: {_listed(alike)}")
    if len(names) > min(100, len(found.y) // 4):
        remarks.append(f"{len(names)} classes are many: is --column the right one?")
    numbers = {value: number for number, value in enumerate(order)}
    return np.array([numbers[values[name]] for name in found.y], np.int32), names


def _value(name: str) -> int | str | None:
    """Returns a class: a whole number or a word; None if it is neither."""
    name = " ".join(unicodedata.normalize("NFC", name).split())
    try:
        number = Decimal(name.replace("_", "x"))  # it skips a _
    except InvalidOperation:
        return name or None
    is_whole = number.is_finite() and number.adjusted() < 99 and number % 1 == 0
    return int(number) if is_whole else None


def _listed(names: Sequence[str]) -> str:
    """Returns up to ten names, and how many there are beside them."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _csv(path: Path, column: str) -> Rows:
    """Reads columns of numbers, and a column of classes."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            # Strict: an open quotation mark would take in all that follows.
            reader = csv.reader(text, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, x) for x in reader if any(map(str.strip, x))]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a .csv file in UTF-8: {error}") from None
    (_, cells), *rows = rows or [(0, [])]
    header = _header(path, cells)
    last = column.strip() or header[-1]
    if last not in header:
        have = f"{path} has {_listed(header)}{checks.nearest(last, header)}"
        raise ValueError(f"--column: there is no column {column!r}: {have}")
    for line, row in rows:
        if len(row) != len(header):
            found = f"{len(row)} columns, and {len(header)} in the header"
            raise ValueError(f"{path}, line {line}: {found}")
    words = {name: [row[at] for _, row in rows] for at, name in enumerate(header)}
    y, x, remarks = words.pop(last), [], []
    for name, cells in words.items():
        values, are_words = _numbers(cells)
        if np.isnan(values).any():
            at = np.isnan(values).argmax()
            has = f"column {name!r} has {cells[at].strip()!r}, no finite number"
            todo = "encode words and dates, fill gaps, or remove the column"
            todo += f". If it holds the classes: --column {name}" * (not column)
            raise ValueError(f"{path}, line {rows[at][0]}: {has}: {todo}")
        if are_words:
            remarks.append(f"column {name!r}: false and true are read as 0 and 1")
        x.append(values)
    lines = [line for line, _ in rows]
    return Rows(path, np.stack(x, 1), y, remarks, [*words, last], lines)


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    """Returns the names of the columns."""
    if len(cells) < 2:
        must = "must have a header of two columns or more, separated by commas"
        raise ValueError(f"{path} {must}, got {','.join(cells)!r}")
    header = [cell.strip() or f"column {at}" for at, cell in enumerate(cells, 1)]
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"{path}: the header has {twice[0]!r} twice: rename one")
    numbers = [x for x in map(_float, header) if not math.isnan(x)]
    # A table made of an array has a header such as 0, 1, 2.
    if numbers and {*np.diff(numbers)} != {1}:
        raise ValueError(f"{path}: the first line holds numbers: add a line of names")
    return header


def _float(word: str) -> float:
    """Returns the finite number that a word stands for, or NaN."""
    with suppress(ValueError):
        if math.isfinite(value := float(word)) and "_" not in word:
            return value
    return math.nan


def _numbers(words: Sequence[str]) -> tuple[np.ndarray, bool]:
    """Returns the numbers of a column, NaN if there is none, and whether it has words.

    A common offset that is large is taken away.
    """
    words = [word.strip() for word in words]
    if words and {word.lower() for word in words} <= {"true", "false"}:
        return np.array([word.lower() == "true" for word in words], np.float64), True
    x = np.array([_float(word) for word in words])
    with np.errstate(over="ignore"):
        is_far = x.size and np.ptp(x) <= np.abs(x).max() * 2**-28
    if is_far:  # float64 would round the differences
        first = Decimal(words[0])
        x = np.array([float(Decimal(word) - first) for word in words])
    return x, False


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
    wanted = {f"{name}{end}" for name in "xy" for end in ends}
    if missing := wanted - {*arrays}:
        why = f"has no {min(missing)} (it has: {', '.join(arrays)})"
        raise ValueError(
            f"{path} {why}: write it by numpy.savez('{path.stem}-xy.npz', x=…, y=…)"
        )
    unread = _listed(sorted({*arrays} - wanted))
    for end in ends:
        x, y = arrays[f"x{end}"], arrays[f"y{end}"]
        same = x.shape[1:] == arrays["x"].shape[1:] and x.dtype == arrays["x"].dtype
        if x.dtype.kind not in "biuf" or not same:
            shape = ", ".join(["examples", *map(str, arrays["x"].shape[1:])])
            must = f"must be numbers, ({shape}), all of one type"
            raise ValueError(f"{path}: x{end} {must}, got {x.dtype} {x.shape}")
        if y.ndim != 1 or x.shape[:1] != y.shape or y.dtype.kind not in "biufSU":
            must = f"must have shape {x.shape[:1]}, a class for each row of x{end}"
            raise ValueError(f"{path}: y{end} {must}, got {y.dtype} {y.shape}")
        if not np.isfinite(x).all():
            raise ValueError(f"{path}: a number of x{end} is not finite")
    x = np.concatenate([arrays[f"x{end}"] for end in ends])
    x = x.astype(np.uint8) if x.dtype == bool else x
    y = [str(name) for end in ends for name in arrays[f"y{end}"].astype(str)]
    held_out = len(arrays["y_test"]) if len(ends) == 2 else None
    remarks = [f"not read: {unread}"] if unread else []
    return Rows(path, x, y, remarks, held_out=held_out)
