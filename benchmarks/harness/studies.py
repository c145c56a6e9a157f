"""Makes the tables and figures of studies again from their records, without training.

    python -m benchmarks.harness.studies

makes all of docs/studies, or the folders given as arguments. For each folder it reads
finals.jsonl, curves.jsonl if it exists (benchmarks.harness.curves), and the preset with
the folder's name. It writes table.csv and the existing figures again. Values that the
records lack do not change, except for modelled times: a table has them only if the
records have all messages and evaluations, because the model of time may change. Records
made with other flags have a suffix, such as finals-2500.jsonl, and so do their table
and figures. The page of the atlas includes tables of three studies.
"""

import argparse
import csv
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import atlas, headline
from benchmarks.harness.curves import evaluations
from experiments import files
from experiments.command.words import literal
from experiments.study import config as configs
from experiments.study import page, presets
from experiments.study.analysis import (
    add_times,
    compare_rows,
    make_curve,
    make_row,
)
from experiments.study.config import StudyConfig
from experiments.study.figures import styles
from experiments.study.results import Curve, Report
from experiments.study.runs import (
    Lines,
    RunSet,
    compute_tunings,
    find_measure,
    make_trial,
)
from experiments.study.sentences import make_title
from experiments.study.study import REPEATED
from experiments.training.summary import Summary

FOLDER = Path("docs/studies")
JOINED = ("atlas-mnist1d", "atlas-spoken-digits", "atlas-gpt")
# The flags of studies without a preset.
FLAGS = {
    "fashion-mnist": "--algos 'sync_sgd, model_averaging, bmuf, bmuf --nesterov, "
    "slowmo --slow-momentum 0.7, diloco' --task fashion_mnist --workers 8 --period 12 "
    "--steps 1440 --eval-every 240 --tune lr=0.000125:0.032:log:9"
}
# Columns of a table that cannot be computed from the records.
UNCOMPUTED_COLUMNS = ("steps_to_target", "syncs", "command")


def read_run_sets(
    config: StudyConfig, final_lines: Lines, curve_lines: Lines
) -> Iterator[RunSet]:
    """Yields the runs of a study that its records have."""
    for number, variant in enumerate(config.variants, 1):
        variant_lines = [x for x in final_lines if x["label"] == variant.label]
        for point, common in config.points[variant.label].items():
            seeds = range(config.seeds)
            run_set = RunSet(variant, number, point, common, config.folder, seeds)
            trials = []
            for values in _tried_values(run_set, variant_lines):
                tried = make_trial(config, run_set, values)
                tried_lines = _final_lines(tried, variant_lines, reported=False)
                summaries = _read_summaries(tried, tried_lines)
                # Trials near the best have more seeds than others.
                tried_seeds = range(min(summaries), max(summaries) + 1)
                trials.append(tried._replace(seeds=tried_seeds, summaries=summaries))
            reported_lines = _final_lines(run_set, variant_lines, reported=True)
            summaries = _read_summaries(run_set, reported_lines)
            yield run_set._replace(
                trials=trials,
                values=_reported_values(run_set, reported_lines),
                config={"settings": {"steps": common.steps, "sync_until": 0}},
                summaries=summaries,
                lines={
                    seed: _curve_lines(run_set, curve_lines, seed) for seed in summaries
                },
            )


def _tried_values(run_set: RunSet, lines: Lines) -> list[dict[str, str]]:
    """Returns the values that were tried, in the order of the records."""
    flags = [tuned.flag for tuned in run_set.variant.tuned]
    sweep = _sweep_value(run_set).items()
    values: list[dict[str, str]] = []
    for line in lines:
        if line["reported"] or not sweep <= line.items():
            continue
        line_values = {flag: str(line[flag]) for flag in flags}
        if line_values not in values:
            values.append(line_values)
    return values


def _final_lines(run_set: RunSet, lines: Lines, reported: bool) -> Lines:
    """Returns the final lines of a run set."""
    fields = {flag: literal(value) for flag, value in run_set.values.items()}
    fields |= _sweep_value(run_set)
    own_lines = []
    for line in lines:
        if line["reported"] == reported and fields.items() <= line.items():
            own_lines.append(line)
    return own_lines


def _read_summaries(run_set: RunSet, lines: Lines) -> dict[int, Summary]:
    """Returns the summaries that final lines record, by seed."""
    workers = run_set.common.workers
    return {
        line["seed"]: Summary.from_json({**line, "syncs": None, "workers": workers})
        for line in lines
    }


def _reported_values(run_set: RunSet, lines: Lines) -> dict[str, str]:
    """Returns the tuned values of the reported runs."""
    flags = [tuned.flag for tuned in run_set.variant.tuned]
    if not lines:
        return {}
    return {flag: str(lines[0][flag]) for flag in flags}


def _curve_lines(run_set: RunSet, lines: Lines, seed: int) -> Lines:
    """Returns the lines of a run, without the fields that identify it."""
    variant = run_set.variant
    names = {"label": variant.label, "algo": variant.algo, "seed": seed}
    names |= _sweep_value(run_set)
    run_lines = []
    for line in lines:
        if names.items() <= line.items():
            run_lines.append({key: line[key] for key in line if key not in names})
    return run_lines


def _sweep_value(run_set: RunSet) -> dict[str, Any]:
    """Returns the value of the sweep by its flag; {} without a sweep."""
    flag, _, value = run_set.point.partition("=")
    return {flag: literal(value)} if flag else {}


