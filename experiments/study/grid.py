"""The runs of a study: their configs, their files, and the content of the files."""

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.cli.factories import TASK
from experiments.cli.flags import PROGRAM, words_of
from experiments.cli.words import as_words
from experiments.study.config import TUNE_SHARE, StudyConfig
from experiments.study.network import HOPS
from experiments.study.search_space import combinations, named
from experiments.study.spec import Variant
from experiments.study.statistics import Measure, is_fine
from experiments.tasks.task import Data
from experiments.training import run_folder
from experiments.training.config import RunConfig, Settings, parse
from experiments.training.files import Damaged
from experiments.training.measurements.sends import Sends, from_json
from experiments.training.plan import Plan, Programs
from experiments.training.prepare import checked

# Seeds of trials must differ from those that are reported.
FIRST_TUNING_SEED = 1000

# Fields scaled from the first point of a sweep, so that all see as many samples.
FOLLOWING = "batch_size", "steps", "lr"

Lines = list[dict[str, Any]]


class RunSet(NamedTuple):
    """The runs of one variant at one point, which differ only in their seeds.

    Attributes:
        variant: the variant.
        number: its place in --algos, from 1.
        point: value of the sweep, such as "workers=4"; "" without a sweep.
        common: the config that all runs share, except for the seed.
        out: the study's folder.
        seeds: seeds of the runs.
        values: the values by flag that the runs try, or that were chosen for them.
        trials: run sets that try values for this one.
        config: content of the first run's config.json, once read.
        summaries: contents of summary.json by seed, once read.
        lines: lines of metrics.jsonl by seed, once read.
    """

    variant: Variant
    number: int
    point: str
    common: RunConfig
    out: Path
    seeds: range
    values: Mapping[str, str] = {}
    trials: Sequence["RunSet"] = ()
    config: Mapping[str, Any] = {}
    summaries: Mapping[int, dict[str, Any]] = {}
    lines: Mapping[int, Lines] = {}

    @property
    def name(self) -> str:
        """The variant, and the value of the sweep if there is one."""
        return " at ".join(x for x in (self.variant.label, self.point) if x)

    @property
    def trial(self) -> str:
        """The values, such as "lr=0.1"; "" without any."""
        return named(self.values)

    @property
    def folder(self) -> Path:
        """The folder that holds a folder for each seed."""
        # The number distinguishes labels with the same letters, such as a+b and a-b.
        label = re.sub("[^A-Za-z0-9]+", "-", self.variant.label).strip("-")
        kind = "tuning" if self.is_trial else "runs"
        own = Path(kind) / f"{self.number:02d}-{label}" / (self.point or "runs")
        return self.out / own / self.trial

    @property
    def is_trial(self) -> bool:
        """Whether the runs try values, on held-out training data."""
        return self.common.validation is not None

    @property
    def argv(self) -> list[str]:
        """The flags of experiments.run, without --seed."""
        return words_of(self.common)

    def config_of(self, seed: int) -> RunConfig:
        """Returns the config of one run."""
        return replace(self.common, seed=seed)

    @property
    def command(self) -> str:
        """The command that makes these runs, without --seed."""
        return shlex.join([*PROGRAM.split(), *self.argv])

    def run(self, seed: int) -> Path:
        """Returns the folder of one run."""
        return self.folder / f"seed-{seed}"

    def missing(self) -> list[int]:
        """Returns the seeds of missing runs."""
        return [seed for seed in self.seeds if not is_done(self.run(seed))]

    def read(self) -> "RunSet":
        """Returns the run set with the content of the files that exist."""
        found = {s: x for s in self.seeds if (x := _sound(self.run(s))) is not None}
        return self._replace(
            trials=[trial.read() for trial in self.trials],
            config=next((x.config for x in found.values()), {}),
            summaries={seed: x.summary for seed, x in found.items()},
            lines={seed: x.lines for seed, x in found.items()},
        )

    @property
    def fine(self) -> dict[int, dict[str, Any]]:
        """The summaries of runs that did not diverge."""
        return {s: x for s, x in self.summaries.items() if is_fine(x)}

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return len(self.summaries) - len(self.fine)

    @property
    def any(self) -> dict[str, Any]:
        """One summary, for the values that all runs share."""
        return next(iter((self.fine or self.summaries).values()))

    def final(self, by: Measure) -> dict[int, float]:
        """Returns the measure at the end by seed, of runs that did not diverge."""
        return {seed: s[by.key] for seed, s in self.fine.items()}

    @property
    def sends(self) -> list[Sends] | None:
        """The sends of a whole run: one if all seeds agree, otherwise one per seed."""
        found = [s["sends"] for s in (self.fine or self.summaries).values()]
        if any(x is None for x in found):
            return None
        # If the data decide when to sync, each seed sends at other steps.
        alike = all(x == found[0] for x in found)
        return [from_json(x) for x in (found[:1] if alike else found)]

    @property
    def bytes_per_worker(self) -> float | None:
        """The mean bytes over runs that did not diverge; None if one is not counted."""
        found = [s["bytes_per_worker"] for s in self.fine.values()]
        if not found or any(x is None for x in found):
            return None
        # Exact if all are identical; the faster fmean may round.
        return statistics.mean(found)


