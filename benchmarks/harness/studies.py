"""Makes the tables and figures of studies again from their records, without training.

    python -m benchmarks.harness.studies

makes all of docs/studies, or the folders given as arguments. For each folder it reads
finals.jsonl, curves.jsonl if it exists (benchmarks.harness.curves), and the preset with
the folder's name. It writes table.csv and the existing figures again. Values that the
records lack do not change, such as modelled times of records without messages. Records
made with other flags have a suffix, such as finals-2500.jsonl, and so do their table
and figures. The page of the atlas has tables of three studies.
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
from experiments.study.analysis import against_baseline, curve_of, row_of
from experiments.study.config import StudyConfig
from experiments.study.figures import styles
from experiments.study.results import Curve, Report
from experiments.study.runs import Lines, RunSet, trial, tuning_of
from experiments.study.sentences import titled
from experiments.study.statistics import measure
from experiments.study.study import SAME

FOLDER = Path("docs/studies")
JOINED = "atlas-mnist1d", "atlas-spoken-digits", "atlas-gpt"
# The flags of studies without a preset.
FLAGS = {
    "fashion-mnist": "--algos 'sync_sgd, model_averaging, bmuf, bmuf --nesterov, "
    "slowmo --slow-momentum 0.7, diloco' --task fashion_mnist --workers 8 --period 12 "
    "--steps 1440 --eval-every 240 --tune lr=0.000125:0.032:log:9"
}
# Columns of a table that cannot be computed from the records.
KEPT = "seconds", "steps_to_target", "syncs", "command"


def runs_of(config: StudyConfig, lines: Lines, measured: Lines) -> Iterator[RunSet]:
    """Yields the runs of a study that its records have."""
    for number, variant in enumerate(config.variants, 1):
        own = [line for line in lines if line["label"] == variant.label]
        for point, common in config.points[variant.label].items():
            seeds = range(config.seeds)
            made = RunSet(variant, number, point, common, config.folder, seeds)
            trials = [trial(config, made, x) for x in _tried(made, own)]
            done = _ended(made, own, reported=True)
            yield made._replace(
                trials=[
                    x._replace(summaries=_ended(x, own, reported=False)) for x in trials
                ],
                config={"settings": {"steps": common.steps, "sync_until": 0}},
                summaries=done,
                lines={seed: _measured(made, measured, seed) for seed in done},
            )


def _tried(made: RunSet, lines: Lines) -> list[dict[str, str]]:
    """Returns the values that were tried, in the order of the records."""
    flags = [x.flag for x in made.variant.tuned]
    swept = _swept(made).items()
    own = (x for x in lines if not x["reported"] and swept <= x.items())
    found = dict.fromkeys(tuple(str(line[flag]) for flag in flags) for line in own)
    return [dict(zip(flags, values, strict=True)) for values in found]


def _ended(made: RunSet, lines: Lines, reported: bool) -> dict[int, dict[str, Any]]:
    """Returns the final lines of a run set, by seed."""
    wanted = {k: literal(x) for k, x in made.values.items()} | _swept(made)
    own = {"syncs": None, "workers": made.common.workers}
    return {
        line["seed"]: {"sends": None, **line, **own}
        for line in lines
        if line["reported"] == reported and wanted.items() <= line.items()
    }


def _measured(made: RunSet, lines: Lines, seed: int) -> Lines:
    """Returns the lines of a run, without the fields that identify it."""
    names = {"label": made.variant.label, "algo": made.variant.algo, "seed": seed}
    names |= _swept(made)
    own = [line for line in lines if names.items() <= line.items()]
    return [{k: x for k, x in line.items() if k not in names} for line in own]


def _swept(made: RunSet) -> dict[str, Any]:
    """Returns the value of the sweep by its flag; {} without a sweep."""
    flag, _, value = made.point.partition("=")
    return {flag: literal(value)} if flag else {}


def report_of(config: StudyConfig, lines: Lines, measured: Lines) -> Report:
    """Returns the report of a study, except for parts that its records lack."""
    runs = [made for made in runs_of(config, lines, measured) if made.summaries]
    by = measure(config.measure, [s for r in runs for s in r.summaries.values()])
    scores = [one for made in runs for one in tuning_of(made, by)]
    rows = [row_of(made._replace(values=_chosen(made)), by, scores) for made in runs]
    is_given = config.baseline is not None
    rows, sentences = against_baseline(rows, config.compared_to, by, True, is_given)
    return Report(
        title=titled([x.label for x in config.variants], config.task),
        sentences=sentences,
        measure=by,
        baseline=config.compared_to,
        rows=rows,
        curves=[_curve(config, made) for made in runs],
        sweep=config.swept.flag if config.swept else "",
        tuning=scores,
    )


def _chosen(made: RunSet) -> dict[str, str]:
    """Returns the tuned values of the reported runs."""
    return {x.flag: str(made.any[x.flag]) for x in made.variant.tuned}


def _curve(config: StudyConfig, made: RunSet) -> Curve:
    """Returns the curve of a run set; an empty one if there is no record of it."""
    if any(made.lines.values()):
        return curve_of(made, config.step_time or 0.0, config.networks, config.fused)
    return Curve(made.variant.label, made.point, [], {}, None, {})


def table(report: Report, old: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with a report's figures; other columns keep their old values."""
    new = {(row.label, row.point): page.csv_row(report, row) for row in report.rows}
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, [*old[0]], lineterminator="\n")
        writer.writeheader()
        for line in old:
            value = line.get(report.sweep) if report.sweep else None
            point = f"{report.sweep}={value}" if value else ""
            found = new[line["algorithm"], point]
            known = {k: page.no_formula(found.get(k)) for k in line}
            left = {k: x for k, x in line.items() if k.startswith(KEPT)}
            writer.writerow({**known, **left})
        return file.getvalue()


