"""The runs of a study, as their files say."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli.words import literal
from experiments.study.analysis.results import Measure, is_fine
from experiments.study.grid import Cell, Point
from experiments.study.network import Sends, from_json
from experiments.training import records

Lines = list[dict[str, Any]]


class Runs(NamedTuple):
    """The runs of one algorithm at one value of the sweep, as their files say.

    Attributes:
        point: the algorithm.
        cell: where the files lie.
        config: of the first run.
        summaries: by seed.
        lines: of metrics.jsonl, by seed.
    """

    point: Point
    cell: Cell
    config: dict[str, Any]
    summaries: dict[int, dict[str, Any]]
    lines: dict[int, Lines]

    @property
    def fine(self) -> dict[int, dict[str, Any]]:
        """The summaries of runs that did not diverge."""
        return {s: x for s, x in self.summaries.items() if is_fine(x)}

    @property
    def diverged(self) -> int:
        """How many runs diverged."""
        return len(self.summaries) - len(self.fine)

    def final(self, by: Measure) -> dict[int, float]:
        """The measure at the end, by seed, of runs that did not diverge."""
        return {seed: s[by.key] for seed, s in self.fine.items()}

    @property
    def name(self) -> str:
        """The algorithm, and the value of the sweep if there is one."""
        return " at ".join(x for x in (self.cell.label, self.cell.point) if x)

    @property
    def any(self) -> dict[str, Any]:
        """A summary, for what all runs share."""
        return next(iter((self.fine or self.summaries).values()))

    @property
    def sends(self) -> list[Sends] | None:
        """What each worker would send in a whole run.

        Once where all seeds send alike, else of each: data may decide on it.
        """
        found = [s["sends"] for s in (self.fine or self.summaries).values()]
        if any(x is None for x in found):
            return None
        alike = all(x == found[0] for x in found)
        return [from_json(x) for x in (found[:1] if alike else found)]

    @property
    def bytes_per_worker(self) -> float | None:
        """The mean over the runs that did not diverge; None where one does not know."""
        found = [s["bytes_per_worker"] for s in self.fine.values()]
        if not found or any(x is None for x in found):
            return None
        return found[0] if len(set(found)) == 1 else statistics.fmean(found)


def read(point: Point, cell: Cell) -> Runs:
    """Reads the files of runs that are all done."""
    first = records.read_json(cell.run(cell.seeds[0]) / "config.json")
    summaries = dict(zip(cell.seeds, cell.summaries(), strict=True))
    return Runs(point, cell, first, summaries, {s: cell.lines(s) for s in cell.seeds})


def named_lines(runs: list[Runs], out: Path) -> Iterator[tuple[str, Lines]]:
    """Each run's name, which is its folder's in the study, and its lines."""
    for r in runs:
        for seed, lines in r.lines.items():
            yield str(r.cell.run(seed).relative_to(out / "runs")), lines


def study_lines(runs: list[Runs]) -> Iterator[dict[str, Any]]:
    """Every line of every run, with what it is of, for a table."""
    for r in runs:
        flag, _, value = r.cell.point.partition("=")
        about = {"label": r.cell.label, "algo": r.point.entry.algo}
        about |= {flag: literal(value)} if flag else {}
        for seed, lines in r.lines.items():
            for line in lines:
                yield {**about, "seed": seed, **line}
