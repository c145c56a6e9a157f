"""Columns of a table: what their cells hold, and the inputs that are made of them."""

import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np

MOST_CATEGORIES = 100  # words of a column, each of which is an input
LEAST_IDENTIFIERS = 5  # rows: in fewer, whole numbers often differ
EXACT_IN_FLOAT32 = 2**24  # whole numbers below it
EXACT_IN_FLOAT64 = 2**53

# What stands for a missing value, in lower case: of pandas, R, Excel, databases.
GAPS = frozenset(
    [
        *("", "?", "na", "n/a", "n.a.", "#n/a", "#na", "#n/a n/a", "<na>", "nan"),
        *("-nan", "n/d", "nat", "null", "nil", "\\n", "1.#ind", "-1.#ind", "1.#qnan"),
        *("-1.#qnan", "#null!", "#value!", "#ref!", "#div/0!", "#num!"),
    ]
)
# Words that stand for one among numbers, and may be a word like others among words.
MAYBE_GAPS = frozenset(
    [
        *GAPS,
        *("none", "missing", "unknown", "unk", "undefined", "unspecified", "blank"),
        *("not available", "not applicable", "not known", "not specified", "no data"),
        *("no answer", "empty", "n.a", "n.d.", "-", "--", "---", ".", "..", "*"),
    ]
)

_MONTH = "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|"
_MONTH += r"aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
_WEEKDAY = "(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]m)?(?: ?(?:z|utc|gmt))?"
_TIME += r"(?: ?[+-]\d{2}:?\d{2})?"
_DAY = r"\d{4}[-/.]\d{1,2}(?:[-/.]\d{1,2})?"  # 2020-01-31, 2020/1
_DAY += r"|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})"  # 31.1.2020, 1/31/20
_DAY += rf"|\d{{1,2}}[- .]*{_MONTH}[- ,.]*(?:\d{{4}}|\d{{2}})"  # 31-Jan-20
_DAY += rf"|{_MONTH}[- ]*\d{{1,2}},? +\d{{4}}|{_MONTH}[- ]\d{{2,4}}"  # Jan 31, 2020
_DATE = re.compile(
    rf"(?:{_WEEKDAY},? )?(?:{_DAY})(?:[t ] ?{_TIME})?|{_TIME}", re.IGNORECASE
)

_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:e[+-]?\d+)?", re.IGNORECASE)
_GROUPS = r"\d{1,3}(?:[,.'’_\s]\d{3})+(?:[.,]\d+)?|\d+,\d+|\d+_\d+"  # 1,234.5
_NUMBER_WITH_SIGNS = re.compile(
    rf"\(?[+-]?\s?[$€£¥]?\s?[+-]?(?:{_GROUPS}|\d*\.?\d+)\s?[%$€£¥]?\)?"
)

