"""Tables in .csv files: the separator, the line of names, and the cells by column."""

import csv
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from experiments.data.columns import (
    is_date,
    is_gap,
    list_names,
    normalize,
    parse_number,
)
from experiments.files import read_bytes
from syncalgos import checks

SEPARATORS = (";", "\t")  # beside the comma
NUM_COMPARED = 1000  # rows with which the first line is compared

Record = tuple[int, list[str]]  # the number of its last line, its cells


class CsvTable(NamedTuple):
    """The cells of a .csv file.

    Attributes:
        names: the names of the columns.
        columns: the cells of each column, by row.
        lines: the line of each row, for errors.
        separator: what stands between two cells.
        remarks: sentences about how the file was read.
    """

    names: list[str]
    columns: list[list[str]]
    lines: list[int]
    separator: str
    remarks: list[str]


def read_csv(path: Path, column: str) -> CsvTable:
    """Reads a .csv file.

    Args:
        path: the file.
        column: the name of a column that the user gives, "" if none: a first line that
            has it is a line of names.

    Raises:
        ValueError: the file is no table, or it is not clear whether its first line is a
            row; one line says why, and what to do.
    """
    separator, records = _records(path)
    first_cells = [cell.strip() for cell in records[0][1]] if records else []
    if len(first_cells) < 2:
        raise ValueError(
            f"{path} must have two columns or more, separated by commas, semicolons or "
            f"tabs, got {','.join(first_cells)!r} in its first line: if that is a "
            "comment, remove the lines above the names of the columns"
        )
    remarks = []
    if separator != ",":
        remarks.append(f"the columns are separated by {separator!r}, not by commas")
    num_names = len(first_cells)
    first_cells = _with_row_names(first_cells, records[1:], remarks)
    has_row_names = len(first_cells) > num_names
    for line, cells in records[1:]:
        if len(cells) != len(first_cells):
            raise ValueError(
                f"{path}, line {line}: {len(cells)} columns, but {len(first_cells)} in "
                "the first line: correct this line, or put quotation marks around "
                "cells that hold a separator"
            )
    lines = [line for line, _ in records[1:]]
    rows = [cells for _, cells in records[1:]]
    num_columns = _count_columns(first_cells, rows)
    first_cells = first_cells[:num_columns]
    names = [f"column {number}" for number in range(1, num_columns + 1)]
    kind = _first_line(first_cells, rows, column, separator)
    if has_row_names:
        kind = "names"
    if kind == "unclear":
        raise ValueError(
            f"{path}: the first line, {','.join(first_cells)!r}, may be a row or the "
            "names of the columns: write a line of names that are not numbers above "
            "the first row, or give the name of the classes' column by --column"
        )
    if kind == "row":
        lines = [records[0][0], *lines]
        rows = [first_cells, *rows]
        remarks.append(
            "the first line is read as a row, not as names, because it looks like the "
            f"lines below it: the columns are called 'column 1' to {names[-1]!r}; if "
            "it holds names, give that of the classes' column by --column"
        )
    else:
        names = _names(path, first_cells, names)
        if any(np.isfinite(parse_number(name)) for name in names):
            remarks.append(
                "the first line is read as the names of the columns, although it holds "
                "numbers: if it is a row, write a line of names above it"
            )
    columns: list[list[str]] = [[] for _ in names]
    for cells in rows:
        for column_cells, cell in zip(columns, cells[:num_columns], strict=True):
            column_cells.append(cell)
    return CsvTable(names, columns, lines, separator, remarks)


def _records(path: Path) -> tuple[str, list[Record]]:
    """Returns the separator of a file and its lines that are not blank."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
        for separator in SEPARATORS:
            records = _split(text, separator) if separator in text[:65536] else []
            num_cells = {len(cells) for _, cells in records}
            if len(num_cells) == 1 and num_cells != {1}:
                return separator, records
        return ",", _split(text, ",", is_strict=True)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a .csv file in UTF-8: {error}: save it as CSV in UTF-8"
        ) from None


def _split(text: str, separator: str, is_strict: bool = False) -> list[Record]:
    """Splits a text into records, without those that are blank."""
    # Strict: an open quotation mark would take in all that follows.
    reader = csv.reader(
        StringIO(text, newline=""),
        delimiter=separator,
        skipinitialspace=separator != "\t",
        strict=True,
    )
    try:
        return [
            (reader.line_num, cells) for cells in reader if any(map(str.strip, cells))
        ]
    except csv.Error:
        if is_strict:
            raise
        return []


def _with_row_names(
    first_cells: list[str], records: Sequence[Record], remarks: list[str]
) -> list[str]:
    """Adds a name to the first line if only the rows have a cell for their name.

    R's write.table writes such files.
    """
    num_cells = {len(cells) for _, cells in records}
    if num_cells != {len(first_cells) + 1}:
        return first_cells
    if all(not cells[-1].strip() for _, cells in records):
        return [*first_cells, ""]  # each row ends with a separator
    remarks.append(
        "the first line has one cell less than the rows: it names all columns but the "
        "first, which holds the names of the rows"
    )
    return ["", *first_cells]


def _count_columns(first_cells: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Counts the columns but for empty ones at the end, of separators after rows."""
    num_columns = len(first_cells)
    while num_columns > 2 and not first_cells[num_columns - 1]:
        if any(cells[num_columns - 1].strip() for cells in rows):
            break
        num_columns -= 1
    return num_columns