def is_done(run: Path) -> bool:
    """Whether a run is complete and none of its files is damaged."""
    return _sound(run) is not None


def damage(run: Path) -> str:
    """Returns the damaged file of a run, and how it is damaged; "" if none is."""
    try:
        _read(run)
    except Damaged as error:
        return str(error)
    return ""


def _sound(run: Path) -> run_folder.Made | None:
    """Returns a run's files; None if the run is incomplete or a file is damaged."""
    # An OSError is not caught: it says nothing about the content of a file.
    with suppress(Damaged):
        return _read(run)


def _read(run: Path) -> run_folder.Made | None:
    """Returns a run's files; None if the run is incomplete."""
    found, path = run_folder.read_run(run), run / "summary.json"
    if found is None:
        return None
    seed = found.summary.get("seed")
    if seed is not None and run.name != f"seed-{seed}":
        raise Damaged(path, f"it belongs to seed {seed}")
    sent = found.summary["sends"] or {"kinds": []}
    if unknown := {name for kind in sent["kinds"] for name in kind} - HOPS.keys():
        raise Damaged(path, f"'sends' has no collective {min(unknown)!r}")
    return found


class Loader:
    """Makes the plans of runs, and loads the data that they share only once."""

    def __init__(self):
        self._data: dict[Any, Data] = {}

    def plan(
        self, config: RunConfig, programs: Programs | None = None
    ) -> tuple[Plan, Data]:
        """Returns the plan and the data of a run.

        Args:
            config: the config of the run.
            programs: those of an earlier run, which are shared if possible.

        Raises:
            BadRequest: the config is not possible.
        """
        # Some tasks make their data from the seed or for the workers.
        offered = {"seed": config.seed, "workers": config.workers}
        factory = factories.named(TASK, config.task)
        own = factories.passed_arguments(TASK, factory, offered)
        arguments = repr({**config.task_arguments, **own})
        key = config.task, arguments, config.data_dir, config.validation
        given = config, self._data.get(key)
        plan, self._data[key] = checked(*given, programs=programs)
        return plan, self._data[key]


def run_sets(study: StudyConfig, loader: Loader) -> list[RunSet]:
    """Returns every variant at every value of the sweep, with its trials.

    At each value the runs train on as many samples as at the first. No tuned values are
    chosen yet, and nothing is written.

    Raises:
        BadRequest: the config of a run is not possible.
    """
    each = enumerate(study.variants, 1)
    return [r for number, x in each for r in _sets_of(study, loader, number, x)]


def _sets_of(
    study: StudyConfig, loader: Loader, number: int, variant: Variant
) -> Iterator[RunSet]:
    """Yields a variant at every value of the sweep, with its trials."""
    base = None
    for point, said in study.points[variant.label].items():
        common, base = _same_samples(study, said, loader, base)
        seeds = range(study.seeds)
        made = RunSet(variant, number, point, common, study.folder, seeds)
        # Impossible trials are refused before any run is made.
        for values in variant.decisive_trials():
            loader.plan(trial(study, made, values).config_of(FIRST_TUNING_SEED))
        values = combinations(variant.budget)
        yield made._replace(trials=[trial(study, made, each) for each in values])


def _same_samples(
    study: StudyConfig, run: RunConfig, loader: Loader, base: Settings | None
) -> tuple[RunConfig, Settings]:
    """Returns a run with batch, steps and rate scaled from the first point's.

    The rate grows with the batch only under --worker-batch, linearly: Goyal et al.,
    "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """
    if study.worker_batch is not None:
        run = _varied(run, batch_size=study.worker_batch * run.workers)
    s = loader.plan(run)[0].config
    if base is None or s.batch_size == base.batch_size:
        return run, base or s
    # If the steps differ already, they are swept.
    if s.steps == base.steps:
        steps = max(1, round(base.steps * base.batch_size / s.batch_size))
        run = _varied(run, steps=steps)
    if study.worker_batch is not None:
        rate = base.lr * s.batch_size / base.batch_size
        run = _varied(run, lr=float(f"{rate:.6g}"))
    # The new values may not fit the task: this raises an error.
    loader.plan(run)
    return run, base


def _varied(run: RunConfig, **values: Any) -> RunConfig:
    """Returns a config with other values; raises a BadRequest if they do not fit."""
    try:
        return replace(run, **values)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def trial(study: StudyConfig, made: RunSet, values: Mapping[str, str]) -> RunSet:
    """Returns the runs that try values, on held-out training data."""
    variant, whole = made.variant, made.common
    tried = parse([*variant.argv, *variant.points[made.point], *as_words(values)])
    follow = {name: getattr(whole, name) for name in FOLLOWING if name not in values}
    # The held-out part of the training data is the same for all seeds and variants.
    # The reported runs train on all of the training data.
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + study.tune_seeds)
    common = _varied(tried, **follow, validation=TUNE_SHARE)
    return made._replace(seeds=seeds, values=values, common=common)
