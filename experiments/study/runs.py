"""The runs of a study: their configs and files, and the choice of tuned values."""

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.command import factories
from experiments.command.errors import BadRequest
from experiments.command.factories import TASK
from experiments.command.flags import PROGRAM, config_words
from experiments.data.downloads import sha256
from experiments.files import Damaged
from experiments.study.config import FIRST_TUNING_SEED, TUNE_SHARE, StudyConfig
from experiments.study.statistics import LOSS, MIN_SEEDS, Measure, choose_measure
from experiments.study.variants import (
    Axis,
    Variant,
    at,
    combinations,
    format_values,
    name_at,
)
from experiments.tasks.task import Data
from experiments.training import run_folder
from experiments.training.config import RunConfig
from experiments.training.defaults import resolved
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.plan import Plan, Programs, declaring, make_task
from experiments.training.prepare import checked
from experiments.training.sends import from_json
from experiments.training.summary import Summary
from syncalgos.network import HOPS, Sends

RESAMPLES = 2000  # of the tuning seeds
MOST_LETTERS = 100  # of a label in the name of a folder, which may have 255 bytes
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
        summaries: the summaries by seed, once read.
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
    summaries: Mapping[int, Summary] = {}
    lines: Mapping[int, Lines] = {}

    @property
    def name(self) -> str:
        """The variant, and the value of the sweep if there is one."""
        return name_at(self.variant.label, self.point)

    @property
    def trial(self) -> str:
        """The values, such as "lr=0.1"; "" without any."""
        return format_values(self.values)

    @property
    def folder(self) -> Path:
        """The folder that holds a folder for each seed."""
        # The number distinguishes labels with the same letters, such as a+b and a-b.
        label = re.sub("[^A-Za-z0-9]+", "-", self.variant.label).strip("-")
        label = label[:MOST_LETTERS]
        kind = "tuning" if self.is_trial else "runs"
        own = Path(kind) / f"{self.number:02d}-{label}" / (self.point or "runs")
        return self.out / own / self.trial

    @property
    def is_trial(self) -> bool:
        """Whether the runs try values, on held-out training data."""
        return self.common.validation is not None

    def config_of(self, seed: int) -> RunConfig:
        """Returns the config of one run."""
        return replace(self.common, seed=seed)

    @property
    def command(self) -> str:
        """The command that makes these runs, without --seed."""
        return shlex.join(command_of(self.common))

    def run(self, seed: int) -> Path:
        """Returns the folder of one run."""
        return self.folder / f"seed-{seed}"

    def missing(self) -> list[int]:
        """Returns the seeds of missing runs."""
        return [seed for seed in self.seeds if not is_done(self.run(seed))]

    def read(self) -> "RunSet":
        """Returns the run set with the content of the files that exist."""
        config: Mapping[str, Any] = {}
        summaries: dict[int, Summary] = {}
        lines: dict[int, Lines] = {}
        for seed in self.seeds:
            run_files = _content(self.run(seed))[0]
            if run_files is None:
                continue
            config = config or run_files.config
            summaries[seed] = Summary.from_json(run_files.summary)
            lines[seed] = run_files.lines
        return self._replace(
            trials=[trial.read() for trial in self.trials],
            config=config,
            summaries=summaries,
            lines=lines,
        )

    @property
    def finite(self) -> dict[int, Summary]:
        """The summaries of runs that did not diverge, by seed."""
        return {
            seed: summary
            for seed, summary in self.summaries.items()
            if summary.is_finite
        }

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return len(self.summaries) - len(self.finite)

    @property
    def first_summary(self) -> Summary:
        """One summary, for the values that all runs share."""
        return next(iter((self.finite or self.summaries).values()))

    def final(self, by: Measure) -> dict[int, float]:
        """Returns the measure at the end by seed, of runs that have it."""
        values: dict[int, float] = {}
        for seed, summary in self.finite.items():
            value = summary.measures[by.key]
            if value is not None:
                values[seed] = value
        return values

    def lost(self, by: Measure) -> int:
        """Returns the number of runs that diverged, or whose measure is undefined."""
        return len(self.summaries) - len(self.final(by))

    @property
    def followed_flags(self) -> list[str]:
        """The tuned flags whose best value was followed beyond an end of its range."""
        flags = []
        for own in self.variant.tuned:
            if not own.near:
                continue
            tried = {float(x.values[own.flag]) for x in self.trials}
            # Values near the best one may lie beyond an end, too. What is followed
            # begins with the range's own step, and comes before those.
            steps = []
            for end in (own.values[0], own.values[-1]):
                steps += own.further_values(own.values, end, is_near=False)
            if tried & {*map(float, steps)}:
                flags.append(own.flag)
        return flags

    @property
    def sends(self) -> list[Sends] | None:
        """The sends of a whole run: one if all seeds agree, otherwise one per seed."""
        records: list[Mapping[str, Any]] = []
        for summary in (self.finite or self.summaries).values():
            if summary.sends is None:
                return None
            records.append(summary.sends)
        # If the data decide when to sync, each seed sends at other steps.
        if all(record == records[0] for record in records):
            records = records[:1]
        return [from_json(record) for record in records]

    @property
    def bytes_per_worker(self) -> float | None:
        """The mean bytes over runs that did not diverge; None if one is not counted."""
        counts: list[float] = []
        for summary in self.finite.values():
            if summary.bytes_per_worker is None:
                return None
            counts.append(summary.bytes_per_worker)
        # Exact if all are identical; the faster fmean may round.
        return statistics.mean(counts) if counts else None


