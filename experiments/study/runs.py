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
from experiments.study.tuning_noise import find_shifts
from experiments.study.variants import (
    Axis,
    Variant,
    at,
    combinations,
    format_values,
    variant_name,
)
from experiments.tasks.task import Data
from experiments.training import run_folder
from experiments.training.config import RunConfig
from experiments.training.defaults import resolve_settings
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.plan import Programs, RunPlan, declaring, make_task
from experiments.training.prepare import prepare_plan
from experiments.training.sends import from_json
from experiments.training.summary import Summary
from syncalgos.network import HOPS, Sends

RESAMPLES = 2000  # of the tuning seeds
MAX_LETTERS = 100  # of a label in the name of a folder, which may have 255 bytes
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
        return variant_name(self.variant.label, self.point)

    @property
    def trial(self) -> str:
        """The values, such as "lr=0.1"; "" without any."""
        return format_values(self.values)

    @property
    def folder(self) -> Path:
        """The folder that holds a folder for each seed."""
        # The number distinguishes labels with the same letters, such as a+b and a-b.
        label = re.sub("[^A-Za-z0-9]+", "-", self.variant.label).strip("-")
        label = label[:MAX_LETTERS]
        kind = "tuning" if self.is_trial else "runs"
        variant_folder = self.out / kind / f"{self.number:02d}-{label}"
        return variant_folder / (self.point or "runs") / self.trial

    @property
    def is_trial(self) -> bool:
        """Whether the runs try values, on held-out training data."""
        return self.common.validation is not None

    def make_config(self, seed: int) -> RunConfig:
        """Returns the config of one run."""
        return replace(self.common, seed=seed)

    @property
    def command(self) -> str:
        """The command that makes these runs, without --seed."""
        return shlex.join(list_command(self.common))

    def seed_folder(self, seed: int) -> Path:
        """Returns the folder of one run."""
        return self.folder / f"seed-{seed}"

    def missing(self) -> list[int]:
        """Returns the seeds of missing runs."""
        return [seed for seed in self.seeds if not is_done(self.seed_folder(seed))]

    def read(self) -> "RunSet":
        """Returns the run set with the content of the files that exist."""
        config: Mapping[str, Any] = {}
        summaries: dict[int, Summary] = {}
        lines: dict[int, Lines] = {}
        for seed in self.seeds:
            run_files = _read_folder(self.seed_folder(seed))[0]
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

    def final(self, measure: Measure) -> dict[int, float]:
        """Returns the measure at the end by seed, of runs that have it."""
        values: dict[int, float] = {}
        for seed, summary in self.finite.items():
            value = summary.measures[measure.key]
            if value is not None:
                values[seed] = value
        return values

    def count_lost(self, measure: Measure) -> int:
        """Returns the number of runs that diverged, or whose measure is undefined."""
        return len(self.summaries) - len(self.final(measure))

    @property
    def followed_flags(self) -> list[str]:
        """The tuned flags whose best value was followed beyond an end of its range."""
        flags: list[str] = []
        for axis in self.variant.tuned:
            if not axis.near:
                continue
            tried_numbers = {float(trial.values[axis.flag]) for trial in self.trials}
            # Values near the best one may lie beyond an end, too. What is followed
            # begins with the range's own step, and comes before those.
            first_steps: list[str] = []
            for end in (axis.values[0], axis.values[-1]):
                first_steps += axis.further_values(axis.values, end, is_near=False)
            if tried_numbers & {*map(float, first_steps)}:
                flags.append(axis.flag)
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


def list_command(config: RunConfig) -> list[str]:
    """Returns the command of a run, without --seed."""
    return [*PROGRAM.split(), *config_words(config)]


def is_done(folder: Path) -> bool:
    """Whether a run is complete and none of its files is damaged."""
    return _read_folder(folder)[0] is not None


def damage(folder: Path) -> str:
    """Returns the damaged file of a run, and how it is damaged; "" if none is."""
    return _read_folder(folder)[1]


def _read_folder(folder: Path) -> tuple[run_folder.RunFiles | None, str]:
    """Returns the files of a complete run, and which one is damaged, and how."""
    # An OSError is not caught: it says nothing about the content of a file.
    try:
        run_files = run_folder.read_run(folder)
        if run_files is not None:
            _check_summary(folder, run_files.summary)
    except Damaged as error:
        return None, str(error)
    return run_files, ""