def _first_line(
    first_cells: Sequence[str],
    rows: Sequence[Sequence[str]],
    column: str,
    separator: str,
) -> Literal["names", "row", "unclear"]:
    """Finds out whether the first line of a file is a line of names.

    A word above numbers, or a number above words, is a name. A word that occurs again
    below it is none, nor is a date above dates, nor a number that its column goes on
    from. Numbers are names if they rise or fall from one to the next, as wavelengths
    and years do, and lie outside the columns that they stand above.
    """
    if column.strip() and column.strip() in first_cells:
        return "names"
    first_numbers = [_number(cell, separator) for cell in first_cells]
    num_names = 0
    num_values = 0
    num_new_words = 0
    num_new_categories = 0
    are_outside = []
    have_fractions = []
    for place, cell in enumerate(first_cells):
        first_number = first_numbers[place]
        cells = [row[place].strip() for row in rows[:NUM_COMPARED]]
        values = [value for value in cells if not is_gap(value)]
        numbers = np.array([_number(value, separator) for value in values])
        is_word = not np.isfinite(first_number) and not is_gap(cell)
        if len(numbers) and np.isfinite(numbers).all():
            num_names += is_word
            if np.isfinite(first_number):
                num_values += _goes_on(first_number, numbers)
                is_inside = numbers.min() <= first_number <= numbers.max()
                are_outside.append(not is_inside)
                have_fractions.append(bool((numbers % 1).any()))
        elif is_word:
            words = {normalize(value) for value in values}
            are_dates = is_date(cell) and any(map(is_date, words))
            if are_dates or normalize(cell) in words:
                num_values += 1
            else:
                num_new_words += 1
                num_new_categories += 2 * len(words) <= len(values)
        elif np.isfinite(first_number) and not np.isfinite(numbers).any():
            num_names += len(numbers) > 0
    if num_names:
        return "names" if num_names >= num_values else "row"
    if num_values:
        return "names" if num_new_categories > num_values else "row"
    known_numbers = [number for number in first_numbers if np.isfinite(number)]
    if not known_numbers:
        return "names"
    steps = np.diff(known_numbers)
    is_monotonic = len(steps) > 0 and bool((steps > 0).all() or (steps < 0).all())
    # A table made of an array has a header such as 0, 1, 2.
    is_count = is_monotonic and known_numbers[0] in (0, 1) and {*steps} == {1}
    are_all_outside = all(are_outside) and len(are_outside) == len(known_numbers)
    if num_new_words:
        is_sequence = is_monotonic and len(known_numbers) > 2
        return "names" if is_count or is_sequence or are_all_outside else "unclear"
    if is_count and (len(known_numbers) > 2 or any(have_fractions)):
        return "names"
    # Of 8 numbers of a row, one in 20,000 rows has all in order.
    is_long = len(known_numbers) >= 8
    is_sequence = is_monotonic and len(known_numbers) > 2
    return "names" if is_sequence and (is_long or are_all_outside) else "row"


def _goes_on(first_number: float, numbers: np.ndarray) -> bool:
    """Whether a column goes on from a number with equal steps, as row numbers do."""
    steps = np.diff([first_number, *numbers[:4]])
    return len(steps) > 2 and bool(steps[0]) and bool((steps == steps[0]).all())


def _number(cell: str, separator: str) -> float:
    """Returns the number in a cell, or NaN; a comma may be a decimal comma."""
    word = cell.strip()
    return parse_number(word if separator == "," else word.replace(",", "."))


def _names(path: Path, cells: Sequence[str], spare_names: Sequence[str]) -> list[str]:
    """Returns the names of the columns, of which each occurs once."""
    names = [cell or spare for cell, spare in zip(cells, spare_names, strict=True)]
    counts = Counter(names)
    repeated_names = [name for name in names if counts[name] > 1]
    if repeated_names:
        raise ValueError(
            f"{path}: the header has {repeated_names[0]!r} twice: rename one"
        )
    return names


def find_column(path: Path, names: Sequence[str], column: str) -> int:
    """Returns the place of the column that a user names, or of the last one."""
    name = column.strip() or names[-1]
    if name not in names:
        raise ValueError(
            f"--column: there is no column {column!r}: {path} has {list_names(names)}"
            f"{checks.nearest(name, names)}"
        )
    return names.index(name)
