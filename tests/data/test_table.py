"""Tables of one's own, as .csv and .npz files."""

import argparse

import numpy as np
import pytest

from experiments import run
from experiments.api import RunConfig
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


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path):
    path = tmp_path / "data.csv"
    name = "experiments.tasks.table:table"
    with pytest.raises(BadRequest) as raised:
        prepare(RunConfig(task=name, task_arguments={"file": str(path)}))
    # Not where Python's own library failed.
    assert str(raised.value).endswith(f"No such file or directory: '{path}'")


def test_an_empty_default_is_told_in_words_alone():
    parser = argparse.ArgumentParser()
    describe(TASK, "experiments.tasks.table:table").add_to(parser)
    told = " ".join(parser.format_help().split())
    assert "by default the last one. --hidden" in told


def test_a_byte_order_mark_and_blank_lines_are_no_content(tmp_path):
    """Excel writes the former."""
    path = tmp_path / "excel.CSV"
    rows = [f"{kind},{a},{b}\n" for (a, b), kind in zip(X, KINDS, strict=True)]
    path.write_text("".join(["kind,a,b\n", *rows, "\n\n"]), "utf-8-sig")
    data = table(str(path), "kind").load()
    assert (len(data.test["x"]), data.examples) == (20, 80)


@pytest.mark.slow
def test_a_run_goes_on_only_with_the_same_table(flowers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    words = f"--task experiments.tasks.table:table --file {flowers} --target kind"
    words += f" --steps 4 --workers 2 --checkpoint-every 4 --out {tmp_path / 'out'}"
    assert run.main(words.split()) == 0
    with open(flowers, "a") as file:
        file.write("1,low,2\n")
    assert run.main([*words.split(), "--resume"]) == 2
    assert "used other data: the files have changed" in capsys.readouterr().err