def _check_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Raises a Damaged error for the summary of another run, or of unknown sends."""
    path = folder / "summary.json"
    seed = summary.get("seed")
    if seed is not None and folder.name != f"seed-{seed}":
        raise Damaged(path, f"it belongs to seed {seed}")
    sends = summary["sends"]
    if sends is None:
        return
    for kind in sends["kinds"]:
        unknown_hops = kind.keys() - HOPS.keys()
        if unknown_hops:
            raise Damaged(path, f"'sends' has no collective {min(unknown_hops)!r}")


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
    ) -> tuple[RunPlan, Data]:
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
        passed = factories.select_offered(TASK, factory, offered)
        arguments = repr({**config.task_arguments, **passed})
        key = config.task, arguments, config.data_dir, config.validation
        if config.init_from is not None and config.init_from.is_file():
            self._models.add(config.init_from)
        plan, self._data[key] = prepare_plan(
            config, self._data.get(key), objects=objects, programs=programs
        )
        return plan, self._data[key]

    def checksums(self) -> list[str]:
        """Returns those of the user's files that were read."""
        checksums = {data.sha256 for data in self._data.values()} - {""}
        checksums |= {sha256(path) for path in self._models}
        return sorted(checksums)


def run_sets(study: StudyConfig, loader: Loader) -> list[RunSet]:
    """Returns every variant at every value of the sweep, with its trials.

    No tuned values are chosen yet, and nothing is written.

    Raises:
        BadRequest, ValueError: the config of a run is not possible.
    """
    run_sets: list[RunSet] = []
    for number, variant in enumerate(study.variants, 1):
        objects = variant.objects
        points = study.points[variant.label]
        for point, common in _same_samples(study, points, objects):
            run_set = RunSet(
                variant=variant,
                number=number,
                point=point,
                common=common,
                out=study.folder,
                seeds=range(study.seeds),
            )
            # What is impossible is refused before any run is made.
            loader.plan(common, objects=objects)
            for values in variant.decisive_trials():
                check_trial(study, loader, run_set, values)
            trials = [
                make_trial(study, run_set, values)
                for values in combinations(variant.tuned)
            ]
            run_sets.append(run_set._replace(trials=trials))
    return run_sets


def _same_samples(
    study: StudyConfig, points: Mapping[str, RunConfig], objects: Objects
) -> Iterator[tuple[str, RunConfig]]:
    """Yields the runs at each point, on as many samples as at the first.

    The rate grows with the batch only under --worker-batch, linearly: Goyal et al.,
    "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """
    first_settings = None
    for point, run in points.items():
        if study.worker_batch is not None:
            run = at(run, {"batch_size": study.worker_batch * run.workers})
        task = make_task(run, objects)
        settings = resolve_settings(run, task, declaring(run, task, objects))
        if first_settings is None:
            first_settings = settings
        if settings.batch_size != first_settings.batch_size:
            # If the steps differ already, they are swept.
            if settings.steps == first_settings.steps:
                samples = first_settings.steps * first_settings.batch_size
                steps = samples / settings.batch_size
                run = at(run, {"steps": max(1, round(steps))})
            if study.worker_batch is not None:
                rate = first_settings.lr * settings.batch_size
                rate /= first_settings.batch_size
                run = at(run, {"lr": float(f"{rate:.6g}")})
        yield point, run


def make_trial(
    study: StudyConfig, run_set: RunSet, values: Mapping[str, str]
) -> RunSet:
    """Returns the runs that try values, on held-out training data."""
    # The held-out part of the training data is the same for all seeds and variants.
    # The reported runs train on all of the training data.
    common = at(run_set.common, {"validation": TUNE_SHARE})
    return run_set._replace(
        seeds=range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + study.tune_seeds),
        values=values,
        common=at(common, run_set.variant.read(values)),
    )


def check_trial(
    study: StudyConfig, loader: Loader, run_set: RunSet, values: Mapping[str, str]
) -> None:
    """Raises a BadRequest or a ValueError for values that are impossible."""
    trial = make_trial(study, run_set, values)
    config = trial.make_config(FIRST_TUNING_SEED)
    loader.plan(config, objects=run_set.variant.objects)


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
        tuning_shifts: how much better the variant would be if other seeds had tuned it,
            by draw: see `tuning_noise`. Empty for too few seeds.
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
    tuning_shifts: Sequence[float] = ()


