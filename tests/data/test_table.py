"""Tables of one's own, as .csv and .npz files."""

from functools import partial

import jax
import numpy as np
import pytest

from experiments import run
from experiments.api import RunConfig
from experiments.command.errors import BadRequest
from experiments.tasks.table import table
from experiments.training.prepare import prepare

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


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path):
    path = tmp_path / "data.csv"
    with pytest.raises(BadRequest) as raised:
        prepare(RunConfig(task="table", task_arguments={"file": str(path)}))
    assert str(raised.value).endswith(f"{path}: No such file or directory")


FAR = 1_700_000_000_000_000_000  # nanoseconds since 1970
TIME = FAR + np.arange(200) % 7 + 10 * (np.arange(200) % 2)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ([str(x) for x in TIME], TIME - FAR),
        ([f"{x // 10**9}.{x % 10**9:09}" for x in TIME], TIME - FAR),
        ([f"{x - FAR}e200" for x in TIME], TIME - FAR),
        ([f"{x - FAR}e-200" for x in TIME], TIME - FAR),
        ([f" {bool(x % 2)}".upper() for x in TIME], TIME % 2),
    ],
)
def test_numbers_are_standardized_without_rounding_their_differences(
    words, numbers, tmp_path
):
    path = tmp_path / "data.csv"
    y = np.arange(200) % 2
    rows = [f"{word},{label}" for word, label in zip(words, y, strict=True)]
    path.write_text("\n".join(["time,kind", *rows]))
    data = table(str(path)).load()
    # Rounded as float32 they would be one number, and two as float64.
    order = np.random.default_rng(0).permutation(200)
    train = numbers[order[40:]]
    scaled = (numbers[order] - train.mean()) / train.std()
    x = np.concatenate([data.test["x"], data.train["x"]])
    np.testing.assert_allclose(x[:, 0], scaled, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_whole_numbers_of_64_bits_keep_all_of_them(dtype, tmp_path):
    y = np.arange(100) % 2
    x = np.array([[np.iinfo(dtype).max - 2]], dtype) + y[:, None].astype(dtype)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    x = np.asarray(table(str(tmp_path / "data.npz")).load().train["x"])
    assert {*np.round(x.ravel() - x.min()).tolist()} > {0.0}


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["1", "1.0", " 1", "2", "+2", "2e0"], "1, 2"),
        (["10", "9", "b", "a ", "a", " b"], "9, 10, a, b"),
        (["1_10", "110", "11_0"] * 2, "110, 11_0, 1_10"),
        (["e\u0301", "é", "é\u00a0", "New  York", "New York", "é"], "New York, é"),
    ],
)
def test_labels_are_compared_as_values(y, classes, tmp_path, capsys):
    path = tmp_path / "data.csv"
    path.write_text("kind,x\n" + "".join(f"{y[i % 6]},{i}.5\n" for i in range(60)))
    table(str(path), "kind").load()
    remarks = capsys.readouterr().err
    assert (
        f"classes in 'kind' ({classes}); the size of the model's input is 1;" in remarks
    )
    assert "; 12 rows are held out; " in remarks


def test_what_was_read_is_said(tmp_path, capsys):
    path = tmp_path / "data.csv"
    i = np.arange(50)
    rows = zip(i[::-1], i % 3 > 0, i * 0 + 0.1, i % 25, strict=True)
    lines = [f"{a},{b},{c},{d}\n" for a, b, c, d in rows]
    path.write_text("".join([" id ,flag,same,kind\n", *lines, ",,,\n"]))
    for _ in range(2):  # the second time without reading
        table(str(path)).load()
        remarks = capsys.readouterr().err
        assert "it has 50 rows and 25 classes in 'kind' (0, 1, 2, 3, 4, 5, 6" in remarks
        assert (
            "and 15 more); the size of the model's input is 3; 10 rows are" in remarks
        )
        assert "the words false and true of 'flag' are read as 0 and 1\n" in remarks
        assert "leave out 'same', because all rows to train on are equal" in remarks
        assert "include 'id', where each row has a different whole number" in remarks
        assert "25 classes are many: is --column the right" in remarks
    path.write_text("a,b,kind\n" + "1,2,Yes\n2,3,yes\n" * 9)
    table(str(path)).load()
    assert "these classes differ only in case: Yes, yes\n" in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_are_offered_a_model_for_pictures(tmp_path, capsys):
    x = RNG.integers(0, 255, (50, 24, 31), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(50) % 2, z=0)
    table(str(tmp_path / "data.npz")).load()
    remarks = capsys.readouterr().err
    assert "may be pictures of 24×31: --model lenet reads them as such\n" in remarks
    assert "the file's arrays z are not read\n" in remarks
    task = table(str(tmp_path / "data.npz"), model="lenet")
    inputs = np.asarray(task.load().train["x"])
    assert inputs.shape == (40, 24, 31, 1)
    np.testing.assert_allclose([inputs.mean(), inputs.std()], [0, 1], atol=1e-5)
    assert "--model" not in capsys.readouterr().err
    start = jax.eval_shape(task.init, jax.random.key(0))
    apply = partial(task.apply, key=None, train=False)
    values, _ = jax.eval_shape(apply, *start, task.load().test)
    assert values["loss"].shape == (10,)


def test_a_byte_order_mark_and_blank_lines_are_no_content(tmp_path):
    """Excel writes the former."""
    path = tmp_path / "excel.CSV"
    rows = [f"{kind},{a},{b}\n" for (a, b), kind in zip(X, KINDS, strict=True)]
    path.write_text("".join(["kind,a,b\n", *rows, "\n\n"]), "utf-8-sig")
    data = table(str(path), "kind").load()
    assert (len(data.test["x"]), data.examples) == (20, 80)


@pytest.mark.slow
def test_a_run_goes_on_only_with_the_same_table(flowers, tmp_path, capsys):
    words = f"--task table --file {flowers} --column kind"
    words += f" --steps 4 --workers 2 --checkpoint-every 4 --out {tmp_path / 'out'}"
    assert run.main(words.split()) == 0
    with open(flowers, "a") as file:
        file.write("1,low,2\n")
    assert run.main([*words.split(), "--resume"]) == 2
    line = "used other data: the files have changed: restore them, or start anew with "
    assert line in capsys.readouterr().err
