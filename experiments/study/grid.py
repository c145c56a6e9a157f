"""The runs of a study: which they are, and where their files lie."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli import factories, flags
from experiments.cli.factories import TASK
from experiments.study.entries import Entry
from experiments.study.search_space import as_words
from experiments.study.spec import SCALES, Spec
from experiments.tasks.task import Data
from experiments.training import records
from experiments.training.components import Components, make_components
from experiments.training.config import RunConfig, parse

FIRST_TUNING_SEED = 1000  # apart from the seeds that are reported


class Cell(NamedTuple):
    """Runs that differ in their seed alone.

    Attributes:
        label: of the algorithm.
        point: of the sweep, such as "workers=4"; "" where there is none.
        argv: flags of experiments.run, without --seed.
        folder: for a folder a seed.
        seeds: of the runs.
        trial: the values that it tries, such as "lr=0.1"; "" where it is reported.
    """

    label: str
    point: str
    argv: list[str]
    folder: Path
    seeds: range
    trial: str = ""

    @property
    def name(self) -> str:
        """All of it, for people."""
        return " ".join(x for x in (self.label, self.point, self.trial) if x)

    def run(self, seed: int) -> Path:
        """The folder of one run, which is there when the run is done."""
        return self.folder / f"seed-{seed}"

    def missing(self) -> list[int]:
        """The seeds whose runs are yet to be made."""
        return [seed for seed in self.seeds if not self.run(seed).exists()]

    def summaries(self) -> list[dict[str, Any]]:
        """What the runs' summaries say, of those that are done."""
        return [
            records.read_json(self.run(seed) / "summary.json")
            for seed in self.seeds
            if self.run(seed).exists()
        ]

    def lines(self, seed: int) -> list[dict[str, Any]]:
        """The lines of one run's metrics.jsonl."""
        text = (self.run(seed) / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def command(self) -> str:
        """What makes these runs, but for --seed."""
        return shlex.join([*flags.PROGRAM.split(), *self.argv])


class Point(NamedTuple):
    """An algorithm at one value of the sweep.

    Attributes:
        entry: the algorithm.
        number: of the algorithm in the study.
        name: such as "workers=4"; "" where nothing is swept.
        argv: flags of experiments.run, without --seed and what is tuned.
    """

    entry: Entry
    number: int
    name: str
    argv: list[str]

    def folder(self) -> Path:
        """Where its runs lie, below a study's folder."""
        return Path(slug(self.number, self.entry.label)) / (self.name or "runs")


class Loader:
    """Makes the components of runs, whose data is loaded once."""

    def __init__(self):
        self._data: dict[Any, Data] = {}

    def components(self, argv: Sequence[str], seed: int) -> Components:
        """Makes the components of a run of these flags.

        Raises:
            BadRequest: as `make_components`.
        """
        config = parse([*argv, "--seed", str(seed)])
        # Some tasks make data by them.
        offered = {"seed": config.seed, "workers": config.workers}
        factory = factories.named(TASK, config.task)
        own = factories.passed_arguments(TASK, factory, offered)
        arguments = repr({**config.task_arguments, **own})
        key = config.task, arguments, config.data_dir, config.validation
        parts = make_components(config, self._data.get(key))
        self._data[key] = parts.data
        return parts


def points(spec: Spec, loader: Loader) -> list[Point]:
    """Every algorithm at every value of the sweep, as many samples in all of them.

    Raises:
        BadRequest: flags that a run cannot have.
    """
    found = []
    for number, entry in enumerate(spec.entries, 1):
        argv, base = spec.argv(entry), None
        for value in spec.points(entry):
            swept, name = [], ""
            if value is not None and spec.sweep is not None:
                swept = as_words({spec.sweep.flag: value})
                name = f"{spec.sweep.flag}={value}"
            here, base = _same_samples(spec, [*argv, *swept], loader, base)
            found.append(Point(entry, number, name, here))
    return found


def _same_samples(
    spec: Spec, argv: list[str], loader: Loader, base: RunConfig | None
) -> tuple[list[str], RunConfig]:
    """Sets batch, steps and rate of a point by those of the first one (`base`)."""
    if spec.worker_batch is not None:
        batch = spec.worker_batch * parse(argv).workers
        argv = [*argv, "--batch-size", str(batch)]
    s = loader.components(argv, 0).config
    if base is None or s.batch_size == base.batch_size:
        return argv, s if base is None else base
    if s.steps == base.steps:  # else it is the steps that are swept
        steps = max(1, round(base.steps * base.batch_size / s.batch_size))
        argv = [*argv, "--steps", str(steps)]
    if SCALES[spec.scale_lr]:
        rate = base.lr * (s.batch_size / base.batch_size) ** SCALES[spec.scale_lr]
        argv = [*argv, "--lr", f"{rate:.6g}"]
    loader.components(argv, 0)
    return argv, base


def tuning_cells(spec: Spec, point: Point) -> Iterator[tuple[dict[str, str], Cell]]:
    """What is tried for a point, and the runs that try it."""
    for trial in spec.trials(point.entry)[1]:
        yield trial, tuning_cell(spec, point, trial)


def tuning_cell(spec: Spec, point: Point, trial: dict[str, str]) -> Cell:
    """The runs that try values for a point."""
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + spec.tune_seeds)
    words = [*as_words(trial), "--validation", f"{spec.share:g}"]
    name = _named(trial)
    folder = Path("tuning") / point.folder() / name
    argv = [*point.argv, *words]
    return Cell(point.entry.label, point.name, argv, folder, seeds, name)


def final_cell(point: Point, tuned: dict[str, str], seeds: range) -> Cell:
    """The runs that are reported."""
    argv = [*point.argv, *as_words(tuned)]
    folder = Path("runs") / point.folder() / _named(tuned)
    return Cell(point.entry.label, point.name, argv, folder, seeds)


def _named(values: dict[str, str]) -> str:
    """Values by flag as a folder's name; "" for none."""
    return ",".join(f"{flag}={value}" for flag, value in values.items())


def slug(number: int, label: str) -> str:
    """A folder's name for a label."""
    return f"{number:02d}-{re.sub('[^A-Za-z0-9]+', '-', label).strip('-')}"


def below(cell: Cell, out: Path) -> Cell:
    """The cell in a study's folder."""
    return cell._replace(folder=out / cell.folder)