class _Turn(NamedTuple):
    """A step of the search of further values: along one axis."""

    axis: Axis
    is_near: bool


def further_trials(
    study: StudyConfig, loader: Loader, run_set: RunSet
) -> Iterator[list[RunSet]]:
    """Yields more trials of a run set, each time once all earlier ones have ended.

    All variants follow one rule: a best value at an end of a range is followed beyond
    it, with all values of the other flags, and then values near the best one are tried.
    See `Axis`. Of an axis with `near_seeds` the best one and those near it are then
    repeated with so many seeds, see `repeat_near`.
    """
    axes = run_set.variant.tuned
    extended_axes = [axis for axis in axes if axis.near]
    all_turns = [_Turn(axis, is_near=False) for axis in extended_axes]
    all_turns += [_Turn(axis, is_near=True) for axis in extended_axes]
    trials = [*run_set.trials]
    windows: dict[str, list[RunSet]] = {}  # the best and those near it, by flag
    turns = all_turns
    while turns:
        best = _find_best(trials, study.measure)
        if best is None:
            break
        turn = turns[0]
        turns = turns[1:]
        new_trials: list[RunSet] = []
        for values in combinations(_further_grid(axes, trials, best, turn)):
            # Beyond the ends that the user gave, a value may be impossible.
            with suppress(BadRequest, ValueError):
                check_trial(study, loader, run_set, values)
                new_trials.append(make_trial(study, run_set, values))
        trials += new_trials
        if turn.is_near:
            windows[turn.axis.flag] = [best, *new_trials]
        yield new_trials
        # The best of another flag may lie at an end now.
        if new_trials and not turn.is_near:
            turns = all_turns
    for axis in extended_axes:
        if axis.near_seeds and axis.flag in windows:
            window = windows[axis.flag]
            yield from repeat_near(study, loader, run_set, axis, window, trials)


def _further_grid(
    axes: Sequence[Axis], trials: Sequence[RunSet], best: RunSet, turn: _Turn
) -> list[Axis]:
    """Returns the axes of further trials: those of one turn."""
    grid: list[Axis] = []
    for axis in axes:
        tried_values = tuple(dict.fromkeys(trial.values[axis.flag] for trial in trials))
        best_value = best.values[axis.flag]
        if axis.flag == turn.axis.flag:
            values = axis.further_values(tried_values, best_value, is_near=turn.is_near)
        elif turn.is_near:
            values = (best_value,)
        else:
            values = tried_values
        grid.append(axis._replace(values=values))
    return grid


def repeat_near(
    study: StudyConfig,
    loader: Loader,
    run_set: RunSet,
    axis: Axis,
    window: Sequence[RunSet],
    trials: Sequence[RunSet],
) -> Iterator[list[RunSet]]:
    """Yields further seeds of the trials near the best, and of values beyond these.

    As long as the best of the window, by all its seeds, lies at an end, the next value
    beyond it is tried, too, with all seeds: up to MOST_BEYOND values.

    Args:
        study, loader, run_set: as for `further_trials`.
        axis: the axis along which the window's trials lie.
        window: the best trial and those near it.
        trials: all trials so far; of one that is there, only its further seeds are
            yielded.
    """
    last_seed = FIRST_TUNING_SEED + axis.near_seeds
    all_seeds = range(FIRST_TUNING_SEED, last_seed)
    more_seeds = range(FIRST_TUNING_SEED + study.tune_seeds, last_seed)
    tried_values = [trial.values for trial in trials]
    yield [near_trial._replace(seeds=more_seeds) for near_trial in window]
    wide_window = [near_trial._replace(seeds=all_seeds) for near_trial in window]
    while True:
        best = _find_best(wide_window, study.measure)
        if best is None:
            return
        window_values = [near_trial.values[axis.flag] for near_trial in wide_window]
        value = axis.value_beyond(window_values, best.values[axis.flag])
        if value is None:
            return
        values = {**best.values, axis.flag: value}
        try:
            check_trial(study, loader, run_set, values)
        except (BadRequest, ValueError):
            return  # beyond the ends that the user gave, a value may be impossible
        beyond = make_trial(study, run_set, values)
        is_tried = values in tried_values
        yield [beyond._replace(seeds=more_seeds if is_tried else all_seeds)]
        wide_window.append(beyond._replace(seeds=all_seeds))