def command_of(config: RunConfig) -> list[str]:
    """Returns the command of a run, without --seed."""
    return [*PROGRAM.split(), *config_words(config)]


def is_done(run: Path) -> bool:
    """Whether a run is complete and none of its files is damaged."""
    return _content(run)[0] is not None


def damage(run: Path) -> str:
    """Returns the damaged file of a run, and how it is damaged; "" if none is."""
    return _content(run)[1]


def _content(run: Path) -> tuple[run_folder.RunFiles | None, str]:
    """Returns the files of a complete run, and which one is damaged, and how."""
    # An OSError is not caught: it says nothing about the content of a file.
    try:
        found = run_folder.read_run(run)
        path = run / "summary.json"
        if found is None:
            return None, ""
        seed = found.summary.get("seed")
        sent = found.summary["sends"]
        if seed is not None and run.name != f"seed-{seed}":
            raise Damaged(path, f"it belongs to seed {seed}")
        kinds = {name for kind in (sent or {"kinds": []})["kinds"] for name in kind}
        unknown = kinds - HOPS.keys()
        if unknown:
            raise Damaged(path, f"'sends' has no collective {min(unknown)!r}")
    except Damaged as error:
        return None, str(error)
    return found, ""


class Loader:
    """Makes the plans of runs, and loads the data that they share only once."""

    def __init__(self):
        self._data: dict[Any, Data] = {}
        self._models: set[Path] = set()

    def plan(
        self,
        config: RunConfig,
        programs: Programs | None = None,
        objects: Objects = NO_OBJECTS,
    ) -> tuple[Plan, Data]:
        """Returns the plan and the data of a run.

        Args:
            config: the config of the run.
            programs: those of an earlier run, which are shared if possible.
            objects: what Python code passed in place of the config's names.

        Raises:
            BadRequest: the config is not possible.
        """
        # Some tasks make their data from the seed or for the workers.
        offered = {"seed": config.seed, "workers": config.workers}
        factory = objects.find_factory(TASK, config.task)
        own = factories.passed_arguments(TASK, factory, offered)
        arguments = repr({**config.task_arguments, **own})
        key = config.task, arguments, config.data_dir, config.validation
        if config.init_from is not None and config.init_from.is_file():
            self._models.add(config.init_from)
        plan, self._data[key] = checked(
            config, self._data.get(key), objects=objects, programs=programs
        )
        return plan, self._data[key]

    def checksums(self) -> list[str]:
        """Returns those of the user's files that were read."""
        read = {data.sha256 for data in self._data.values()} - {""}
        return sorted(read | {*map(sha256, self._models)})