def again(folder: Path) -> list[Path]:
    """Writes the tables and figures of a study again; returns their files."""
    written: list[Path] = []
    for record in sorted(folder.glob("finals*.jsonl")):
        suffix = record.stem.removeprefix("finals")
        names = folder.name + suffix, folder.name
        name = next((x for x in names if x in presets.NAMES), "")
        config = configs.read(shlex.split(FLAGS.get(folder.name, f"--preset {name}")))
        measured = folder / "curves.jsonl"
        curves = evaluations(measured) if measured.exists() else []
        report = report_of(config, _lines_of(record), curves)
        if folder.name in JOINED:
            written += _in_page(folder, report)
        path = folder / f"table{suffix}.csv"
        if path.exists():
            old = list(csv.DictReader(io.StringIO(path.read_text("utf-8"), newline="")))
            files.write(path, table(report, old))
            written.append(path)
        written += _drawn_again(report, folder, suffix)
    return written


def _lines_of(path: Path) -> Lines:
    """Returns the lines of a record, with what they leave out as in the line before."""
    found: Lines = []
    for line in path.read_text("utf-8").splitlines():
        before = {k: x for k, x in found[-1].items() if k in SAME} if found else {}
        found.append(before | json.loads(line))
    return found


def _in_page(folder: Path, report: Report) -> list[Path]:
    """Writes a study's table between the atlas's mark for it, and its equal times.

    Returns:
        The files with a table.
    """
    page = folder.with_name("atlas.md")
    if not atlas.written(page, folder.name, atlas.best(report)):
        return []
    if not all(curve.seconds for curve in report.curves):
        return [page]
    equal_time = folder / "equal-time.txt"
    files.write(equal_time, "\n".join(atlas.after(report)) + "\n")
    return [page, equal_time]


def _drawn_again(report: Report, folder: Path, suffix: str) -> list[Path]:
    """Writes the existing figures of a study again; returns their files."""
    from experiments.study import figures

    look = styles({row.label: row.algo for row in report.rows})
    each = {folder / f"{x.name}{suffix}.svg": x for x in figures.plots(report)}
    there = {path: plot for path, plot in each.items() if path.exists()}
    with figures.style():
        for path, plot in there.items():
            files.write(path, figures.svg(plot, figures.draw(plot, look)))
    return [*there]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables and figures, and prints their names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*")
    folders = parser.parse_args(argv).folders
    made = [x for folder in folders or sorted(FOLDER.iterdir()) for x in again(folder)]
    for path in dict.fromkeys(made):  # a page has tables of several studies
        print(path)
    if not folders:
        print(headline.write(FOLDER / JOINED[0]))


if __name__ == "__main__":
    main()