LEAVES_OUT_ROW_NUMBERS = (
    "the inputs leave out {columns}, because each row holds its own number there: it "
    "says where a row stands in the file, and nothing about its class"
)
LEAVES_OUT_EQUAL = (
    "the inputs leave out {columns}, because all rows to train on are equal there"
)
LEAVES_OUT_NAMES = (
    "the inputs leave out {columns}, because each row has another word there, as names "
    "of rows have"
)
LEAVES_OUT_MANY_WORDS = (
    "the inputs leave out {columns}, because more than 100 different words stand "
    "there: write numbers, or fewer words, to use them"
)
LEAVES_OUT_MIXED = (
    "the inputs leave out {columns}, because words stand among different numbers "
    "there: write numbers, or leave the cells of these words empty, to use them"
)
LEAVES_OUT_DATES = (
    "the inputs leave out {columns}, because dates or times stand there: write numbers "
    "instead, such as the year, the month or days since the first date, to use them"
)
LEAVES_OUT_EMPTY = (
    "the inputs leave out {columns}, because no row to train on has a value there"
)
HAS_IDENTIFIERS = (
    "the inputs include {columns}, where each row has a different whole number: if "
    "these are identifiers, remove them from the file"
)
HAS_CATEGORIES = (
    "the words of {columns} are read as categories: each word of the rows to train on "
    "is an input, 1 where it stands and 0 elsewhere"
)
HAS_SIMILAR_WORDS = (
    "some words of {columns} differ only in case, and are categories of their own: "
    "write them alike if they mean the same"
)
HAS_UNSEEN_WORDS = (
    "held-out rows have words that no row to train on has in {columns}: all inputs of "
    "the column are 0 in these rows"
)
FILLS_GAPS = (
    "the gaps of {columns} are filled with the median of the rows to train on: the "
    "model does not see which values were missing"
)
HAS_GAPS_AS_CATEGORY = "the gaps of {columns} are read as a category of their own"
HAS_BOOLEANS = "the words false and true of {columns} are read as 0 and 1"
HAS_DECIMAL_COMMAS = "the numbers of {columns} are read with decimal commas"
HAS_ROUNDED_NUMBERS = (
    "the inputs are float32, in which different numbers of {columns} become equal: "
    "take away a common offset, or cut off the numbers that lie far from the others"
)


class Column(NamedTuple):
    """A column as it is read, without regard to which rows are held out.

    Attributes:
        name: the name, for remarks.
        kind: what the cells hold.
        numbers: (rows, values), NaN for a gap; None if the kind is not numbers. The
            values are one number, or the pixels of a channel.
        offset: taken away from the numbers before they were rounded to float64.
        num_distinct: how many numbers differ, if that is known without rounding.
        words: the words by row, None for a gap; of a mixed column the first word that
            is no number; () otherwise.
        remarks: sentences about the column, with a place for the names of columns.
    """

    name: str
    kind: Literal["numbers", "words", "mixed", "dates"]
    numbers: np.ndarray | None = None
    offset: Decimal = Decimal(0)
    num_distinct: int | None = None
    words: Sequence[str | None] = ()
    remarks: Sequence[str] = ()


class ColumnInputs(NamedTuple):
    """The inputs that a model gets of a column.

    Attributes:
        x: (rows, values, inputs) float32.
        facts: how they follow from the column, for the header of an exported model.
    """

    x: np.ndarray
    facts: dict[str, Any]


class Remarks:
    """Sentences about columns, of which each is said once, with all of its columns."""

    def __init__(self):
        self._columns: dict[str, list[str]] = {}

    def add(self, sentence: str, column: str) -> None:
        """Adds a column, with what is to be said of it, to a sentence."""
        self._columns.setdefault(sentence, []).append(column)

    def sentences(self) -> list[str]:
        """Returns the sentences with the names of their columns."""
        return [
            sentence.format(columns=list_names(columns))
            for sentence, columns in self._columns.items()
        ]


def list_names(names: Sequence[str]) -> str:
    """Returns up to ten names, and how many there are beside them."""
    if len(names) > 10:
        return f"{', '.join(names[:10])} and {len(names) - 10} more"
    return ", ".join(names)


def parse_number(word: str) -> float:
    """Returns the finite number that a word stands for, or NaN."""
    try:
        value = float(word)
    except ValueError:
        return math.nan
    # Python's digits may be separated by _.
    is_usual = math.isfinite(value) and "_" not in word
    return value if is_usual else math.nan


def is_gap(word: str) -> bool:
    """Whether a word stands for a missing value among numbers."""
    return word.strip(" \t()[]<>").casefold() in MAYBE_GAPS


def is_date(word: str) -> bool:
    """Whether a word is a date or a time."""
    return _DATE.fullmatch(word.strip()) is not None


def normalize(word: str) -> str:
    """Returns a word with one form of its characters and single spaces."""
    return " ".join(unicodedata.normalize("NFC", word).split())