def join_trials(
    trials: Sequence[RunSet], further_trials: Sequence[RunSet]
) -> list[RunSet]:
    """Returns the trials with further ones; those of the same values become one.

    Args:
        trials: trials, each with other values.
        further_trials: further trials; if one has the values of a trial, its seeds
            continue those of that trial.
    """
    trials_by_values = {trial.trial: trial for trial in trials}
    for further_trial in further_trials:
        name = further_trial.trial
        if name in trials_by_values:
            first_seed = trials_by_values[name].seeds.start
            seeds = range(first_seed, further_trial.seeds.stop)
            trials_by_values[name] = trials_by_values[name]._replace(seeds=seeds)
        else:
            trials_by_values[name] = further_trial
    return [*trials_by_values.values()]


def deciding_trials(trials: Sequence[RunSet]) -> list[RunSet]:
    """Returns the trials with the most seeds: these alone decide."""
    most_seeds = max((len(trial.seeds) for trial in trials), default=0)
    return [trial for trial in trials if len(trial.seeds) == most_seeds]


def choose_values(run_set: RunSet, measure_key: str | None) -> RunSet | None:
    """Returns the runs to report, with the best values of their trials.

    Args:
        run_set: the run set, whose trials have ended.
        measure_key: measure to choose by; None takes the accuracy if there is one.

    Returns:
        The run set; None if it has trials and all of them failed.

    Raises:
        ValueError: the trials lack this measure.
    """
    if not run_set.trials:
        return run_set
    best = _find_best(deciding_trials(run_set.trials), measure_key)
    if best is None:
        return None
    common = at(run_set.common, run_set.variant.read(best.values))
    return run_set._replace(values=best.values, common=common)


def _find_best(trials: Sequence[RunSet], measure_key: str | None) -> RunSet | None:
    """Returns the best of the trials that were made; None if there is none."""
    made_trials: list[RunSet] = []
    for trial in trials:
        read_trial = trial.read()
        if read_trial.summaries:
            made_trials.append(read_trial)
    measure = find_measure(measure_key, made_trials)
    return max(made_trials, key=partial(_rank, measure=measure), default=None)


def find_measure(key: str | None, runs: Sequence[RunSet]) -> Measure:
    """Returns the measure to compare runs by; see `statistics.choose_measure`."""
    run_measures: list[Mapping[str, float | None]] = []
    for run_set in runs:
        for summary in run_set.finite.values():
            run_measures.append(summary.measures)
    return choose_measure(key, run_measures)


def _rank(trial: RunSet, measure: Measure) -> tuple[float, ...]:
    """Returns a rank that is higher for fewer lost runs, then a better measure."""
    lost_runs = trial.count_lost(measure)
    if not trial.final(measure):
        return (-lost_runs,)
    score = measure.side * _round_accuracy(_mean(trial, measure), measure)
    # The loss decides between equal accuracies, which are common on little data.
    return -lost_runs, score, -_mean(trial, LOSS)


def _round_accuracy(scores: Any, measure: Measure) -> Any:
    """Returns scores in which accuracies that differ by rounding alone are equal."""
    return np.round(scores, 6) if measure.higher_is_better else scores


def _mean(trial: RunSet, measure: Measure) -> float:
    values = trial.final(measure).values()
    return sum(values) / len(values)


