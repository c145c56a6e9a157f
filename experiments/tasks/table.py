"""Classification of the user's own table, a .csv or .npz file, without a factory."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.command.stopping import say
from experiments.data import downloads
from experiments.data.columns import (
    Column,
    Remarks,
    encode_column,
    is_gap,
    list_names,
    normalize,
    read_column,
)
from experiments.data.csv_tables import find_column, read_csv
from experiments.files import open_regular
from experiments.tasks import classify
from experiments.tasks.task import Data, Task
from syncalgos import checks
from syncalgos.collectives import WORKERS


class Table(NamedTuple):
    """The content of a file.

    Attributes:
        path: the file.
        columns: the columns of inputs, or the channels of pictures.
        labels: the names of the classes, (examples,).
        remarks: sentences for the user, to which others are added.
        shape: the shape of an example, whose last axis counts the columns.
        class_column: the name of the classes' column; "" for an .npz.
        lines: the line of each example, for errors; () for an .npz.
        held_out: the number of first examples that are held out; None if the file does
            not hold out any.
    """

    path: Path
    columns: Sequence[Column]
    labels: Sequence[str]
    remarks: list[str]
    shape: tuple[int, ...]
    class_column: str = ""
    lines: Sequence[int] = ()
    held_out: int | None = None


class TableExamples(NamedTuple):
    """A table as a task reads it.

    Attributes:
        data: the examples.
        shape: the shape of an example.
        num_classes: the number of classes.
        remarks: sentences for the user.
    """

    data: Data
    shape: tuple[int, ...]
    num_classes: int
    remarks: Sequence[str]


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
    status = path.stat()
    stamp = status.st_size, status.st_mtime_ns
    examples = _read(path, column, model != "mlp", stamp)
    if model == "mlp":
        sizes = *examples.shape, hidden, hidden, examples.num_classes
        network = classify.perceptron(*sizes)
    else:
        height, width, channels = examples.shape
        network = classify.network(
            model,
            (height, width, channels),
            examples.num_classes,
            batch_norm="worker",
            remat=False,
            axis=WORKERS,
        )

    def load() -> Data:
        for remark in examples.remarks:
            say(f"{path}: {remark}")
        return examples.data

    return Task(
        **classify.fields(network),
        load=load,
        batch_size=_batch_size(examples.data.examples),
        steps=480,
        lr={"sgd": 0.05, "": 1e-3},
        dispatch_steps=48,
    )


def _batch_size(num_train: int) -> int:
    """Returns 64, or less for a table that has fewer rows to train on."""
    if num_train >= 64:
        return 64
    return 2 ** max(0, int(math.log2(max(1, num_train))) - 1)


# A run and a study ask for the same task many times.
@functools.lru_cache(maxsize=1)
def _read(
    path: Path, column: str, has_pictures: bool, stamp: tuple[int, int]
) -> TableExamples:
    """Reads a file, and makes its examples."""
    if path.suffix.lower() == ".csv":
        content = _read_csv(path, column, has_pictures)
    elif column and path.suffix.lower() == ".npz":
        raise ValueError(f"--column: {path} has its classes in y: leave it out")
    else:
        content = _read_npz(path, has_pictures)
    num_rows = len(content.labels)
    if not num_rows or 0 in content.shape:
        raise ValueError(f"{path} holds no rows of numbers: add some")
    y, classes = _classes(content)
    train, test = _split(content)
    if not (len(train) and len(test)):
        raise ValueError(
            f"{path}: {len(test)} of {num_rows} rows are held out, so that the rows to "
            "train on or to test on are missing: add rows"
        )
    num_lost_classes = len(classes) - len({*y[train].tolist()})
    if num_lost_classes:
        content.remarks.append(
            f"{num_lost_classes} of {len(classes)} classes have no row to train on"
        )
    x, input_facts = _inputs(content, train, test)
    shape = (*content.shape[:-1], x.shape[-1])
    x = x.reshape(num_rows, *shape)
    content.remarks.insert(0, _summary(content, shape, y, classes, train, test))
    data = classify.make_labelled_data(
        {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]}
    )
    data = data._replace(
        sha256=downloads.sha256(path),
        preparation={"inputs": input_facts, "classes": classes},
    )
    return TableExamples(data, shape, len(classes), content.remarks)


def _split(content: Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the rows to train on, and of those that are held out."""
    num_rows = len(content.labels)
    if content.held_out is not None:
        order = np.arange(num_rows)
        num_test = content.held_out
    else:
        # The same split for every seed, so that runs differ only in training.
        order = np.random.default_rng(0).permutation(num_rows)
        num_test = num_rows // 5
    return order[num_test:], order[:num_test]