def run_sets(study: StudyConfig, loader: Loader) -> list[RunSet]:
    """Returns every variant at every value of the sweep, with its trials.

    No tuned values are chosen yet, and nothing is written.

    Raises:
        BadRequest, ValueError: the config of a run is not possible.
    """
    found = []
    seeds = range(study.seeds)
    for number, variant in enumerate(study.variants, 1):
        objects = variant.objects
        points = study.points[variant.label]
        for point, common in _same_samples(study, points, objects):
            made = RunSet(variant, number, point, common, study.folder, seeds)
            # What is impossible is refused before any run is made.
            loader.plan(common, objects=objects)
            for values in variant.decisive_trials():
                first_config = trial(study, made, values).config_of(FIRST_TUNING_SEED)
                loader.plan(first_config, objects=objects)
            each = [trial(study, made, x) for x in combinations(variant.tuned)]
            found.append(made._replace(trials=each))
    return found


def _same_samples(
    study: StudyConfig, points: Mapping[str, RunConfig], objects: Objects
) -> Iterator[tuple[str, RunConfig]]:
    """Yields the runs at each point, on as many samples as at the first.

    The rate grows with the batch only under --worker-batch, linearly: Goyal et al.,
    "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """
    first = None
    for point, run in points.items():
        if study.worker_batch is not None:
            run = at(run, {"batch_size": study.worker_batch * run.workers})
        task = make_task(run, objects)
        own = resolved(run, task, declaring(run, task, objects))
        first = first or own
        # If the steps differ already, they are swept.
        is_other = own.batch_size != first.batch_size
        if is_other and own.steps == first.steps:
            steps = first.steps * first.batch_size / own.batch_size
            run = at(run, {"steps": max(1, round(steps))})
        if is_other and study.worker_batch is not None:
            rate = first.lr * own.batch_size / first.batch_size
            run = at(run, {"lr": float(f"{rate:.6g}")})
        yield point, run


def trial(study: StudyConfig, made: RunSet, values: Mapping[str, str]) -> RunSet:
    """Returns the runs that try values, on held-out training data."""
    # The held-out part of the training data is the same for all seeds and variants.
    # The reported runs train on all of the training data.
    held_out = at(made.common, {"validation": TUNE_SHARE})
    return made._replace(
        seeds=range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + study.tune_seeds),
        values=values,
        common=at(held_out, made.variant.read(values)),
    )


class Tuning(NamedTuple):
    """The scores of one variant over the values of one flag.

    Attributes:
        label: label of the variant.
        point: value of the sweep, as in a row.
        flag: the tuned flag, such as "lr".
        values: the values that were tried.
        scores: for each value, the mean measure on validation data of the best trial
            with this value; None where a run diverged, or has no measure.
        chosen: the best value.
        at_edge: whether the best value is at an end of the range, so that a value
            beyond it may be better.
        low: lower end of a 95 % interval of the best value; None for too few seeds.
        high: upper end of that interval.
        shortfalls: by how much the variant would be worse if other seeds had tuned it.
            For each resample of the tuning seeds, it is the score over all seeds of the
            trial that is best in the resample, minus the score of the chosen trial.
            Empty for too few seeds.
    """

    label: str
    point: str
    flag: str
    values: list[float]
    scores: list[float | None]
    chosen: float
    at_edge: bool
    low: float | None = None
    high: float | None = None
    shortfalls: Sequence[float] = ()


def further(study: StudyConfig, loader: Loader, made: RunSet) -> Iterator[list[RunSet]]:
    """Yields more trials of a run set, each time once all earlier ones have ended.

    All variants follow one rule: a best value at an end of a range is followed beyond
    it, with all values of the other flags, and then values near the best one are tried.
    See `Axis`. Of an axis with `near_seeds` the best one and those near it are then
    repeated with so many seeds, see `repeat_near`.
    """
    ranges = made.variant.tuned
    trials = [*made.trials]
    windows: dict[str, list[RunSet]] = {}  # the best and those near it, by flag
    near = [x for x in ranges if x.near]
    turns = all_turns = [(x, False) for x in near] + [(x, True) for x in near]
    while turns and (best := _best(trials, study.measure)):
        (own, is_near), *turns = turns
        tried = {
            x.flag: (*dict.fromkeys(t.values[x.flag] for t in trials),) for x in ranges
        }
        fixed = {k: (x,) for k, x in best.values.items()} if is_near else tried
        fixed |= {
            own.flag: own.further_values(
                tried[own.flag], best.values[own.flag], is_near=is_near
            )
        }
        grid = [x._replace(values=fixed[x.flag]) for x in ranges]
        found = []
        for values in combinations(grid):
            # Beyond the ends that the user gave, a value may be impossible.
            with suppress(BadRequest, ValueError):
                each = trial(study, made, values)
                loader.plan(
                    each.config_of(FIRST_TUNING_SEED), objects=made.variant.objects
                )
                found.append(each)
        trials += found
        if is_near:
            windows[own.flag] = [best, *found]
        yield found
        if found and not is_near:  # the best of another flag may lie at an end now
            turns = all_turns
    for axis in near:
        if axis.near_seeds and axis.flag in windows:
            window = windows[axis.flag]
            yield from repeat_near(study, loader, made, axis, window, trials)