def compute_tunings(tuned_runs: RunSet, measure: Measure) -> list[Tuning]:
    """Returns the scores of a variant, flag by flag."""
    trials = [trial for trial in tuned_runs.trials if trial.summaries]
    rank = partial(_rank, measure=measure)
    if not trials:
        return []
    deciding = deciding_trials(trials)
    best = max(deciding, key=rank)
    resampled_bests = _resample_best(deciding, measure)
    # The same for all flags, and the same draws for all variants.
    tuning_shifts = _find_tuning_shifts(deciding, best, measure)
    # The score of a value is that of its best trial over all other tuned flags, of
    # those with the most seeds.
    ranked_trials = sorted(trials, key=lambda trial: (len(trial.seeds), *rank(trial)))
    tunings: list[Tuning] = []
    for flag, value in best.values.items():
        top_trials = {trial.values[flag]: trial for trial in ranked_trials}
        values = sorted(top_trials, key=float)
        window = sorted({trial.values[flag] for trial in deciding}, key=float)
        ends = {values[0], values[-1]}
        if len(window) > 1:
            ends |= {window[0], window[-1]}
        scores = [_score(top_trials[x], measure) for x in values]
        likely_values = _likely_values(flag, value, resampled_bests)
        tunings.append(
            Tuning(
                label=tuned_runs.variant.label,
                point=tuned_runs.point,
                flag=flag.replace("_", "-"),
                values=[float(x) for x in values],
                scores=scores,
                chosen=float(value),
                at_edge=len(values) > 1 and value in ends,
                low=min(likely_values, default=None),
                high=max(likely_values, default=None),
                tuning_shifts=tuning_shifts,
            )
        )
    return tunings


def _score(trial: RunSet, measure: Measure) -> float | None:
    """Returns the mean of a trial; None if a run of it is lost."""
    return None if trial.count_lost(measure) else _mean(trial, measure)


def _likely_values(
    flag: str, best_value: str, resampled_bests: Sequence[RunSet]
) -> list[float]:
    """Returns the middle 95 % of the values that are best in resamples; may be none."""
    if not resampled_bests:
        return []
    picks = sorted(float(trial.values[flag]) for trial in resampled_bests)
    cut = len(picks) * 25 // 1000
    # No resample may have chosen the best value.
    return [*picks[cut : len(picks) - cut], float(best_value)]


class _SeedScores(NamedTuple):
    """The scores of the trials that no seed has lost.

    Attributes:
        trials: the trials.
        scores: their measure by seed, (trials, seeds); higher is better.
        losses: their losses, (trials, seeds).
    """

    trials: list[RunSet]
    scores: np.ndarray
    losses: np.ndarray


def _score_seeds(trials: Sequence[RunSet], measure: Measure) -> _SeedScores | None:
    """Returns the scores of trials by seed; None for too few seeds."""
    finite_trials = [trial for trial in trials if not trial.count_lost(measure)]
    if not finite_trials:
        return None
    seed_sets = [{*trial.final(measure)} for trial in finite_trials]
    seeds = sorted(set.intersection(*seed_sets))
    if len(seeds) < MIN_SEEDS:
        return None
    scores = measure.side * _final_values(finite_trials, measure, seeds)
    losses = _final_values(finite_trials, LOSS, seeds)
    return _SeedScores(finite_trials, scores, losses)


def _find_tuning_shifts(
    trials: Sequence[RunSet], best: RunSet, measure: Measure
) -> Sequence[float]:
    """Returns how much better other choices are than the best one, by draw."""
    seed_scores = _score_seeds(trials, measure)
    if seed_scores is None or best not in seed_scores.trials:
        return ()
    chosen_position = seed_scores.trials.index(best)
    shifts = find_shifts(seed_scores.scores, seed_scores.losses, chosen_position)
    return (measure.side * shifts).tolist()


def _resample_best(trials: Sequence[RunSet], measure: Measure) -> list[RunSet]:
    """Returns the best trial of each resample of the seeds; none for too few seeds."""
    seed_scores = _score_seeds(trials, measure)
    if seed_scores is None:
        return []
    finite_trials, scores, losses = seed_scores
    # Seeds are resampled for all trials together: they saw the same batches.
    num_seeds = scores.shape[1]
    picks = np.random.default_rng(0).integers(num_seeds, size=(RESAMPLES, num_seeds))
    mean_scores = scores[:, picks].mean(axis=2)  # (trials, resamples)
    mean_losses = losses[:, picks].mean(axis=2)
    rounded_scores = _round_accuracy(mean_scores, measure)
    # As in `_rank`: the loss decides between equal accuracies.
    mean_losses[rounded_scores < rounded_scores.max(axis=0)] = np.inf
    return [finite_trials[index] for index in mean_losses.argmin(axis=0)]


def _final_values(
    trials: Sequence[RunSet], measure: Measure, seeds: Sequence[int]
) -> np.ndarray:
    """Returns the measure at the end, (trials, seeds)."""
    rows: list[list[float]] = []
    for trial in trials:
        final = trial.final(measure)
        rows.append([final[seed] for seed in seeds])
    return np.array(rows)
