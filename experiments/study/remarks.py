"""Remarks of a report: what a reader must know before relying on its figures."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.command.words import flag_name
from experiments.study import statistics
from experiments.study.config import TUNE_SHARE, StudyConfig
from experiments.study.formats import (
    format_count,
    format_interval,
    format_name,
    group_items,
    join_words,
)
from experiments.study.results import Report
from experiments.study.runs import RunSet, Tuning
from experiments.study.sentences import describe_losses, say, say_counted
from experiments.study.statistics import MIN_SEEDS
from experiments.study.variants import variant_name


def write_remarks(
    config: StudyConfig, run_sets: Sequence[RunSet], report: Report
) -> Iterator[str]:
    """Yields the remarks, except for those on learning rates."""
    yield from _remark_losses(report)
    if config.seeds < MIN_SEEDS:
        yield say_counted(
            "remark.few_seeds", config.seeds, seeds=config.seeds, enough=MIN_SEEDS
        )
    yield from _remark_missing(config, run_sets)
    yield from _remark_tuning(config, run_sets, report.tuning)
    yield from _remark_examples(config, run_sets, report)
    # Shards follow from the seed and the number of workers.
    partitions = {run_set.config["settings"]["partition"] for run_set in run_sets}
    if partitions != {"iid"}:
        yield say("remark.partition", partition=", ".join(sorted(partitions)))
    points = set()
    batch_sizes = set()
    for run_set in run_sets:
        points.add(run_set.point)
        batch_sizes.add((run_set.point, run_set.config["settings"]["batch_size"]))
    if len(batch_sizes) > len(points):
        yield say("remark.batches")
    if report.measure not in (statistics.ACCURACY, statistics.LOSS):
        yield say("remark.measure", measure=report.measure.name)
    yield from _remark_late_steps(run_sets)
    yield from _remark_bytes(run_sets)
    intervals = describe_with_tuning(report)
    if intervals:
        yield intervals


def describe_with_tuning(report: Report) -> str:
    """Returns the intervals that include other tuning seeds; "" if there are none."""
    measure = report.measure
    intervals = []
    for row in report.rows:
        if row.comparison.with_tuning:
            low, high = row.comparison.with_tuning
            interval = format_interval(measure.scale * low, measure.scale * high)
            intervals.append(f"{row.name} {interval}")
    if not intervals:
        return ""
    return say(
        "remark.with_tuning",
        baseline=report.baseline,
        unit=measure.difference_unit or measure.name,
        intervals="; ".join(intervals),
    )


def _remark_losses(report: Report) -> Iterator[str]:
    """Yields which runs have no result."""
    remarks = []
    has_results = False
    for row in report.rows:
        losses = describe_losses(row)
        if losses:
            remarks.append(say("lost.sentence", row=row.name, lost=losses))
            has_results = has_results or row.result is not None
    if has_results:
        remarks[-1] = say("remark.others", losses=remarks[-1])
    yield from remarks


def _remark_missing(config: StudyConfig, run_sets: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about runs that failed."""
    for run_set in run_sets:
        for part in (run_set, *run_set.trials):
            count = len(part.seeds) - len(part.summaries)
            if count:
                name = f"{part.name} {part.trial}" if part.is_trial else part.name
                yield say_counted(
                    "remark.missing",
                    count,
                    name=name,
                    count=count,
                    seeds=len(part.seeds),
                )
    reported = {(run_set.variant.label, run_set.point) for run_set in run_sets}
    absent_names = []
    for variant in config.variants:
        for point in config.points[variant.label]:
            if (variant.label, point) not in reported:
                absent_names.append(variant_name(variant.label, point))
    if absent_names:
        yield say("remark.no_runs", names=", ".join(absent_names))


def _remark_tuning(
    config: StudyConfig, run_sets: Sequence[RunSet], tunings: Sequence[Tuning]
) -> Iterator[str]:
    """Yields warnings about edges and trials."""
    at_edge = [tuning for tuning in tunings if tuning.at_edge]
    edges = group_items(at_edge, lambda tuning: (tuning.flag, tuning.chosen))
    for (flag, chosen), edge_tunings in edges.items():
        names = [variant_name(tuning.label, tuning.point) for tuning in edge_tunings]
        yield say("remark.edge", names=", ".join(names), flag=flag, chosen=chosen)
    trial_counts = sorted({len(run_set.trials) for run_set in run_sets})
    if len(trial_counts) > 1:
        yield _describe_budgets(config, run_sets)
    followed_names = []
    for run_set in run_sets:
        flags = ", ".join(flag_name(flag) for flag in run_set.followed_flags)
        if flags:
            followed_names.append(f"{run_set.name} ({flags})")
    if followed_names:
        yield say("remark.followed", names=", ".join(followed_names))
    axes = [axis for axis in config.tuned if len(axis.values) > 1] or config.tuned
    flags = ", --".join(" or --".join(axis.flags) for axis in axes).replace("_", "-")
    if not flags:
        return
    if trial_counts[-1] <= 1:
        yield say("remark.untuned", flags=flags)
        return
    trials = str(trial_counts[-1])
    if len(trial_counts) > 1:
        trials = f"{trial_counts[0]} to {trial_counts[-1]}"
    tune_seeds = format_count(config.tune_seeds, "seed")
    near_seeds = max((axis.near_seeds for axis in config.tuned), default=0)
    if near_seeds:
        tune_seeds = f"{tune_seeds}, near the best {near_seeds}"
    yield say(
        "remark.tuned",
        flags=flags,
        trials=trials,
        tune_seeds=tune_seeds,
        share=100 * TUNE_SHARE,
    )