def repeat_near(
    study: StudyConfig,
    loader: Loader,
    made: RunSet,
    axis: Axis,
    window: Sequence[RunSet],
    trials: Sequence[RunSet],
) -> Iterator[list[RunSet]]:
    """Yields further seeds of the trials near the best, and of values beyond these.

    As long as the best of the window, by all its seeds, lies at an end, the next value
    beyond it is tried, too, with all seeds: up to MOST_BEYOND values.

    Args:
        study, loader, made: as for `further`.
        axis: the axis along which the window's trials lie.
        window: the best trial and those near it.
        trials: all trials so far; of one that is there, only its further seeds are
            yielded.
    """
    last_seed = FIRST_TUNING_SEED + axis.near_seeds
    all_seeds = range(FIRST_TUNING_SEED, last_seed)
    more_seeds = range(FIRST_TUNING_SEED + study.tune_seeds, last_seed)
    known_values = [known.values for known in trials]
    yield [near_trial._replace(seeds=more_seeds) for near_trial in window]
    wide_window = [near_trial._replace(seeds=all_seeds) for near_trial in window]
    while best := _best(wide_window, study.measure):
        window_values = [near_trial.values[axis.flag] for near_trial in wide_window]
        value = axis.value_beyond(window_values, best.values[axis.flag])
        if value is None:
            return
        values = {**best.values, axis.flag: value}
        try:
            beyond = trial(study, made, values)
            first_config = beyond.config_of(FIRST_TUNING_SEED)
            loader.plan(first_config, objects=made.variant.objects)
        except (BadRequest, ValueError):
            return  # beyond the ends that the user gave, a value may be impossible
        is_known = values in known_values
        yield [beyond._replace(seeds=more_seeds if is_known else all_seeds)]
        wide_window.append(beyond._replace(seeds=all_seeds))


def join_trials(trials: Sequence[RunSet], more: Sequence[RunSet]) -> list[RunSet]:
    """Returns the trials with further ones; those of the same values become one.

    Args:
        trials: trials, each with other values.
        more: further trials; if one has the values of a trial, its seeds continue those
            of that trial.
    """
    by_values = {known.trial: known for known in trials}
    for further_trial in more:
        known = by_values.get(further_trial.trial)
        if known is None:
            by_values[further_trial.trial] = further_trial
        else:
            seeds = range(known.seeds.start, further_trial.seeds.stop)
            by_values[further_trial.trial] = known._replace(seeds=seeds)
    return [*by_values.values()]


def deciding_trials(trials: Sequence[RunSet]) -> list[RunSet]:
    """Returns the trials with the most seeds: these alone decide."""
    most_seeds = max((len(one.seeds) for one in trials), default=0)
    return [one for one in trials if len(one.seeds) == most_seeds]


def chosen(made: RunSet, measure_key: str | None) -> RunSet | None:
    """Returns the runs to report, with the best values of their trials.

    Args:
        made: the run set, whose trials have ended.
        measure_key: measure to choose by; None takes the accuracy if there is one.

    Returns:
        The run set; None if it has trials and all of them failed.

    Raises:
        ValueError: the trials lack this measure.
    """
    if not made.trials:
        return made
    best = _best(deciding_trials(made.trials), measure_key)
    if best is None:
        return None
    common = at(made.common, made.variant.read(best.values))
    return made._replace(values=best.values, common=common)