def _summary(
    content: Table,
    shape: tuple[int, ...],
    y: np.ndarray,
    classes: Sequence[str],
    train: np.ndarray,
    test: np.ndarray,
) -> str:
    """Says what was read, and how often a model that knows nothing is right."""
    counts = np.bincount(y[train], minlength=len(classes))
    majority = int(counts.argmax())
    train_share = counts[majority] / len(train)
    test_share = np.mean(y[test] == majority)
    size = "×".join(map(str, shape))
    place = f" in {content.class_column!r}" if content.class_column else ""
    return (
        f"it has {len(y)} rows and {len(classes)} classes{place} "
        f"({list_names(classes)}); the size of the model's input is {size}; "
        f"{len(test)} rows are held out; the "
        f"most frequent class, {classes[majority]}, "
        f"has {100 * train_share:.1f} % of the rows to train on and "
        f"{100 * test_share:.1f} % of those held out, which is the accuracy of always "
        "answering it"
    )


def _shape(
    path: Path, x_shape: tuple[int, ...], has_pictures: bool, remarks: list[str]
) -> tuple[int, ...]:
    """Returns the shape of an example for the model.

    Args:
        path: the file.
        x_shape: the shape of all examples in the file.
        has_pictures: whether the model takes pictures.
        remarks: sentences for the user, to which one may be added.
    """
    shape = x_shape[1:]
    may_be_pictures = len(shape) in (2, 3) and min(shape[:2]) > 4
    if has_pictures and not may_be_pictures:
        raise ValueError(f"{path} holds no pictures, but x {x_shape}: use --model mlp")
    if has_pictures:
        return (*shape, 1)[:3]
    if may_be_pictures:
        remarks.append(
            f"the examples may be pictures of {'×'.join(map(str, shape))}: "
            "--model lenet reads them as such"
        )
    return (math.prod(shape),)