def make_report(config: StudyConfig, final_lines: Lines, curve_lines: Lines) -> Report:
    """Returns the report of a study, except for parts that its records lack."""
    run_sets = [
        run_set
        for run_set in read_run_sets(config, final_lines, curve_lines)
        if run_set.summaries
    ]
    measure = find_measure(config.measure, run_sets)
    scores = []
    for run_set in run_sets:
        scores += compute_tunings(run_set, measure)
    rows = []
    for run_set in run_sets:
        rows.append(make_row(run_set, measure, scores))
    has_baseline = config.baseline is not None
    rows, sentences = compare_rows(
        rows,
        config.baseline_label,
        measure,
        names_winner=True,
        has_baseline=has_baseline,
    )
    curves = [_curve(config, run_set) for run_set in run_sets]
    rows = [
        add_times(row, curve, measure, config.target)
        for row, curve in zip(rows, curves, strict=True)
    ]
    labels = [variant.label for variant in config.variants]
    return Report(
        title=make_title(labels, config.task),
        sentences=sentences,
        measure=measure,
        baseline=config.baseline_label,
        rows=rows,
        curves=curves,
        networks=list(config.networks),
        target=config.target,
        sweep=config.swept.flag if config.swept else "",
        tuning=scores,
    )


def _curve(config: StudyConfig, run_set: RunSet) -> Curve:
    """Returns the curve of a run set; an empty one if there is no record of it."""
    if any(run_set.lines.values()):
        return make_curve(
            run_set, config.step_time or 0.0, config.networks, config.fused
        )
    return Curve(run_set.variant.label, run_set.point, [], {}, None, {})


def update_table(report: Report, old_rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with a report's figures; other columns keep their old values.

    Columns of modelled times are left out if the report has none.
    """
    new_rows = {
        (row.label, row.point): page.csv_row(report, row) for row in report.rows
    }
    with io.StringIO(newline="") as file:
        has_times = any(row.seconds for row in report.rows)
        columns = [
            column
            for column in old_rows[0]
            if has_times or not column.startswith("seconds")
        ]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for old_row in old_rows:
            value = old_row.get(report.sweep) if report.sweep else None
            point = f"{report.sweep}={value}" if value else ""
            new_row = new_rows[old_row["algorithm"], point]
            cells = {}
            for column in columns:
                if column in UNCOMPUTED_COLUMNS:
                    cells[column] = old_row[column]
                else:
                    cells[column] = page.no_formula(new_row.get(column))
            writer.writerow(cells)
        return file.getvalue()


def rewrite(folder: Path) -> list[Path]:
    """Writes the tables and figures of a study again; returns their files."""
    written: list[Path] = []
    for record in sorted(folder.glob("finals*.jsonl")):
        suffix = record.stem.removeprefix("finals")
        names = (folder.name + suffix, folder.name)
        preset = next((name for name in names if name in presets.NAMES), "")
        flags = FLAGS.get(folder.name, f"--preset {preset}")
        config = configs.read_command_line(shlex.split(flags))
        curve_path = folder / "curves.jsonl"
        curve_lines = evaluations(curve_path) if curve_path.exists() else []
        report = make_report(config, _read_finals(record), curve_lines)
        if folder.name in JOINED:
            written += _write_atlas(folder, report)
        path = folder / f"table{suffix}.csv"
        if path.exists():
            text = io.StringIO(path.read_text("utf-8"), newline="")
            files.write(path, update_table(report, list(csv.DictReader(text))))
            written.append(path)
        written += _redraw_figures(report, folder, suffix)
    return written


def _read_finals(path: Path) -> Lines:
    """Returns the lines of a record, with what they leave out as in the line before."""
    lines: Lines = []
    repeated_fields: dict[str, Any] = {}
    for text in path.read_text("utf-8").splitlines():
        line = repeated_fields | json.loads(text)
        lines.append(line)
        repeated_fields = {key: line[key] for key in line if key in REPEATED}
    return lines


def _write_atlas(folder: Path, report: Report) -> list[Path]:
    """Writes the tables that the page of the atlas includes; returns their files."""
    verdicts = folder / "verdicts.csv"
    files.write(verdicts, atlas.format_csv(atlas.best_table(report)))
    if not all(curve.seconds for curve in report.curves):
        return [verdicts]
    equal_time = folder / "equal-time.csv"
    files.write(equal_time, atlas.format_csv(atlas.equal_time_table(report)))
    return [verdicts, equal_time]


def _redraw_figures(report: Report, folder: Path, suffix: str) -> list[Path]:
    """Writes the existing figures of a study again; returns their files."""
    from experiments.study import figures

    look = styles({row.label: row.algo for row in report.rows})
    written = []
    with figures.style():
        for plot in figures.plots(report):
            path = folder / f"{plot.name}{suffix}.svg"
            if path.exists():
                files.write(path, figures.svg(plot, figures.draw(plot, look)))
                written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables and figures, and prints their names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*")
    folders = parser.parse_args(argv).folders
    written = []
    for folder in folders or sorted(FOLDER.iterdir()):
        written += rewrite(folder)
    for path in written:
        print(path)
    if not folders:
        print(headline.write_headline(FOLDER / JOINED[0]))


if __name__ == "__main__":
    main()