def _best(trials: Sequence[RunSet], measure_key: str | None) -> RunSet | None:
    """Returns the best of the trials that were made; None if there is none."""
    there = [x for trial in trials if (x := trial.read()).summaries]
    by = find_measure(measure_key, there)
    return max(there, key=partial(_rank, by=by), default=None)


def find_measure(key: str | None, runs: Sequence[RunSet]) -> Measure:
    """Returns the measure to compare runs by; see `statistics.choose_measure`."""
    run_measures: list[Mapping[str, float | None]] = []
    for run_set in runs:
        for summary in run_set.finite.values():
            run_measures.append(summary.measures)
    return choose_measure(key, run_measures)


def _rank(trial: RunSet, by: Measure) -> tuple[float, ...]:
    """Returns a rank that is higher for fewer lost runs, then a better measure."""
    if not trial.final(by):
        return (-trial.lost(by),)
    # The loss decides between equal accuracies, which are common on little data.
    return -trial.lost(by), by.side * _graded(_mean(trial, by), by), -_mean(trial, LOSS)


def _graded(scores: Any, by: Measure) -> Any:
    """Returns scores in which accuracies that differ by rounding alone are equal."""
    return np.round(scores, 6) if by.higher_is_better else scores


def _mean(trial: RunSet, by: Measure) -> float:
    values = trial.final(by).values()
    return sum(values) / len(values)


def tuning_of(tuned: RunSet, by: Measure) -> list[Tuning]:
    """Returns the scores of a variant, flag by flag."""
    trials = [x for x in tuned.trials if x.summaries]
    rank = partial(_rank, by=by)
    if not trials:
        return []
    deciding = deciding_trials(trials)
    best = max(deciding, key=rank)
    resampled = _best_of_resamples(deciding, by)
    # The same for all flags, and the same resamples for all variants.
    shortfalls = [_mean(x, by) - _mean(best, by) for x in resampled]
    found = []
    for flag, value in best.values.items():
        # The score of a value is that of its best trial over all other tuned flags, of
        # those with the most seeds.
        ranked = sorted(trials, key=lambda one: (len(one.seeds), *rank(one)))
        tops = {one.values[flag]: one for one in ranked}
        values = sorted(tops, key=float)
        window = sorted({x.values[flag] for x in deciding}, key=float)
        ends = {values[0], values[-1]}
        if len(window) > 1:
            ends |= {window[0], window[-1]}
        scores = [None if tops[x].lost(by) else _mean(tops[x], by) for x in values]
        # The middle 95 %, and the best value, which no resample may have chosen.
        picked = sorted(float(x.values[flag]) for x in resampled)
        cut = len(picked) * 25 // 1000
        likely = [*picked[cut : len(picked) - cut], float(value)] if picked else []
        found.append(
            Tuning(
                label=tuned.variant.label,
                point=tuned.point,
                flag=flag.replace("_", "-"),
                values=[float(x) for x in values],
                scores=scores,
                chosen=float(value),
                at_edge=len(values) > 1 and value in ends,
                low=min(likely, default=None),
                high=max(likely, default=None),
                shortfalls=shortfalls,
            )
        )
    return found


def _best_of_resamples(trials: Sequence[RunSet], by: Measure) -> list[RunSet]:
    """Returns the best trial of each resample of the seeds; none for too few seeds."""
    fine = [trial for trial in trials if not trial.lost(by)]
    seeds = sorted(set.intersection(*(set(x.final(by)) for x in fine))) if fine else []
    if len(seeds) < MIN_SEEDS:
        return []
    # Seeds are resampled for all trials together: they saw the same batches.
    scores = by.side * np.array([[x.final(by)[s] for s in seeds] for x in fine])
    losses = np.array([[x.final(LOSS)[s] for s in seeds] for x in fine])
    picks = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    scores, losses = (x[:, picks].mean(axis=2) for x in (scores, losses))
    scores = _graded(scores, by)
    # As in `_rank`: the loss decides between equal accuracies.
    losses[scores < scores.max(axis=0)] = np.inf
    return [fine[i] for i in losses.argmin(axis=0)]
