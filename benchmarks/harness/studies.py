"""Makes the tables and figures of studies again from their records, without training.

    python -m benchmarks.harness.studies docs/studies/*/

reads finals.jsonl of each folder, and the preset of the folder's name. It writes the
table.csv and the figures that are there again. What finals.jsonl does not have, such as
curves and modelled times, stays as it is. Records of other flags have a suffix, such as
finals-2500.jsonl, and so have their table and figures.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli.words import literal
from experiments.study import config as configs
from experiments.study import presets, tuning
from experiments.study.analysis.analysis import row_of
from experiments.study.analysis.comparison import against_baseline
from experiments.study.analysis.results import Curve, Report
from experiments.study.analysis.words.answer import titled
from experiments.study.config import StudyConfig
from experiments.study.grid import Lines, RunSet, trial
from experiments.study.report import tables
from experiments.study.search_space import combinations
from experiments.study.statistics import measure
from experiments.training import records

# Columns of a table that need more than finals.jsonl.
KEPT = "seconds", "steps_to_target", "syncs", "command"


def runs_of(config: StudyConfig, lines: Lines) -> Iterator[RunSet]:
    """Yields the runs of a study, as far as its records have them."""
    for number, variant in enumerate(config.variants, 1):
        own = [line for line in lines if line["label"] == variant.label]
        for point, common in config.points[variant.label].items():
            seeds = range(config.seeds)
            made = RunSet(variant, number, point, common, config.folder, seeds)
            trials = [trial(config, made, x) for x in combinations(variant.budget)]
            done = _ended(made, own, reported=True)
            yield made._replace(
                trials=[
                    x._replace(summaries=_ended(x, own, reported=False)) for x in trials
                ],
                config={"settings": {"steps": common.steps}},
                summaries=done,
            )


def _ended(made: RunSet, lines: Lines, reported: bool) -> dict[int, dict[str, Any]]:
    """Returns the lines of some runs by seed."""
    flag, _, value = made.point.partition("=")
    wanted = {k: literal(x) for k, x in made.values.items()}
    wanted |= {flag: literal(value)} if flag else {}
    return {
        line["seed"]: {**line, "syncs": None}
        for line in lines
        if line["reported"] == reported and wanted.items() <= line.items()
    }


def report_of(config: StudyConfig, lines: Lines) -> Report:
    """Returns the report of a study, but for what needs more than its last figures."""
    runs = [made for made in runs_of(config, lines) if made.summaries]
    by = measure(config.measure, [s for r in runs for s in r.summaries.values()])
    baseline = config.baseline or config.variants[0].label
    scores = [one for made in runs for one in tuning.report(made, by)]
    chosen: dict[tuple[str, str], dict[str, float]] = {}
    for one in scores:
        chosen.setdefault((one.label, one.point), {})[one.flag] = one.chosen
    rows = [row_of(made, by, scores) for made in runs]
    rows = [x._replace(tuned=chosen.get((x.label, x.point), {})) for x in rows]
    is_given = config.baseline is not None
    rows, sentences = against_baseline(rows, baseline, by, True, is_given)
    return Report(
        title=titled([x.label for x in config.variants], config.task),
        lead="",
        numbers=[],
        headline="",
        sentences=sentences,
        remarks=[],
        terms="",
        measure=by,
        baseline=baseline,
        target=None,
        rows=rows,
        curves=[Curve(row.label, row.point, [], {}, None, {}) for row in rows],
        networks=[],
        step_seconds=(0.0, ""),
        sweep=config.swept.flag if config.swept else "",
        tuning=scores,
        settings={},
        environment={},
        command="",
        paper=None,
    )


def table(report: Report, old: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with the figures of a report, and its old values elsewhere."""
    new = {(row.label, row.point): tables.csv_row(report, row) for row in report.rows}
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, [*old[0]], lineterminator="\n")
        writer.writeheader()
        for line in old:
            value = line.get(report.sweep) if report.sweep else None
            point = f"{report.sweep}={value}" if value else ""
            found = new[line["algorithm"], point]
            left = {k: x for k, x in line.items() if k.startswith(KEPT)}
            known = {k: tables.no_formula(found.get(k)) for k in line}
            writer.writerow({**known, **left})
        return file.getvalue()


def again(folder: Path) -> list[Path]:
    """Writes the tables and figures of a study again; returns their files."""
    written: list[Path] = []
    for record in sorted(folder.glob("finals*.jsonl")):
        suffix = record.stem.removeprefix("finals")
        name = next(
            x for x in (folder.name + suffix, folder.name) if x in presets.NAMES
        )
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        report = report_of(configs.read(["--preset", name]), lines)
        path = folder / f"table{suffix}.csv"
        if path.exists():
            old = list(csv.DictReader(io.StringIO(path.read_text("utf-8"), newline="")))
            records.write(path, table(report, old))
            written.append(path)
        written += _drawn_again(report, folder, suffix)
    return written


def _drawn_again(report: Report, folder: Path, suffix: str) -> list[Path]:
    """Writes the figures of a study that are there again; returns their files."""
    from experiments.study.report import figures

    with figures.style():
        each = {folder / f"{x.name}{suffix}.svg": x for x in figures.plots(report)}
        there = {path: plot for path, plot in each.items() if path.exists()}
        for path, plot in there.items():
            records.write(path, figures.pictures(plot, plot.draw())[0])
    return [*there]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables and figures, and says which."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args(argv).folders:
        if folder.name in presets.NAMES:
            print("\n".join(map(str, again(folder))))


if __name__ == "__main__":
    main()
