"""The pages of studies: their figures are those of the records, recomputed here."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from support.claims import Part
from support.commands import ROOT
from support.tiers import tiers

from benchmarks.harness import curves, studies
from experiments.study import presets

FOLDER = ROOT / "docs" / "studies"


def records_path(table):
    return table.with_name(table.name.replace("table", "finals")).with_suffix(".jsonl")


TABLES = sorted(x for x in FOLDER.glob("*/table*.csv") if records_path(x).exists())


# The flags that some study tunes.
TUNED = "lr", "outer_lr", "block_momentum", "slow_momentum", "outer_momentum"
TUNED += "rank", "density", "mixing", "pull", "beta", "proximal", "growth", "beta1"
TUNED += "dense_steps", "bound", "slow_lr", "local_momentum", "top_k", "inner_period"
TUNED += "first_period", "lookahead", "decay"


def read_heads(table):
    """The flag that is swept, or "", and the measure; one study has no table."""
    if not table.exists():
        return "noise", "test_loss"
    heads = table.read_text().partition("\n")[0].split(",")
    measure = next(x for x in heads if x.endswith("_mean")).removesuffix("_mean")
    return "" if heads[1] == "seeds" else heads[1], measure


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", TABLES, ids=lambda x: f"{x.parent.name}-{x.stem}")
def test_a_table_is_what_its_records_say(path):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    flag, key = read_heads(path)
    part = Part({"records": str(records_path(path)), "by": flag, "measure": key})

    def make_row(row):
        value = row.get(flag)
        return part.row(row["algorithm"] + (f"@{value}" if value else ""))

    bases = {row.get(flag, ""): row for row in rows if row["verdict"] == "baseline"}
    compared = 0
    for row in rows:
        if row["seeds"] == row["diverged"]:
            continue
        final_values = part.values(make_row(row))
        assert len(final_values) == int(row["seeds"]) - int(row["diverged"])
        assert float(row[f"{key}_mean"]) == pytest.approx(final_values.mean())
        assert float(row[f"{key}_sd"]) == pytest.approx(final_values.std(ddof=1))
        base = bases.get(row.get(flag, ""), bases.get(""))
        # Few seeds have no interval; equal differences neither.
        difference_cells = [row[f"difference_{x}"] for x in ("mean", "low", "high")]
        if not difference_cells[0] or base is None:
            continue
        pairs = part.pairs(make_row(row), make_row(base))
        expected = pairs.mean(), *ttest_1samp(pairs, 0).confidence_interval(0.95)
        difference_cells = [float(x) for x in difference_cells if x]
        assert difference_cells == pytest.approx(
            expected[: len(difference_cells)], abs=2e-6
        )
        compared += 1
    assert compared or {row["verdict"] for row in rows} == {"baseline"}


@pytest.mark.parametrize(
    "path",
    [*TABLES, FOLDER / "outer-rate-by-noise" / "table.csv"],
    ids=lambda x: f"{x.parent.name}-{x.stem}",
)
def test_reported_runs_have_the_values_that_tuning_chose(path):
    flag, key = read_heads(path)
    side = 1 if key == "test_accuracy" else -1
    trials = {}
    chosen = {}
    for line in read_lines(records_path(path)):
        row_key = line["label"], line.get(flag)
        values = tuple(line.get(x) for x in TUNED)
        if line["reported"]:
            chosen[row_key] = values
        else:
            end = -np.inf if line["diverged"] else side * line[key]
            trials.setdefault(row_key, {}).setdefault(values, []).append(end)
    for row_key, ends in trials.items():
        assert (
            np.mean(ends[chosen[row_key]]) >= max(map(np.mean, ends.values())) - 1e-6
        ), row_key


def test_records_name_the_code_that_made_them():
    lines = read_lines(FOLDER / "atlas-mnist1d" / "finals.jsonl")
    assert {"python", "jax", "optax", "numpy"} <= lines[0]["versions"].keys()
    for line in lines:  # each as the one before, if it says nothing
        assert re.fullmatch("[0-9a-f]{12}", line.get("commit", lines[0]["commit"]))


def test_curves_are_small_and_whole(tmp_path, capsys):
    lines = [
        {"label": "a", "seed": seed, "step": step, "loss": loss, "drift": 1}
        for seed, step, loss in [(0, 5, 0.123456789), (0, 10, None), (1, 5, 2.0)]
    ]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "metrics.jsonl").write_text(text)
    curves.main([str(tmp_path), "loss"])
    text = capsys.readouterr().out
    (tmp_path / "curves.jsonl").write_text(text)
    assert len(text.splitlines()) == 2
    assert curves.evaluations(tmp_path / "curves.jsonl") == [
        {"label": "a", "seed": 0, "step": 5, "loss": 0.1234568},
        {"label": "a", "seed": 0, "step": 10, "loss": None},
        {"label": "a", "seed": 1, "step": 5, "loss": 2.0},
    ]


def test_every_preset_has_records():
    record_paths = FOLDER.glob("*/finals*.jsonl")
    recorded_presets = set()
    for path in record_paths:
        study = path.parent.name
        recorded_presets |= {study, study + path.stem.removeprefix("finals")}
    need_a_gpu = {"model-size-10m", "model-size-36m"}
    planned = {"diloco-rounds", "diloco-rounds-640"}
    page = (FOLDER / "diloco-rounds.md").read_text("utf-8")
    assert planned & recorded_presets or "**Planned; no records yet.**" in page
    assert {*presets.NAMES} - need_a_gpu - planned <= recorded_presets


DEFAULT_STUDIES = ("fashion-mnist", *studies.JOINED)
ALL = tuple(path.name for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "names", tiers([DEFAULT_STUDIES, ALL], slow=[DEFAULT_STUDIES]), ids=["few", "all"]
)
def test_one_command_makes_tables_and_figures_again(
    names, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    again = Path("docs/studies")
    for name in names:
        shutil.copytree(FOLDER / name, again / name)
    figures = [x for x in again.glob("*/*.svg") if x.write_text("") == 0]
    studies.main([])
    tables = [*again.glob("*/*.csv")]
    printed_paths = capsys.readouterr().out.split()
    assert sorted(printed_paths) == sorted(map(str, [*figures, *tables]))
    assert figures and all("<svg" in x.read_text() for x in figures)
    for path in tables:
        assert path.read_text() == (FOLDER / path.relative_to(again)).read_text()
