"""Tables of one's own, as .csv and .npz files."""

import argparse

import numpy as np
import pytest

from experiments import run
from experiments.api import RunConfig, train
from experiments.cli.errors import BadRequest
from experiments.cli.factories import TASK, describe
from experiments.tasks.table import table
from experiments.training.run import prepare

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (100, 2))
KINDS = np.where(X.sum(1) > 6, "high", "low")


@pytest.fixture
def flowers(tmp_path):
    """Numbers around a column of words."""
    path = tmp_path / "flowers.csv"
    rows = [f"{a},{kind},{b}" for (a, b), kind in zip(X, KINDS, strict=True)]
    path.write_text("\n".join(["length,kind,width", *rows]) + "\n")
    return str(path)


def test_a_csv_file_is_split_scaled_and_its_words_are_classes(flowers):
    data = table(flowers, "kind").load()
    assert isinstance(data.train, dict)
    assert (len(data.train["x"]), len(data.test["x"])) == (80, 20)
    np.testing.assert_allclose(data.train["x"].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(data.train["x"].std(0), 1, rtol=1e-5)
    x = np.concatenate([data.test["x"], data.train["x"]])
    y = np.concatenate([data.test["y"], data.train["y"]])
    # High sums first in the alphabet, whatever the order.
    assert (y == 0).sum() == (KINDS == "high").sum()
    assert x[y == 0].sum(1).mean() > x[y == 1].sum(1).mean()


def test_an_npz_file_says_what_is_held_out(tmp_path):
    path = tmp_path / "data.npz"
    y = (KINDS == "low").astype(int) + 4
    np.savez(path, x=X[:90], y=y[:90], x_test=X[90:], y_test=y[90:])
    data = table(str(path)).load()
    np.testing.assert_array_equal(data.test["y"], y[90:] - 4)
    scaled = (X - X[:90].mean(0)) / X[:90].std(0)
    np.testing.assert_allclose(data.test["x"], scaled[90:], atol=1e-5)


def test_a_table_trains_by_its_name_alone(flowers):
    own = {"file": flowers, "target": "kind"}
    name = "experiments.tasks.table:table"
    config = RunConfig(task=name, workers=2, steps=100, task_arguments=own)
    assert train(config).summary["test_accuracy"] > 0.8


CSV = {
    "a,b\n1,x\nmuch,y\n": "line 3: could not convert string to float: 'much'",
    "kind,a,b\n1,5,cat\ncat,5\n": "line 3: 2 columns, and 3 in the header",
    "a,kind\n1,0\n\n2,1,\n": "line 4: 3 columns, and 2 in the header",
    "a,kind\n1,0.5\n2,0.25\n": "line 3: the class '0.25' is neither a whole numb",
    "a,kind\n1,x\n2,\n": "line 3: the class '' is neither a whole number nor a w",
    "a,kind\n1,0\n2,nan\n": "line 3: the class 'nan' is neither",
    "a,kind\n1,x\n2,x\n": "all rows have the same class, x",
    "a,kind\n1,x\nnan,y\n": "line 3: a number of x is not finite",
    "a,kind\n1,x\n1e39,y\n": "line 3: a number of x is not finite",
    "a,kind\n1,x\n2,y\n": "0 of 2 rows are held out",
    "a,kind\n": "holds no rows of numbers",
    "": "must have a header of two columns or more, separated by commas, got ''",
    "a;kind\n1;x\n": "separated by commas, got 'a;kind'",
    "a,kind\n1,\udcff\n": "is not a .csv file: 'utf-8' codec can't decode byte 0xff",
}
Y = (KINDS == "low").astype(int)
NPZ = [
    ({"x": X}, "has no y (it has: x)"),
    ({"x": X, "y": np.eye(2)[Y]}, "y must have shape (100,), a class for each row of"),
    ({"x": X, "y": Y[:, None]}, "y must have shape (100,), a class for each row of x"),
    ({"x": X, "y": np.repeat(Y, 2)}, "y must have shape (100,), a class for each row"),
    ({"x": X, "y": Y, "x_test": X}, "has no y_test (it has: x, y, x_test)"),
    ({"x": X, "y": Y, "y_test": Y}, "has no x_test (it has: x, y, y_test)"),
    (
        {"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y},
        "x_test must be numbers, (examples, 2), got float64 (100, 1)",
    ),
    ({"x": X, "y": Y, "x_test": X[:0], "y_test": Y[:0]}, "0 of 100 rows are held out"),
    ({"x": KINDS, "y": Y}, "x must be numbers, (examples), got <U4 (100,)"),
    ({"x": X, "y": X[:, 0]}, "is neither a whole number nor a word"),
    ({"x": X, "y": np.where(Y, np.nan, 1)}, "the class nan is neither a whole number"),
    ({"x": X, "y": np.where(Y, "", "high")}, "the class '' is neither a whole number"),
    ({"x": X, "y": Y * 0}, "all rows have the same class, 0"),
    ({"x": np.where(X > 6, np.inf, X), "y": Y}, "a number of x is not finite"),
    ({"x": X, "y": KINDS.astype(object)}, "neither a .csv file nor an .npz file"),
]


def refused(path, **own):
    """Returns what a run says of a table."""
    config = RunConfig(
        task="experiments.tasks.table:table",
        task_arguments={"file": str(path), **own},
    )
    with pytest.raises(BadRequest) as raised:
        prepare(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("content", "said"), CSV.items(), ids=CSV.values())
def test_what_is_wrong_with_a_csv_file_is_told_in_a_line(content, said, tmp_path):
    path = tmp_path / "data.CSV"
    path.write_text(content, errors="surrogateescape")
    told = refused(path)
    assert str(path) in told and said in told


@pytest.mark.parametrize(("arrays", "said"), NPZ, ids=[said for _, said in NPZ])
def test_what_is_wrong_with_an_npz_file_is_told_in_a_line(arrays, said, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    told = refused(path)
    assert str(path) in told and said in told


def test_another_kind_of_file_is_told_in_a_line(tmp_path):
    path = tmp_path / "data.npz"
    np.save(tmp_path / "data.npy", X)
    array = (tmp_path / "data.npy").read_bytes()
    for content in (array, b"a,kind\n1,x\n", b"", b"\x93NUMPY", b"PK\3\4"):
        path.write_bytes(content)
        assert f"{path} is neither a .csv file nor an .npz file" in refused(path)


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path):
    path = tmp_path / "data.csv"
    # Not where Python's own library failed.
    assert refused(path).endswith(f"No such file or directory: '{path}'")


def test_an_empty_default_is_told_in_words_alone():
    parser = argparse.ArgumentParser()
    describe(TASK, "experiments.tasks.table:table").add_to(parser)
    told = " ".join(parser.format_help().split())
    assert "by default the last one. --hidden" in told


def test_flags_of_a_table_that_cannot_be_used_are_told(flowers):
    assert f"'c': {flowers} has length, kind, width" in refused(flowers, target="c")
    assert "--hidden must be a whole number of at least 1" in refused(flowers, hidden=0)


def test_a_byte_order_mark_and_blank_lines_are_no_content(tmp_path):
    """Excel writes the former."""
    path = tmp_path / "excel.CSV"
    rows = [f"{kind},{a},{b}\n" for (a, b), kind in zip(X, KINDS, strict=True)]
    path.write_text("".join(["kind,a,b\n", *rows, "\n\n"]), "utf-8-sig")
    data = table(str(path), "kind").load()
    assert (len(data.test["x"]), data.examples) == (20, 80)


def test_a_run_goes_on_only_with_the_same_table(flowers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    words = f"--task experiments.tasks.table:table --file {flowers} --target kind"
    words += f" --steps 4 --workers 2 --checkpoint-every 4 --out {tmp_path / 'out'}"
    assert run.main(words.split()) == 0
    with open(flowers, "a") as file:
        file.write("1,low,2\n")
    assert run.main([*words.split(), "--resume"]) == 2
    assert "used other data: the files have changed" in capsys.readouterr().err