def read_column(
    name: str, cells: Sequence[str], places: Sequence[str], may_have_commas: bool
) -> Column:
    """Finds out what the cells of a column hold.

    Args:
        name: the name of the column.
        cells: the words of all rows.
        places: the file and line of each cell, for errors.
        may_have_commas: whether a comma may be a decimal comma: it separates no cells.

    Raises:
        ValueError: a cell is probably a mistake, or a number in another form.
    """
    words = [cell.strip() for cell in cells]
    if _are_booleans(words):
        flags = np.array([word.casefold() == "true" for word in words], np.float64)
        return Column(name, "numbers", flags[:, None], remarks=[HAS_BOOLEANS])
    remarks = []
    if may_have_commas and _has_decimal_commas(words):
        words = [word.replace(",", ".") for word in words]
        remarks.append(HAS_DECIMAL_COMMAS)
    values = np.array([parse_number(word) for word in words])
    is_number = np.isfinite(values)
    unread_rows = np.flatnonzero(~is_number).tolist()
    odd_rows = [row for row in unread_rows if not is_gap(words[row])]
    if not odd_rows:
        return _number_column(name, words, values, remarks)
    odd_words = [words[row] for row in odd_rows]
    place = places[odd_rows[0]]
    if is_number.any() and all(_is_infinite(word) for word in odd_words):
        raise ValueError(
            f"{place}: column {name!r} has {odd_words[0]!r}, which is no finite "
            "number: write a number, or leave the cell empty, so that it is filled"
        )
    if all(_NUMBER_WITH_SIGNS.fullmatch(word) for word in odd_words):
        raise ValueError(
            f"{place}: column {name!r} has {odd_words[0]!r}, a number in another form: "
            "write all numbers of the column as 1234.5, without separators of "
            "thousands, units and signs of percent"
        )
    if not is_number.any() and all(map(is_date, odd_words)):
        return Column(name, "dates")
    if is_number.any() and len(odd_rows) <= max(1, len(words) // 20):
        raise ValueError(
            f"{place}: column {name!r} has {odd_words[0]!r} among numbers: write a "
            "number, leave the cell empty, so that it is filled, or remove the column"
        )
    if is_number.any() and 2 * len({*words}) > len(words):
        return Column(name, "mixed", words=odd_words[:1])
    normal_words = [normalize(cell) for cell in cells]
    known_words = [None if word.casefold() in GAPS else word for word in normal_words]
    return Column(name, "words", words=known_words)


def _are_booleans(words: Sequence[str]) -> bool:
    return bool(words) and all(word.casefold() in ("true", "false") for word in words)


def _has_decimal_commas(words: Sequence[str]) -> bool:
    """Whether commas stand for points in all numbers that have one."""
    has_commas = any(_DECIMAL_COMMA.fullmatch(word) for word in words)
    return has_commas and not any("." in word for word in words if not is_gap(word))


def _is_infinite(word: str) -> bool:
    try:
        return math.isinf(float(word))
    except ValueError:
        return False


def _number_column(
    name: str, words: Sequence[str], values: np.ndarray, remarks: Sequence[str]
) -> Column:
    """Makes a column of numbers, NaN for gaps.

    A common offset that is large is taken away, as float64 would round the differences.
    """
    is_known = np.isfinite(values)
    known_values = values[is_known]
    known_words = [words[row] for row in np.flatnonzero(is_known).tolist()]
    offset = Decimal(0)
    num_distinct = None
    if len(known_values):
        largest = np.abs(known_values).max()
        with np.errstate(over="ignore"):
            value_range = np.ptp(known_values)
        if value_range <= largest * 2**-28:
            offset = Decimal(known_words[0])
            differences = [float(Decimal(word) - offset) for word in known_words]
            values = values.copy()
            values[is_known] = differences
        elif largest >= EXACT_IN_FLOAT64 and not (known_values % 1).any():
            num_distinct = len({Decimal(word) for word in known_words})
    return Column(name, "numbers", values[:, None], offset, num_distinct, (), remarks)


def encode_column(
    column: Column, train: np.ndarray, parts: Sequence[np.ndarray], remarks: Remarks
) -> ColumnInputs | None:
    """Makes the inputs of a column, from statistics of the rows to train on alone.

    Args:
        column: the column.
        train: the numbers of the rows to train on.
        parts: the numbers of the rows of each part of the file.
        remarks: sentences about columns, to which this one is added.

    Returns:
        The inputs; None if the column is left out.

    Raises:
        ValueError: the numbers are too far apart.
    """
    for sentence in column.remarks:
        remarks.add(sentence, repr(column.name))
    if column.kind == "mixed":
        remarks.add(LEAVES_OUT_MIXED, f"{column.name!r} ({column.words[0]!r})")
        return None
    if column.kind == "dates":
        remarks.add(LEAVES_OUT_DATES, repr(column.name))
        return None
    if column.kind == "words":
        return _categories(column, train, remarks)
    return _standardize(column, train, parts, remarks)


def _categories(
    column: Column, train: np.ndarray, remarks: Remarks
) -> ColumnInputs | None:
    """Makes an input of each word that the rows to train on have."""
    name = column.name
    words = column.words
    known_words = [word for word in words if word is not None]
    train_words = [words[row] for row in train]
    categories: list[str | None] = [*sorted({*train_words} - {None}, key=str)]
    if not categories:
        remarks.add(LEAVES_OUT_EMPTY, repr(name))
        return None
    if len(known_words) == len({*known_words}) > 1:
        remarks.add(LEAVES_OUT_NAMES, repr(name))
        return None
    if len(categories) > MOST_CATEGORIES:
        remarks.add(LEAVES_OUT_MANY_WORDS, f"{name!r} ({len(categories)})")
        return None
    if None in train_words:
        categories.append(None)
    if len(categories) == 1:
        remarks.add(LEAVES_OUT_EQUAL, repr(name))
        return None
    num_gaps = len(words) - len(known_words)
    remarks.add(HAS_CATEGORIES, f"{name!r} ({len(categories)})")
    if None in train_words:
        remarks.add(HAS_GAPS_AS_CATEGORY, f"{name!r} ({num_gaps})")
    folded_categories = {word.casefold() for word in categories if word is not None}
    if len(folded_categories) < len(categories) - (None in categories):
        remarks.add(HAS_SIMILAR_WORDS, repr(name))
    numbers_by_category = {category: i for i, category in enumerate(categories)}
    x = np.zeros((len(words), 1, len(categories)), np.float32)
    num_unseen = 0
    for row, word in enumerate(words):
        if word in numbers_by_category:
            x[row, 0, numbers_by_category[word]] = 1
        else:
            num_unseen += 1
    if num_unseen:
        remarks.add(HAS_UNSEEN_WORDS, f"{name!r} ({num_unseen})")
    return ColumnInputs(x, {"column": name, "kind": "words", "categories": categories})


def _standardize(
    column: Column, train: np.ndarray, parts: Sequence[np.ndarray], remarks: Remarks
) -> ColumnInputs | None:
    """Makes an input of mean 0 and deviation 1 over the rows to train on."""
    name = column.name
    numbers = column.numbers
    assert numbers is not None  # the kind is numbers
    if not column.offset and is_row_number(numbers, parts):
        remarks.add(LEAVES_OUT_ROW_NUMBERS, repr(name))
        return None
    # Times and identifiers are large beside their differences: offset first.
    differences, zero = _without_offset(numbers)
    is_missing = np.isnan(differences)
    facts: dict[str, Any] = {"column": name, "kind": "numbers"}
    if is_missing.any():
        known_differences = differences[train][~is_missing[train]]
        if not known_differences.size:
            remarks.add(LEAVES_OUT_EMPTY, repr(name))
            return None
        median = float(np.median(known_differences))
        facts["fill"] = str(column.offset + zero + Decimal(median))
        remarks.add(FILLS_GAPS, f"{name!r} ({np.count_nonzero(is_missing)})")
        _remark_identifiers(name, differences[~is_missing], remarks)
        differences[is_missing] = median
    else:
        _remark_identifiers(name, differences, remarks)
    x = np.zeros(numbers.shape, np.float32)
    with np.errstate(all="ignore"):  # reported below
        is_equal = np.ptp(differences[train]) == 0
        if is_equal:
            remarks.add(LEAVES_OUT_EQUAL, repr(name))
            mean = differences[train].flat[0]
            deviation = math.inf
        else:
            mean = differences[train].mean()
            differences -= mean
            largest = np.abs(differences[train]).max()
            differences /= largest  # the squares stay in range
            deviation = largest * differences[train].std()
            x[...] = differences / differences[train].std()
    if not np.isfinite(x).all():
        raise ValueError(
            f"column {name!r} has numbers that are too far apart: write their "
            "logarithms, or numbers of a smaller range"
        )
    if not is_equal and _is_rounded(column, x):
        remarks.add(HAS_ROUNDED_NUMBERS, repr(name))
    facts["offset"] = str(column.offset + zero)
    facts["mean"] = float(mean)
    facts["deviation"] = None if is_equal else float(deviation)
    return ColumnInputs(x[..., None], facts)


def is_row_number(numbers: np.ndarray, parts: Sequence[np.ndarray]) -> bool:
    """Whether a column holds the number of each row, from 0 or from 1.

    Args:
        numbers: (rows, values).
        parts: the numbers of the rows of each part of the file, which may count anew
            or go on.
    """
    if numbers.shape[1] != 1 or len(numbers) < 2:
        return False
    for rows in parts:
        values = numbers[rows, 0]
        counts = np.arange(len(rows))
        num_other_rows = len(numbers) - len(rows)
        starts = (0, 1, num_other_rows, num_other_rows + 1)
        if not any(np.array_equal(values, counts + start) for start in starts):
            return False
    return True


def _remark_identifiers(name: str, values: np.ndarray, remarks: Remarks) -> None:
    """Adds a remark if each row has a different whole number."""
    if values.ndim == 2 and values.shape[1] != 1:
        return
    with np.errstate(all="ignore"):  # reported by the caller
        # The range spares most columns the sorting.
        may_differ = LEAST_IDENTIFIERS <= values.size <= np.ptp(values) + 1
        if (
            may_differ
            and not (values % 1).any()
            and len(np.unique(values)) == values.size
        ):
            remarks.add(HAS_IDENTIFIERS, repr(name))


def _is_rounded(column: Column, x: np.ndarray) -> bool:
    """Whether whole numbers that differ are equal as float32."""
    numbers = column.numbers
    assert numbers is not None
    is_known = numbers == numbers  # but for NaN
    known_numbers = numbers[is_known]
    with np.errstate(over="ignore"):
        number_range = float(known_numbers.max()) - float(known_numbers.min())
    are_whole = numbers.dtype.kind != "f" or not (known_numbers % 1).any()
    if not are_whole or number_range < EXACT_IN_FLOAT32:
        return False
    num_distinct = column.num_distinct
    if num_distinct is None:
        num_distinct = len(np.unique(known_numbers))
    return len(np.unique(x[is_known])) < num_distinct


def _without_offset(x: np.ndarray) -> tuple[np.ndarray, Decimal]:
    """Returns the numbers' exact differences from one of them, and that one."""
    if x.dtype.kind in "iu":  # differences may need all bits
        least = x.min()
        differences = (x - least).view(f"u{x.itemsize}").astype(np.float64)
        return differences, Decimal(int(least))
    numbers = x.astype(np.promote_types(x.dtype, np.float64))
    known_numbers = numbers[~np.isnan(numbers)]
    first_number = known_numbers[0] if known_numbers.size else numbers.dtype.type(0)
    with np.errstate(over="ignore"):  # reported by the caller
        differences = (numbers - first_number).astype(np.float64)
    return differences, Decimal(float(first_number))
