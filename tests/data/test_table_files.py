"""Tables as people publish them: row names, gaps, words, dates, and no header."""

import json
from collections import Counter
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from experiments import run
from experiments.data import feeding
from experiments.tasks.table import table
from experiments.tasks.task import Data

NUM_ROWS = 60
RNG = np.random.default_rng(5)
LENGTHS = RNG.normal(3.0, 2.0, NUM_ROWS).round(3)
WIDTHS = RNG.normal(1.0, 0.5, NUM_ROWS).round(3)
KINDS = np.where(LENGTHS > 3, "high", "low")
# The split that every table without a test part has.
ORDER = np.random.default_rng(0).permutation(NUM_ROWS)
TEST = ORDER[: NUM_ROWS // 5]
TRAIN = ORDER[NUM_ROWS // 5 :]


class Reading(NamedTuple):
    """A table after reading: all inputs in the order of the file, and the remarks."""

    x: np.ndarray
    y: np.ndarray
    remarks: str
    data: Data


@pytest.fixture
def read(tmp_path, capsys):
    """Writes a file and reads it as the task does."""

    def read_text(text: str, column: str = "") -> Reading:
        path = tmp_path / "data.csv"
        path.write_text(text)
        data = feeding.load_data(table(str(path), column).load, "table", None)
        assert isinstance(data.train, dict)
        rows = len(data.train["y"]) + len(data.test["y"])
        order = np.random.default_rng(0).permutation(rows)
        x = np.concatenate([data.test["x"], data.train["x"]])[np.argsort(order)]
        y = np.concatenate([data.test["y"], data.train["y"]])[np.argsort(order)]
        return Reading(x, y, capsys.readouterr().err, data)

    return read_text


def as_csv(columns, separator=","):
    """The text of a file with these columns, with their names in the first line."""
    lines = [separator.join(map(str, columns))]
    rows = zip(*columns.values(), strict=True)
    lines += [separator.join(map(str, row)) for row in rows]
    return "\n".join(lines) + "\n"


PLAIN = {"length": LENGTHS, "width": WIDTHS, "kind": KINDS}


def standardized(values, train=TRAIN):
    values = np.asarray(values, np.float64)
    return (values - values[train].mean()) / values[train].std()


@pytest.mark.parametrize("name", ['""', "Unnamed: 0", "rownames", "X", "no", "2019"])
@pytest.mark.parametrize("start", [0, 1])
def test_a_column_of_row_numbers_is_no_input_whatever_its_name(name, start, read):
    numbers = np.arange(start, start + NUM_ROWS)
    numbered = read(as_csv({name: numbers, **PLAIN}))
    plain = read(as_csv(PLAIN))
    np.testing.assert_array_equal(numbered.x, plain.x)
    assert "because each row holds its own number there" in numbered.remarks
    assert "own number" not in plain.remarks


def test_row_numbers_without_a_name_are_no_input_and_names_of_rows_are_none(read):
    """R's write.table: the first line has no cell for the rows' names."""
    lines = as_csv(PLAIN).splitlines()
    plain = read("\n".join(lines))
    names = [[str(row) for row in range(NUM_ROWS)], [f"row {x}" for x in ORDER]]
    for words, why in zip(
        names, ("own number there", "another word there"), strict=True
    ):
        rows = [f"{word},{line}" for word, line in zip(words, lines[1:], strict=True)]
        named_reading = read("\n".join([lines[0], *rows]))
        np.testing.assert_array_equal(named_reading.x, plain.x)
        assert why in named_reading.remarks
        assert "the first line has one cell less than the rows" in named_reading.remarks


def test_other_whole_numbers_in_each_row_are_an_input_and_this_is_said(read):
    for numbers in (ORDER, np.arange(NUM_ROWS)[::-1], np.arange(NUM_ROWS) + 2):
        reading = read(as_csv({"id": numbers, **PLAIN}))
        np.testing.assert_allclose(reading.x[:, 0], standardized(numbers), atol=1e-5)
        assert (
            "the inputs include 'id', where each row has a different whole number"
            in reading.remarks
        )


def test_row_numbers_of_each_part_of_arrays_are_no_input(tmp_path):
    y = (KINDS == "high").astype(int)
    for start in (0, 1, NUM_ROWS - 12):
        numbers = np.concatenate([np.arange(48), np.arange(start, start + 12)])
        x = np.stack([numbers, LENGTHS], 1)
        np.savez(tmp_path / "x.npz", x=x[:48], y=y[:48], x_test=x[48:], y_test=y[48:])
        assert table(str(tmp_path / "x.npz")).load().test["x"].shape == (12, 1)


@pytest.mark.parametrize("times", [1, 5])
def test_rows_of_both_parts_are_counted(times, read):
    rows = [*zip(LENGTHS, WIDTHS, KINDS, strict=True)]
    lines = []
    for length, width, kind in rows:
        lines += [f"{length},{width},{kind}"] * times
    reading = read("\n".join(["length,width,kind", *lines]))
    order = np.random.default_rng(0).permutation(len(lines))
    train_lines = {lines[row] for row in order[len(lines) // 5 :]}
    repeated = [row for row in order[: len(lines) // 5] if lines[row] in train_lines]
    count = f"{len(repeated)} of {len(lines) // 5} held-out rows are also among"
    assert (count in reading.remarks) == (times > 1)
    assert ("held-out rows are also" in reading.remarks) == (times > 1)


def test_rows_of_both_parts_are_counted_in_the_part_that_validates(tmp_path, capsys):
    x = np.repeat(RNG.normal(size=(40, 3)), 2, axis=0)
    y = np.arange(80) % 4 // 2
    np.savez(tmp_path / "x.npz", x=x, y=y, x_test=x[:10] + 1, y_test=y[:10])
    task = table(str(tmp_path / "x.npz"))
    feeding.load_data(task.load, "table", None)
    assert "held-out rows are also" not in capsys.readouterr().err
    data = feeding.load_data(task.load, "table", 0.25)
    assert isinstance(data.train, dict)
    train_rows = {tuple(row) for row in np.asarray(data.train["x"]).tolist()}
    count = sum(tuple(row) in train_rows for row in np.asarray(data.test["x"]).tolist())
    assert count > 0
    remarks = capsys.readouterr().err
    assert f"{count} of 20 held-out rows are also among the rows to train on" in remarks


MARKS = [
    "NA",
    "n/a",
    "NULL",
    "none",
    "?",
    "-",
    ".",
    "Missing",
    "unknown",
    "#N/A",
    "NaT",
]


@pytest.mark.parametrize("mark", MARKS)
def test_a_class_that_may_mean_a_missing_one_is_named(mark, read):
    kinds = np.where(np.arange(NUM_ROWS) % 3 == 0, mark, KINDS)
    remarks = read(as_csv({**PLAIN, "kind": kinds})).remarks
    assert f"{mark!r} is a class, which 20 of 60 rows have: if it means" in remarks


def test_the_share_of_the_most_frequent_class_is_said(read):
    counts = Counter(KINDS[TRAIN].tolist())
    [(kind, count)] = counts.most_common(1)
    remarks = read(as_csv(PLAIN)).remarks
    share = 100 * np.mean(KINDS[TEST] == kind)
    assert (
        f"the most frequent class, {kind}, has {100 * count / 48:.1f} % of" in remarks
    )
    assert f" and {share:.1f} % of those held out" in remarks
    assert " is a class, which " not in remarks


@pytest.mark.parametrize(
    "header",
    [
        "400,402,404,label",
        "2.5,5,10,label",
        "9.5,9.25,9,kind",
        "0,1,2,kind",
        "0,1,2,3",
        "1990,1991,1992,1993",
        "a,b,c,5",
    ],
)
def test_a_first_line_of_numbers_may_be_names(header, read):
    kinds = KINDS if header != "1990,1991,1992,1993" else np.arange(NUM_ROWS) % 2
    columns = {"a": LENGTHS, "b": WIDTHS, "c": LENGTHS * WIDTHS, "kind": kinds}
    lines = as_csv(columns).splitlines()
    reading = read("\n".join([header, *lines[1:]]))
    np.testing.assert_array_equal(reading.x, read("\n".join(lines)).x)
    assert (
        "read as the names of the columns, although it holds numbers" in reading.remarks
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"a": LENGTHS, "kind": KINDS},
        {"a": np.arange(NUM_ROWS) % 7 + 5, "b": LENGTHS, "kind": KINDS},
        {"a": np.arange(NUM_ROWS) % 7, "b": np.arange(NUM_ROWS) % 5, "kind": KINDS},
        {"a": LENGTHS, "b": WIDTHS, "kind": np.arange(NUM_ROWS) % 2},
        {"a": KINDS, "b": np.array(["x", "y"])[np.arange(NUM_ROWS) % 2], "kind": KINDS},
        {"a": [f"2020-01-{1 + i % 28:02}" for i in range(NUM_ROWS)], **PLAIN},
        {"a": [f"row {i}" for i in range(NUM_ROWS)], **PLAIN},
    ],
    ids=["floats", "codes", "small codes", "numbers", "words", "dates", "row names"],
)
def test_a_file_without_a_line_of_names_keeps_its_first_row(columns, read):
    lines = as_csv(columns).splitlines()
    reading = read("\n".join(lines[1:]))
    assert len(reading.x) == NUM_ROWS
    np.testing.assert_array_equal(reading.x, read("\n".join(lines)).x)
    assert (
        f"the columns are called 'column 1' to 'column {len(columns)}'"
        in reading.remarks
    )
    named_reading = read("\n".join(lines[1:]), f"column {len(columns)}")
    np.testing.assert_array_equal(named_reading.y, reading.y)


def test_a_column_that_the_user_names_shows_that_the_first_line_has_names(read):
    # Without it the words of the first line look like those of a row.
    text = "low,high\n" + "\n".join(["low,low", "high,high", "low,high"] * 20)
    assert len(read(text).y) == 61
    assert len(read(text, "high").y) == 60


WORDS = np.array(["red", "green", "blue", ""])[RNG.integers(0, 4, NUM_ROWS)]


@pytest.mark.parametrize("mark", ["", "NA", "null"])
def test_words_are_categories_and_their_gaps_are_one(mark, read):
    words = np.where(WORDS == "", mark, WORDS)
    reading = read(as_csv({"colour": words, **PLAIN}))
    expected = np.stack([words == x for x in ("blue", "green", "red", mark)], 1)
    np.testing.assert_array_equal(reading.x[:, :4], expected)
    np.testing.assert_array_equal(reading.x[:, 4:], read(as_csv(PLAIN)).x)
    assert "the words of 'colour' (4) are read as categories" in reading.remarks
    gaps = np.count_nonzero(words == mark)
    assert (
        f"the gaps of 'colour' ({gaps}) are read as a category of their"
        in reading.remarks
    )


def test_numbers_with_a_few_words_among_them_are_categories(read):
    """As 2, 3, 4, 5more of cars; one word among many numbers is a mistake."""
    doors = np.array(["2", "3", "4", "5more"])[np.arange(NUM_ROWS) % 4]
    reading = read(as_csv({"doors": doors, **PLAIN}))
    expected = np.stack([doors == x for x in ("2", "3", "4", "5more")], 1)
    np.testing.assert_array_equal(reading.x[:, :4], expected)
    doors[doors == "5more"] = "5"
    doors[7] = "5more"
    with pytest.raises(ValueError, match="line 9: column 'doors' has '5more' among nu"):
        read(as_csv({"doors": doors, **PLAIN}))


def test_different_numbers_with_words_among_them_are_no_input(read):
    words = np.where(np.arange(NUM_ROWS) % 5 == 0, "n.s.", LENGTHS.astype(str))
    reading = read(as_csv({"a": words, **PLAIN}))
    np.testing.assert_array_equal(reading.x, read(as_csv(PLAIN)).x)
    assert (
        "leave out 'a' ('n.s.'), because words stand among different" in reading.remarks
    )


def test_a_separator_at_the_end_of_each_line_makes_no_column(read):
    lines = as_csv(PLAIN).splitlines()
    plain = read("\n".join(lines))
    for names in (lines[0], f"{lines[0]},"):
        text = "\n".join([names, *(f"{line}," for line in lines[1:])])
        np.testing.assert_array_equal(read(text).x, plain.x)
        np.testing.assert_array_equal(read(text).y, plain.y)


def test_words_that_differ_only_in_case_are_said(read):
    words = np.array(["Yes", "yes", "no"])[np.arange(NUM_ROWS) % 3]
    reading = read(as_csv({"a": words, **PLAIN}))
    assert "some words of 'a' differ only in case" in reading.remarks
    assert "only in case" not in read(as_csv({"a": WORDS, **PLAIN})).remarks


def test_held_out_rows_make_no_category(read):
    words = np.where(WORDS == "", "red", WORDS)
    words[TEST[:2]] = ["violet", ""]
    reading = read(as_csv({"colour": words, **PLAIN}))
    assert reading.x.shape[1] == 3 + 2
    np.testing.assert_array_equal(reading.x[TEST[:2], :3], 0)
    assert "that no row to train on has in 'colour' (2)" in reading.remarks


@pytest.mark.parametrize(("count", "is_input"), [(100, True), (101, False)])
def test_up_to_a_hundred_words_are_categories(count, is_input, read):
    rows = 8 * count
    order = np.random.default_rng(0).permutation(rows)
    words = np.empty(rows, object)
    words[order] = [f"word {row % count}" for row in range(rows)]
    values = RNG.normal(size=rows)
    reading = read(as_csv({"a": words, "b": values, "kind": np.arange(rows) % 2}))
    assert reading.x.shape[1] == (101 if is_input else 1)
    sentence = "leave out 'a' (101), because more than 100 different words stand there"
    assert (sentence in reading.remarks) == (not is_input)


@pytest.mark.parametrize("mark", ["", "NA", "?", "nan", "-", ".", "unknown", "N/A"])
def test_gaps_are_filled_with_the_median_of_the_rows_to_train_on(mark, read):
    values = LENGTHS.copy()
    gaps = np.r_[TRAIN[:7], TEST[:3]]
    values[gaps] = np.nan
    values[TEST[3:]] += 100  # the median of all rows would be another
    words = [mark if np.isnan(value) else str(value) for value in values]
    reading = read(as_csv({"a": words, **PLAIN}))
    filled = np.where(np.isnan(values), np.median(values[TRAIN[7:]]), values)
    np.testing.assert_allclose(reading.x[:, 0], standardized(filled), atol=1e-4)
    assert (
        "the gaps of 'a' (10) are filled with the median of the rows" in reading.remarks
    )


def test_numbers_that_are_all_missing_to_train_on_are_no_input(read):
    empty = read(as_csv({"a": [""] * NUM_ROWS, **PLAIN}))
    words = np.full(NUM_ROWS, "NA", object)
    words[TEST] = 5
    for reading in (empty, read(as_csv({"a": words, **PLAIN}))):
        np.testing.assert_array_equal(reading.x, read(as_csv(PLAIN)).x)
        assert (
            "leave out 'a', because no row to train on has a value" in reading.remarks
        )


@pytest.mark.parametrize(
    "form",
    [
        "2020-01-{:02}",
        "{}.1.2020",
        "1/{}/20",
        "2020-01-{:02}T12:30:05.25Z",
        "2020-01-{:02} 09:15",
        "{}-Jan-20",
        "Jan {}, 2020",
        "Fri, {} January 2020 12:00:00 +0000",
        "12:{:02}",
    ],
)
def test_dates_are_no_input_and_this_is_said(form, read):
    dates = [form.format(1 + i % 28) for i in range(NUM_ROWS)]
    dates[7] = ""
    quoted = [f'"{date}"' for date in dates]
    reading = read(as_csv({"day": quoted, **PLAIN}))
    np.testing.assert_array_equal(reading.x, read(as_csv(PLAIN)).x)
    assert "leave out 'day', because dates or times stand there" in reading.remarks


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas_are_read_where_they_separate_no_cells(separator, read):
    commas = [str(value).replace(".", ",") for value in LENGTHS]
    text = as_csv({**PLAIN, "length": commas, "width": commas}, separator)
    reading = read(text)
    points = read(as_csv({**PLAIN, "width": LENGTHS}))
    np.testing.assert_array_equal(reading.x, points.x)
    assert "'length', 'width' are read with decimal commas" in reading.remarks
    assert f"the columns are separated by {separator!r}" in reading.remarks
    headless = read(text.partition("\n")[2])
    np.testing.assert_array_equal(headless.x, points.x)


def test_points_in_a_table_of_semicolons_stay_points(read):
    reading = read(as_csv(PLAIN, ";"))
    np.testing.assert_array_equal(reading.x, read(as_csv(PLAIN)).x)
    assert "decimal commas" not in reading.remarks


def test_whole_numbers_that_float32_makes_equal_are_said(read):
    identifiers = 10**18 + ORDER
    exact = read(as_csv({"id": identifiers, **PLAIN}))
    np.testing.assert_allclose(exact.x[:, 0], standardized(ORDER), atol=1e-5)
    assert "become equal" not in exact.remarks
    rounded = [0, *identifiers[1:].tolist()]
    assert len({*map(np.float32, rounded)}) == 2
    remarks = read(as_csv({"id": rounded, **PLAIN})).remarks
    assert "in which different numbers of 'id' become equal: take away a com" in remarks


def inputs_by_header(header, columns):
    """Makes the inputs again as the header of an exported model says."""
    arrays = []
    for facts in json.loads(header["inputs"]):
        cells = columns[facts["column"]]
        if facts["kind"] == "words":
            names = ["" if x is None else x for x in facts["categories"]]
            for name in names:
                arrays.append(np.array([cell == name for cell in cells]))
            continue
        filled = [Decimal(str(cell) or facts["fill"]) for cell in cells]
        differences = [float(cell - Decimal(facts["offset"])) for cell in filled]
        arrays.append((np.array(differences) - facts["mean"]) / facts["deviation"])
    return np.stack(arrays, 1)


COLUMNS = {
    "row": np.arange(NUM_ROWS),
    "colour": WORDS,
    "time": 10**18 + ORDER,
    "gap": np.where(WORDS == "red", "", LENGTHS.astype(str)),
    **PLAIN,
}


def test_the_inputs_follow_from_what_an_exported_model_says(read):
    reading = read(as_csv(COLUMNS))
    header = {key: json.dumps(x) for key, x in reading.data.preparation.items()}
    assert json.loads(header["classes"]) == ["high", "low"]
    expected = inputs_by_header(header, COLUMNS)
    np.testing.assert_allclose(reading.x, expected, atol=2e-5)


@pytest.mark.slow
def test_an_exported_model_of_a_table_says_how_its_inputs_are_made(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(as_csv(COLUMNS))
    words = f"--task table --file {path} --steps 2 --workers 2 --out {tmp_path / 'out'}"
    model = tmp_path / "model.safetensors"
    assert run.main([*words.split(), "--export", str(model)]) == 0
    with safe_open(model, "np") as file:
        expected = inputs_by_header(file.metadata(), COLUMNS)
        assert file.get_tensor("params.0.w").shape[0] == expected.shape[1]
    data = table(str(path)).load()
    np.testing.assert_allclose(data.test["x"], expected[TEST], atol=2e-5)


def test_a_column_of_a_file_with_another_ending_is_not_blamed(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("x\tlabel\n1\ta\n2\tb\n")
    with pytest.raises(ValueError, match=r"is neither a \.csv file nor an \.npz"):
        table(str(path), "label")