def _describe_budgets(config: StudyConfig, run_sets: Sequence[RunSet]) -> str:
    """Returns how many trials each row had, and which rows lack a tuned flag."""
    counts = []
    groups = group_items(run_sets, lambda run_set: len(run_set.trials))
    for count, equal_run_sets in groups.items():
        counts.append(f"{_names(equal_run_sets)} {count:,}")
    sentences = [say("remark.budgets", counts="; ".join(counts))]
    lacking = [
        run_set
        for run_set in run_sets
        if len(run_set.variant.tuned) < len(config.tuned)
    ]
    if lacking:
        sentences.append(
            say_counted("remark.lacks", len(lacking), names=_names(lacking))
        )
    return " ".join(sentences)


def _remark_examples(
    config: StudyConfig, run_sets: Sequence[RunSet], report: Report
) -> Iterator[str]:
    """Yields warnings about test and validation data of few examples."""
    # Runs of earlier versions do not say the sizes of their data sets.
    test_sizes = [
        run_set.first_summary.examples["test"]
        for run_set in run_sets
        if run_set.first_summary.examples
    ]
    if report.measure != statistics.ACCURACY or len(test_sizes) < len(run_sets):
        return
    test_examples = min(test_sizes)
    widths = []
    for row in report.rows:
        difference = row.comparison.difference
        if difference is None or difference.low is None or difference.high is None:
            continue
        widths.append(difference.high - difference.low)
    if widths and 10 / test_examples > min(widths):
        points = 100 / test_examples
        yield say("remark.examples", points=points, test=test_examples)
    validation_sizes = _validation_sizes(run_sets)
    names = _find_near_scores(report.tuning, validation_sizes)
    if names:
        phrase = "remark.validation"
        if config.tune_seeds < MIN_SEEDS:
            phrase = "remark.average"
        points = 100 / min(validation_sizes.values())
        yield say(phrase, points=points, names=join_words(names))


def _validation_sizes(run_sets: Sequence[RunSet]) -> dict[tuple[str, str], int]:
    """Returns the number of validation examples by label and point."""
    sizes = {}
    for run_set in run_sets:
        for trial in run_set.trials:
            if trial.summaries:
                key = run_set.variant.label, run_set.point
                sizes[key] = trial.first_summary.examples["test"]
    return sizes


def _find_near_scores(
    tunings: Sequence[Tuning], validation_sizes: Mapping[tuple[str, str], int]
) -> list[str]:
    """Returns how many values of a variant are within one example of the best."""
    names = []
    for tuning in tunings:
        scores = [score for score in tuning.scores if score is not None]
        count = 0
        for score in scores:
            examples = validation_sizes[tuning.label, tuning.point]
            if max(scores) - score < 1.5 / examples:
                count += 1
        if count > 1:
            names.append(f"{format_name(tuning)} {count} of {len(tuning.scores)}")
    return names


def _remark_late_steps(run_sets: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about steps after the last sync."""
    # The center dates from the last sync: later local steps are not in it.
    converged = [run_set for run_set in run_sets if not run_set.first_summary.diverged]
    groups = group_items(
        converged,
        lambda run_set: (
            run_set.first_summary.steps,
            run_set.first_summary.center_step,
        ),
    )
    for (steps, center_step), group in groups.items():
        late_steps = steps - center_step
        if late_steps and center_step:
            yield say("remark.late_steps", names=_names(group), late=late_steps)
        elif late_steps:
            yield say("remark.no_sync", names=_names(group), steps=steps)


def _remark_bytes(run_sets: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about uncertain bytes."""
    by_data = [run_set for run_set in run_sets if len(run_set.sends or ()) > 1]
    if by_data:
        yield say("remark.by_data", names=_names(by_data))
    unknown = [run_set for run_set in run_sets if run_set.first_summary.sends is None]
    if unknown:
        yield say("remark.unknown", names=_names(unknown))
    groups = group_items(run_sets, lambda run_set: run_set.first_summary.not_counted)
    for messages, group in groups.items():
        if messages is None:
            continue
        if len(group) == len(run_sets):
            yield say("remark.not_counted", messages=messages)
        else:
            names = _names(group)
            yield say("remark.not_counted_of", messages=messages, names=names)


def _names(run_sets: Sequence[RunSet]) -> str:
    return ", ".join(run_set.name for run_set in run_sets)
