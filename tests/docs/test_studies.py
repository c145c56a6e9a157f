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


def records_of(table):
    return table.with_name(table.name.replace("table", "finals")).with_suffix(".jsonl")


TABLES = sorted(x for x in FOLDER.glob("*/table*.csv") if records_of(x).exists())


# The flags that some study tunes.
TUNED = "lr", "outer_lr", "block_momentum", "slow_momentum", "outer_momentum"
TUNED += "rank", "density", "mixing", "pull", "beta", "proximal", "growth", "beta1"
TUNED += "dense_steps", "bound", "slow_lr", "local_momentum", "top_k", "inner_period"
TUNED += "first_period", "lookahead", "decay"


def heads_of(table):
    """The flag that is swept, or "", and the measure; one study has no table."""
    if not table.exists():
        return "noise", "test_loss"
    heads = table.read_text().partition("\n")[0].split(",")
    measure = next(x for x in heads if x.endswith("_mean")).removesuffix("_mean")
    return "" if heads[1] == "seeds" else heads[1], measure


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", TABLES, ids=lambda x: f"{x.parent.name}-{x.stem}")
def test_a_table_is_what_its_records_say(path):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    flag, key = heads_of(path)
    part = Part({"records": str(records_of(path)), "by": flag, "measure": key})

    def ends(row):
        value = row.get(flag)
        return part.row(row["algorithm"] + (f"@{value}" if value else ""))

    bases = {row.get(flag, ""): row for row in rows if row["verdict"] == "baseline"}
    compared = 0
    for row in rows:
        if row["seeds"] == row["diverged"]:
            continue
        found = part.values(ends(row))
        assert len(found) == int(row["seeds"]) - int(row["diverged"])
        assert float(row[f"{key}_mean"]) == pytest.approx(found.mean())
        assert float(row[f"{key}_sd"]) == pytest.approx(found.std(ddof=1))
        base = bases.get(row.get(flag, ""), bases.get(""))
        # Few seeds have no interval; equal differences neither.
        shown = [row[f"difference_{x}"] for x in ("mean", "low", "high")]
        if not shown[0] or base is None:
            continue
        pairs = part.pairs(ends(row), ends(base))
        told = pairs.mean(), *ttest_1samp(pairs, 0).confidence_interval(0.95)
        shown = [float(x) for x in shown if x]
        assert shown == pytest.approx(told[: len(shown)], abs=2e-6)
        compared += 1
    assert compared or {row["verdict"] for row in rows} == {"baseline"}


@pytest.mark.parametrize(
    "path",
    [*TABLES, FOLDER / "outer-rate-by-noise" / "table.csv"],
    ids=lambda x: f"{x.parent.name}-{x.stem}",
)
def test_reported_runs_have_the_values_that_tuning_chose(path):
    flag, key = heads_of(path)
    side = 1 if key == "test_accuracy" else -1
    trials = {}
    chosen = {}
    for line in lines_of(records_of(path)):
        at = line["label"], line.get(flag)
        values = tuple(line.get(x) for x in TUNED)
        if line["reported"]:
            chosen[at] = values
        else:
            end = -np.inf if line["diverged"] else side * line[key]
            trials.setdefault(at, {}).setdefault(values, []).append(end)
    for at, ends in trials.items():
        assert np.mean(ends[chosen[at]]) >= max(map(np.mean, ends.values())) - 1e-6, at


def test_records_name_the_code_that_made_them():
    lines = lines_of(FOLDER / "atlas-mnist1d" / "finals.jsonl")
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
    found = FOLDER.glob("*/finals*.jsonl")
    made = {x.parent.name + end for x in found for end in ("", x.stem[len("finals") :])}
    need_a_gpu = {"model-size-10m", "model-size-36m"}
    assert {*presets.NAMES} - need_a_gpu <= made


FEW = ("fashion-mnist", *studies.JOINED)
ALL = tuple(path.name for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("names", tiers([FEW, ALL], slow=[FEW]), ids=["few", "all"])
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
    told = capsys.readouterr().out.split()
    assert sorted(told) == sorted(map(str, [*figures, *tables]))
    assert figures and all("<svg" in x.read_text() for x in figures)
    for path in tables:
        assert path.read_text() == (FOLDER / path.relative_to(again)).read_text()