def _inputs(
    content: Table, train: np.ndarray, test: np.ndarray
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Returns the model's inputs, (rows, values, inputs), and how they are made."""
    remarks = Remarks()
    if content.held_out is None:
        parts = [np.arange(len(content.labels))]
    else:
        parts = [test, train]
    arrays = []
    facts = []
    for column in content.columns:
        try:
            inputs = encode_column(column, train, parts, remarks)
        except ValueError as error:
            raise ValueError(f"{content.path}: {error}") from None
        if inputs is not None:
            arrays.append(inputs.x)
            facts.append(inputs.facts)
    sentences = remarks.sentences()
    if not arrays:
        raise ValueError(
            f"{content.path} has no column to learn from ({'; '.join(sentences)}): add "
            "a column of numbers, or of words that occur several times"
        )
    content.remarks.extend(sentences)
    return np.concatenate(arrays, axis=-1), facts


def _classes(content: Table) -> tuple[np.ndarray, list[str]]:
    """Returns the class of each row, and the classes' names in order."""
    path = content.path
    labels = content.labels
    classes_by_label = {label: _class(label) for label in labels}
    for row, label in enumerate(labels):
        if classes_by_label[label] is None:
            raise ValueError(_no_class(content, row))
    order = sorted(
        {*classes_by_label.values()}, key=lambda name: (isinstance(name, str), name)
    )
    names = [str(value) for value in order]
    if len(names) < 2:
        raise ValueError(
            f"{path}: all rows have the same class, {names[0]}: add rows of another"
        )
    counts = Counter(name.casefold() for name in names)
    similar_names = [name for name in names if counts[name.casefold()] > 1]
    if similar_names:
        content.remarks.append(
            f"these classes differ only in case: {list_names(similar_names)}"
        )
    if len(names) > min(100, len(labels) // 4):
        content.remarks.append(
            f"{len(names)} classes are many: is --column the right one?"
        )
    numbers = {value: number for number, value in enumerate(order)}
    y = np.array([numbers[classes_by_label[label]] for label in labels], np.int32)
    for number, name in enumerate(names):
        if is_gap(name):
            content.remarks.append(
                f"{name!r} is a class, which {np.count_nonzero(y == number)} of "
                f"{len(y)} rows have: if it means that the class is missing, remove "
                "these rows"
            )
    return y, names


def _no_class(content: Table, row: int) -> str:
    """Says that a label is no class."""
    label = content.labels[row]
    if not content.lines:
        return (
            f"{content.path}: the class {label!r} is neither a whole number nor a "
            "word: give each example of y a class, or remove it"
        )
    place = f"{content.path}, line {content.lines[row]}"
    if is_gap(label):
        num_gaps = sum(_class(name) is None for name in content.labels)
        return (
            f"{place}: the class {label!r} is neither a whole number nor a word: "
            f"remove the rows without a class in {content.class_column!r}, of which "
            f"there are {num_gaps}, or give the name of another column by --column"
        )
    return (
        f"{place}: the class {label!r} is neither a whole number nor a word: give the "
        f"name of another column than {content.class_column!r} by --column, or write "
        "classes in place of its numbers"
    )


def _class(label: str) -> int | str | None:
    """Returns a class: a whole number or a word; None if it is neither."""
    name = normalize(label)
    try:
        number = Decimal(name.replace("_", "x"))  # it skips a _
    except InvalidOperation:
        return name or None
    is_whole = number.is_finite() and number.adjusted() < 99 and number % 1 == 0
    return int(number) if is_whole else None


def _read_csv(path: Path, column: str, has_pictures: bool) -> Table:
    """Reads columns of inputs, and a column of classes."""
    cells = read_csv(path, column)
    class_place = find_column(path, cells.names, column)
    class_column = cells.names[class_place]
    if not cells.lines:
        raise ValueError(f"{path} holds no rows of numbers: add some below its header")
    places = [f"{path}, line {line}" for line in cells.lines]
    columns = []
    for place, name in enumerate(cells.names):
        if place == class_place:
            continue
        try:
            columns.append(
                read_column(
                    name,
                    cells.columns[place],
                    places,
                    may_have_commas=cells.separator != ",",
                )
            )
        except ValueError as error:
            if column:
                raise
            raise ValueError(
                f"{error}; if it holds the classes, add --column {name!r}"
            ) from None
    x_shape = (len(cells.lines), len(columns))
    shape = _shape(path, x_shape, has_pictures, cells.remarks)
    return Table(
        path=path,
        columns=columns,
        labels=cells.columns[class_place],
        remarks=cells.remarks,
        shape=shape,
        class_column=class_column,
        lines=cells.lines,
    )


def _read_npz(path: Path, has_pictures: bool) -> Table:
    """Reads x and y, and the held-out examples."""
    with open_regular(path) as file:
        try:
            arrays = {**np.load(file)}
        except MemoryError:
            raise
        except Exception as error:  # a file may hold anything
            raise ValueError(
                f"{path} is neither a .csv file nor an .npz file of numbers and words: "
                "write it by numpy.savez(path, x=…, y=…)"
            ) from error
    ends = ["_test", ""] if {"x_test", "y_test"} & {*arrays} else [""]
    expected_names = {f"x{end}" for end in ends} | {f"y{end}" for end in ends}
    missing_names = expected_names - {*arrays}
    if missing_names:
        raise ValueError(
            f"{path} has no {min(missing_names)} (it has: {', '.join(arrays)}): write "
            f"it by numpy.savez('{path.stem}-xy.npz', x=…, y=…)"
        )
    for end in ends:
        _check_arrays(path, arrays, end)
    x = np.concatenate([arrays[f"x{end}"] for end in ends])
    if x.dtype == bool:
        x = x.astype(np.uint8)
    label_arrays = [arrays[f"y{end}"].astype(str) for end in ends]
    labels = [str(label) for label in np.concatenate(label_arrays)]
    remarks = []
    unread_names = sorted({*arrays} - expected_names)
    if unread_names:
        remarks.append(f"the file's arrays {list_names(unread_names)} are not read")
    shape = _shape(path, x.shape, has_pictures, remarks)
    columns = []
    if x.size:
        values = x.reshape(len(x), -1, shape[-1])
        columns = [
            Column(f"x[…, {place}]", "numbers", values[..., place])
            for place in range(shape[-1])
        ]
    return Table(
        path=path,
        columns=columns,
        labels=labels,
        remarks=remarks,
        shape=shape,
        held_out=len(arrays["y_test"]) if len(ends) == 2 else None,
    )


def _check_arrays(path: Path, arrays: dict[str, np.ndarray], end: str) -> None:
    """Raises a ValueError unless x and y are numbers with a class for each row."""
    x = arrays[f"x{end}"]
    y = arrays[f"y{end}"]
    example = arrays["x"]
    is_same_kind = x.shape[1:] == example.shape[1:] and x.dtype == example.dtype
    if x.dtype.kind not in "biuf" or not is_same_kind:
        shape = ", ".join(["examples", *map(str, example.shape[1:])])
        raise ValueError(
            f"{path}: x{end} must be numbers, ({shape}), all of one type, got "
            f"{x.dtype} {x.shape}"
        )
    if y.ndim != 1 or x.shape[:1] != y.shape or y.dtype.kind not in "biufSU":
        raise ValueError(
            f"{path}: y{end} must have shape {x.shape[:1]}, a class for each row of "
            f"x{end}, got {y.dtype} {y.shape}"
        )
    if not np.isfinite(x).all():
        raise ValueError(
            f"{path}: a number of x{end} is not finite: replace it, or remove its row"
        )
