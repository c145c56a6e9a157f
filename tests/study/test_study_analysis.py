"""From the files of runs to a report: made-up runs, whose figures are known."""

import math
import re
import shlex
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from support.stored_runs import (
    BYTES,
    EVALUATION_STEPS,
    FAST,
    SENDS,
    SLOW,
    STEP_TIME,
    change_summary,
    list_run_sets,
    make_line,
    make_runs,
    read_study,
    write_run,
)
from support.study_commands import change

from experiments.study import (
    analysis,
    figures,
    formats,
    page,
    presets,
    runs,
    sentences,
)
from experiments.study.answer import laws
from experiments.study.results import BY_DEFAULT, BY_HAND, ONE_NOMINAL, Kind
from experiments.study.runs import make_trial
from experiments.study.statistics import ACCURACY, LOSS, Measure
from experiments.study.study import MACHINE, final_lines, study_lines, without_repeats
from syncalgos.network import PRESETS


@pytest.fixture
def make_study(tmp_path):
    """Makes a study as `read_study` does, in a folder of its own."""
    number = count()
    return lambda *argv, seeds=5: read_study(
        tmp_path / str(next(number)), *argv, seeds=seeds
    )


@pytest.fixture
def plain(make_study):
    """Makes the report of runs without a sweep, which end at these accuracies."""

    def make(sync, bmuf, *argv, command="", **options):
        study = make_study(*argv, seeds=len(sync))
        finals = {("sync_sgd", ""): sync, ("bmuf", ""): bmuf}
        return analysis.make_report(study, make_runs(study, finals, **options), command)

    return make


def require(figure):
    """A figure that is there."""
    assert figure is not None
    return figure


def find_remarks(report):
    """The remarks of a report by their keys in phrases.toml."""
    keys = []
    for remark in report.remarks:
        for key, phrase in sentences.PHRASES["remark"].items():
            variants = [phrase] if isinstance(phrase, str) else phrase.values()
            if any(re.search(phrase_pattern(variant), remark) for variant in variants):
                keys.append(key)
    return keys


def phrase_pattern(phrase):
    """What a phrase matches, whatever its fields hold."""
    return re.sub(r"\\{.*?\\}", ".*", re.escape(phrase))


def test_rows_hold_mean_and_deviation_over_the_seeds(plain):
    report = plain((0.8, 0.9), (0.7, 0.9), command="command")
    sync, bmuf = report.rows
    assert [row.label for row in report.rows] == ["sync_sgd", "bmuf"]
    assert report.measure == ACCURACY
    assert require(sync.result)[:2] == pytest.approx((0.85, math.sqrt(0.005)))
    assert require(sync.loss).mean == pytest.approx(0.15)
    assert require(bmuf.result).deviation == pytest.approx(math.sqrt(0.02))
    assert (sync.seeds, sync.diverged, sync.lr, sync.effective_lr) == (2, 0, 0.05, 0.4)
    assert (sync.bytes_per_worker, sync.syncs) == (3000, 30)
    assert (bmuf.bytes_per_worker, bmuf.syncs) == (300, 3)
    assert report.command == "command" and report.networks == [SLOW, FAST]


def test_what_seeds_send_unlike_is_shown_as_their_mean(make_study):
    """Data may decide on what is sent: see `decided`."""
    study = make_study(seeds=2)
    runs = make_runs(study, {("sync_sgd", ""): (0.8, 0.9), ("bmuf", ""): (0.7, 0.9)})
    alike = analysis.make_report(study, runs, "command")
    bmuf = runs[1]
    change_summary(bmuf, 1, sends=SENDS["sync_sgd"], bytes_per_worker=3000)
    for metrics in bmuf.lines[1]:
        metrics["bytes_per_worker"] = BYTES["sync_sgd"] * metrics["step"]
    report = analysis.make_report(study, runs, "command")

    assert report.rows[1].bytes_per_worker == (300 + 3000) / 2
    bytes_per_worker = require(report.curves[1].bytes_per_worker)
    assert bytes_per_worker == [(10 + 100) / 2 * step for step in EVALUATION_STEPS]
    for network, seconds in report.rows[1].seconds.items():
        alike_seconds = [alike.rows[i].seconds[network] for i in (0, 1)]
        assert seconds == pytest.approx(sum(alike_seconds) / 2)
    assert "by_data" in find_remarks(report)
    assert "by_data" not in find_remarks(alike)


def test_differences_are_paired_by_seed_and_to_the_baseline(plain):
    report = plain((0.5, 0.6, 0.7, 0.8, 0.9), (0.511, 0.609, 0.71, 0.811, 0.909))
    baseline, comparison = (row.comparison for row in report.rows)
    assert report.baseline == "sync_sgd"
    assert (baseline.kind, baseline.difference) == (Kind.BASELINE, None)
    mean, low, _, deviation, seeds, *_ = require(comparison.difference)
    assert (mean, deviation, seeds) == pytest.approx((0.01, 0.001, 5))
    # 2.776, from a printed table, × 0.001 / √5
    assert low == pytest.approx(0.01 - 0.001241, abs=1e-6)
    assert comparison.kind is Kind.BETTER
    assert len(report.sentences) == 1 and len(report.numbers) == 3


def test_another_baseline_turns_the_difference(plain):
    sync, bmuf = plain([0.8], [0.7], "--baseline=bmuf").rows
    assert bmuf.comparison.kind is Kind.BASELINE
    assert require(sync.comparison.difference).mean == pytest.approx(0.1)


def test_bands_are_the_mean_and_one_deviation_at_each_evaluation(plain):
    sync = plain((0.8, 0.9), (0.7, 0.9)).curves[0]
    assert sync.steps == [*EVALUATION_STEPS]
    mean, low, high = sync.bands["test_accuracy"]
    deviation = math.sqrt(0.005)
    assert mean == pytest.approx([0.45, 0.75, 0.85])
    assert low == pytest.approx([x - deviation for x in mean])
    assert high == pytest.approx([x + deviation for x in mean])
    assert sync.bands["train_loss"].mean == pytest.approx([0.55, 0.25, 0.15])
    assert sync.bytes_per_worker == [1000, 2000, 3000]
    not_measured = {"pseudo_gradient", "displacement_cosine", "worker_loss_spread"}
    assert not (not_measured | {"step", "seconds", "bytes_per_worker"}) & {*sync.bands}


def test_the_spread_of_the_workers_losses_is_their_deviation(plain):
    lines = [
        make_line(step, 0.8, worker_losses=[1.0, 3.0]) for step in EVALUATION_STEPS
    ]
    lines[0]["worker_losses"] = [2.0, None]
    report = plain([0.8], [0.7], lines=lines)
    mean = report.curves[0].bands["worker_loss_spread"].mean
    assert math.isnan(mean[0]) and mean[1:] == [1.0, 1.0]
    measure_keys = [measure.key for _, measure in figures.quantities(report)]
    assert "worker_loss_spread" in measure_keys and "worker_losses" not in measure_keys


# Time.


def test_modelled_time_is_computation_and_every_message(plain):
    """An all-reduce of two workers, who exchange it: its bytes, and one latency."""
    report = plain([0.8], [0.7])
    message = 100 / 1000 + 0.01
    sync, bmuf = report.curves
    expected = [step * (STEP_TIME + message) for step in EVALUATION_STEPS]
    assert sync.seconds[SLOW.name] == pytest.approx(expected)
    expected = [step * STEP_TIME + step // 10 * message for step in EVALUATION_STEPS]
    assert bmuf.seconds[SLOW.name] == pytest.approx(expected)
    assert report.rows[1].seconds[SLOW.name] == pytest.approx(expected[-1])
    assert report.rows[1].seconds[FAST.name] == pytest.approx(15 + 3 * 1e-4)
    assert (report.step_seconds, report.step_seconds_origin) == (
        [STEP_TIME] * 2,
        "as given",
    )
    assert report.settings["modelled all-reduces"] == (
        f"recursive doubling on {SLOW.name}; ring on {FAST.name}"
    )


def test_a_record_says_on_what_and_by_which_command_a_run_was_made(make_study):
    """With the seed, the command repeats the run on as many devices."""
    study = make_study(seeds=2)
    finals = {("sync_sgd", ""): [0.8] * 2, ("bmuf", ""): [0.7] * 2}
    machine = {"lanes": 4, "processor": "a chip", "commit": "abc", "versions": {}}
    lines = [*final_lines(make_runs(study, finals, **machine))]
    assert len(lines) == 4
    for line in lines:
        assert machine | {"devices": 2} == {key: line[key] for key in MACHINE}
        words = shlex.split(line["command"])
        assert words[:3] == ["python", "-m", "experiments.run"]
        assert "--seed" not in words
        assert words[words.index("--algo") + 1] == line["algo"]
    repeated = [*without_repeats(lines)]
    assert ["devices" in line for line in repeated] == [True] + [False] * 3
    assert ["command" in line for line in repeated] == [True, False] * 2


def test_time_to_target_is_that_of_the_first_evaluation_as_good(plain):
    # Means 0.45, 0.75, 0.85 and 0.3, 0.6, 0.7.
    report = plain((0.8, 0.9), (0.6, 0.8), "--target=0.75")
    sync, bmuf = report.rows
    assert report.target == 0.75
    assert sync.steps_to_target == 20
    assert sync.to_target == pytest.approx({SLOW.name: 12.2, FAST.name: 20 * 0.5001})
    assert bmuf.steps_to_target is None
    assert bmuf.to_target == {SLOW.name: None, FAST.name: None}


BY_LOSS = "--measure=test_loss"


class TargetCase(NamedTuple):
    """Accuracies of two algorithms, and the steps in which they reach a target."""

    sync: list[float]
    bmuf: list[float]
    argv: list[str]
    target: float | None
    steps: list[int | None]


@pytest.mark.parametrize(
    TargetCase._fields,
    [
        TargetCase(
            sync=[0.9], bmuf=[0.89], argv=[], target=None, steps=[None, None]
        ),  # nobody asked for one
        TargetCase(
            sync=[0.9],
            bmuf=[0.8],
            argv=[BY_LOSS, "--target=0.25"],
            target=0.25,
            steps=[20, 30],
        ),
        TargetCase(
            sync=[0.9],
            bmuf=[0.85],
            argv=["--target=0.7312345"],
            target=0.7312345,
            steps=[20, 20],
        ),
    ],
)
def test_the_target_is_as_given(plain, sync, bmuf, argv, target, steps):
    report = plain(sync, bmuf, *argv)
    assert report.target == pytest.approx(target)
    assert report.measure == (LOSS if BY_LOSS in argv else ACCURACY)
    assert [row.steps_to_target for row in report.rows] == steps


def test_without_an_accuracy_the_loss_is_compared(plain):
    lines = [make_line(10, None, test_loss=0.5), make_line(30, None, test_loss=0.25)]
    report = plain([0], [0], lines=lines)
    assert report.measure == LOSS and require(report.rows[0].result).mean == 0.25
    assert "test_accuracy" not in report.curves[0].bands


def test_the_measured_step_is_the_median_of_one_worker_with_a_device_to_itself(
    make_study,
):
    """2 devices of 2 workers take 6 s of 30 steps: 0.2 s; as lanes of one, 0.1 s."""
    study = replace(make_study(seeds=3), step_time=None)
    runs = make_runs(study, {("sync_sgd", ""): [0.8] * 3, ("bmuf", ""): [0.7] * 3})
    assert analysis.make_report(study, runs, "").step_seconds == pytest.approx(
        [0.2] * 2
    )
    for run_set in runs:
        for seed in run_set.summaries:
            change_summary(run_set, seed, devices=1)
    change_summary(runs[0], 0, seconds=1e6)  # one that was disturbed
    assert analysis.make_report(study, runs, "").step_seconds == pytest.approx(
        [0.1] * 2
    )


@pytest.mark.parametrize("place", ["task_arguments", "settings"])
def test_unlike_models_or_batches_have_their_own_times(make_study, place):
    study = replace(make_study(seeds=1), step_time=None)
    run_changes = {("bmuf", 0): {"seconds": 60.0}}
    runs = make_runs(
        study, {("sync_sgd", ""): [0.8], ("bmuf", ""): [0.9]}, run_changes=run_changes
    )
    runs[1].config[place] |= {"model": "cnn", "batch_size": 32}
    report = analysis.make_report(study, runs, "")
    assert [x.seconds[FAST.name] for x in report.rows] == pytest.approx(
        [6.003, 60.0003]
    )


def test_what_could_not_be_counted_has_no_time_and_the_report_says_so(plain):
    lines = [make_line(step, 0.5, bytes_per_worker=None) for step in EVALUATION_STEPS]
    run_changes = {("bmuf", 0): {"lines": lines, "syncs": None, "sends": None}}
    report = plain([0.5], [0.5], run_changes=run_changes)
    assert report.curves[1].bytes_per_worker is None and report.curves[1].seconds == {}
    row = report.rows[1]
    assert (row.bytes_per_worker, row.syncs, row.seconds) == (None, None, {})
    assert "unknown" in find_remarks(report)


def test_syncs_that_differ_between_seeds_are_not_shown_as_those_of_one(plain):
    row = plain([0.5] * 2, [0.5] * 2, run_changes={("bmuf", 1): {"syncs": 5}}).rows[1]
    assert (row.syncs, formats.format_syncs(row)) == (None, "")


# A sweep.

SWEPT = {
    ("sync_sgd", ""): (0.5, 0.6),
    ("bmuf", "period=2"): (0.6, 0.7),
    ("bmuf", "period=4"): (0.4, 0.5),
}
SWEPT_WORKERS = {
    ("sync_sgd", "workers=1"): (0.5, 0.6),
    ("sync_sgd", "workers=2"): (0.8, 0.9),
    ("bmuf", "workers=1"): (0.6, 0.7),
    ("bmuf", "workers=2"): (0.6, 0.7),
}


@pytest.mark.parametrize(
    ("argv", "finals", "gains"),
    [
        # What is not swept is the baseline at every point.
        (["--sweep=period=2,4"], SWEPT, ["baseline", 0.1, -0.1]),
        (["--sweep=workers=1,2"], SWEPT_WORKERS, ["baseline", "baseline", 0.1, -0.2]),
        # The baseline is swept, sync_sgd is not: it has no one value to compare to.
        (
            ["--sweep=period=2,4", "--baseline=bmuf"],
            SWEPT,
            ["no bmuf to compare to here", "baseline", "baseline"],
        ),
    ],
)
def test_each_point_is_compared_to_the_baseline_at_that_point(
    make_study, argv, finals, gains
):
    study = make_study(*argv, seeds=2)
    report = analysis.make_report(study, make_runs(study, finals), "")
    assert [(row.label, row.point) for row in report.rows] == [*finals]
    assert report.sweep == argv[0].split("=")[1]
    for row, gain in zip(report.rows, gains, strict=True):
        difference = row.comparison.difference
        outcome = difference.mean if difference else row.comparison.clause
        assert outcome == (gain if isinstance(gain, str) else pytest.approx(gain))


# Runs that diverge.


@pytest.fixture
def diverging(plain):
    """Makes the report of runs of which bmuf's of one seed diverged, with its lines."""

    def make(lines, seeds, lost=1):
        run_changes = {("bmuf", lost): {"lines": lines, "diverged": True}}
        return plain([0.8] * seeds, [0.8] * seeds, run_changes=run_changes)

    return make


def test_a_run_that_diverged_is_counted_but_in_no_figure(diverging):
    report = diverging([make_line(10, 0.1), make_line(20, 0.1)], seeds=3)
    row = report.rows[1]
    assert (row.seeds, row.diverged) == (3, 1)
    assert require(row.result)[::2] == (pytest.approx(0.8), 2)
    assert require(row.comparison.difference).count == 2
    assert (row.bytes_per_worker, row.syncs) == (300, 3)  # of a whole run
    assert "others" in find_remarks(report)


@pytest.mark.parametrize(("seed", "ends"), [(0, 15), (1, 20), (0, 25)])
def test_bands_are_of_runs_that_did_not_diverge(diverging, seed, ends):
    """One's last line is of the step at which it ended, maybe of no evaluation."""
    lines = [
        make_line(step, 0.4 if step == 10 else 0.7)
        for step in EVALUATION_STEPS
        if step < ends
    ]
    lines.append(make_line(ends, 0.0, test_loss=1e9))
    curve = diverging(lines, 2, seed).curves[1]
    index_by_step = {step: curve.steps.index(step) for step in EVALUATION_STEPS}
    band = curve.bands["test_accuracy"]
    assert [band.mean[index_by_step[s]] for s in EVALUATION_STEPS] == pytest.approx(
        [0.4, 0.7, 0.8]
    )
    assert curve.bands["test_loss"].mean[index_by_step[20]] == pytest.approx(0.3)


def test_where_all_runs_diverged_nothing_is_compared(diverging):
    row = diverging([make_line(10, 0.1, test_loss=None)], seeds=1, lost=0).rows[1]
    assert (row.result, row.loss, row.comparison.difference) == (None, None, None)
    assert (row.bytes_per_worker, row.syncs) == (None, None)
    assert row.comparison.kind is Kind.NO_COMMON_SEED


def test_a_last_step_that_blows_up_counts_as_diverged(make_study):
    """The losses were finite, what is measured afterwards is not: null in the files."""
    study = make_study(seeds=2)
    runs = make_runs(study, {("sync_sgd", ""): [0.8] * 2, ("bmuf", ""): [0.7] * 2})
    change_summary(runs[1], 1, measures={"test_loss": None, "test_accuracy": 0.7})
    row = analysis.make_report(study, runs, "").rows[1]
    assert (row.diverged, require(row.loss)) == (1, (pytest.approx(0.3), None, 1))


def test_a_figure_that_is_undefined_is_missing_alone(plain):
    """As a precision without positives, 0/0: null in the files."""
    ends = ([0.8] * 2, [0.7] * 2)
    measure_flag = "--measure=test_miss"
    run_changes = {}
    run_changes["bmuf", 1] = {"test_miss": None}
    row = plain(*ends, run_changes=run_changes, test_miss=0.5).rows[1]
    assert (row.diverged, require(row.result).count) == (0, 2)
    report = plain(*ends, measure_flag, run_changes=run_changes, test_miss=0.5)
    assert require(report.rows[1].result).count == 1
    lost = "bmuf: 1 of its 2 runs ended with an undefined result."
    assert report.remarks[0].startswith(lost) and lost in report.sentences[0]
    report = plain(
        *ends,
        measure_flag,
        run_changes=run_changes | {("bmuf", 0): run_changes["bmuf", 1]},
        test_miss=0.5,
    )
    assert "no run of bmuf has a result" in report.headline
    assert (
        page.cells(report, report.rows[1], with_times=True)["test miss"] == "undefined"
    )


# What was tuned.


def write_trials(points, scores, **fields):
    """Writes the runs that tune: by the algorithm and the values, each seed's end."""
    for point in points:
        for trial_runs in point.trials:
            results = scores[point.variant.label][",".join(trial_runs.values.values())]
            for seed, end in zip(trial_runs.seeds, results, strict=True):
                trial_fields = {"diverged": end is None, **fields}
                curve = (0.1, 0.1, 0.1 if end is None else end)
                write_run(
                    trial_runs.seed_folder(seed),
                    point.variant.algo,
                    curve,
                    **trial_fields,
                )


def final(study, values):
    """Runs with the values that were chosen, point by point."""
    ends = {(x.variant.label, x.point): [0.8] for x in list_run_sets(study)}
    return make_runs(study, ends, values)


def test_the_best_mean_on_validation_data_is_chosen_and_none_that_diverged(make_study):
    study = make_study("--tune=lr=0.3,0.1,0.2", "--tune-seeds=2", seeds=1)
    scores = {"0.1": (0.5, 0.6), "0.2": (0.2, 0.7), "0.3": (0.99, None)}
    edge = {"0.1": (0.5, 0.6), "0.2": (0.6, 0.7), "0.3": (0.7, 0.8)}
    write_trials(list_run_sets(study), {"sync_sgd": scores, "bmuf": edge})
    sync, bmuf = (
        runs.compute_tunings(p.read(), ACCURACY)[0] for p in list_run_sets(study)
    )
    assert sync.values == bmuf.values == [0.1, 0.2, 0.3]
    assert sync.scores == [pytest.approx(0.55), pytest.approx(0.45), None]
    assert (sync.chosen, sync.at_edge) == (0.1, True)
    assert (bmuf.chosen, bmuf.at_edge) == (0.3, True)
    assert (bmuf.label, bmuf.point, bmuf.flag) == ("bmuf", "", "lr")


def chosen_values(run_set, key):
    return require(runs.choose_values(run_set, key)).values


def test_of_equal_accuracies_the_lower_loss_is_chosen(make_study):
    study = make_study("--tune=lr=0.1,0.2,0.3", "--tune-seeds=5", seeds=1)
    # Sums of as many right answers may differ in the last place of float32.
    ends = {"0.1": [0.5] * 5, "0.2": [0.49999997] * 5, "0.3": [0.5] * 5}
    write_trials(list_run_sets(study), dict.fromkeys(BYTES, ends))
    point = list_run_sets(study)[0]
    for trial_runs in point.trials:
        for seed in range(1000, 1005):
            run = trial_runs.seed_folder(seed)
            change(run, test_loss=0.1 if "lr=0.2" in str(run) else 0.2)
    for key in (ACCURACY.key, LOSS.key):
        assert chosen_values(point, key) == {"lr": "0.2"}
    (report,) = runs.compute_tunings(point.read(), ACCURACY)
    assert (report.at_edge, report.low, report.high) == (False, 0.2, 0.2)
    assert chosen_values(point._replace(trials=[]), None) == {}


def test_a_trial_whose_measure_is_undefined_is_not_chosen_by_it(make_study):
    study = make_study("--tune=lr=0.1,0.2", "--tune-seeds=5", seeds=1)
    ends = {"0.1": [0.6] * 5, "0.2": [0.5] * 5}
    write_trials(list_run_sets(study), dict.fromkeys(BYTES, ends), test_miss=0.1)
    point = list_run_sets(study)[0]
    change(point.trials[0].seed_folder(1000), test_miss=None)
    assert chosen_values(point, None) == {"lr": "0.1"}
    assert chosen_values(point, "test_miss") == {"lr": "0.2"}
    (tuning,) = runs.compute_tunings(point.read(), Measure("test_miss", "miss", False))
    assert tuning.scores == [None, pytest.approx(0.1)]


def test_where_all_diverged_the_fewest_and_then_the_best_are_chosen(make_study):
    study = make_study("--tune=lr=0.1,0.2,0.3", "--tune-seeds=2", seeds=1)
    scores = {"0.1": (None, None), "0.2": (0.1, None), "0.3": (None, 0.9)}
    write_trials(list_run_sets(study), {"sync_sgd": scores, "bmuf": scores})
    assert chosen_values(list_run_sets(study)[0], None) == {"lr": "0.3"}


def test_the_best_value_has_an_interval_from_five_seeds_on(make_study):
    study = make_study("--tune=lr=0.1,0.2,0.3", "--tune-seeds=6", seeds=1)
    clear = {"0.1": [0.5] * 6, "0.2": [0.9, 0.7, 0.8, 0.9, 0.7, 0.8], "0.3": [None] * 6}
    # 0.2 is the best where its one good seed is drawn twice or more: in 1 - (5/6)^6 -
    # (5/6)^5 = 26 % of resamples.
    torn = {"0.1": [0.5] * 6, "0.2": [0.4] * 5 + [0.95], "0.3": [0.1] * 6}
    write_trials(list_run_sets(study), {"sync_sgd": clear, "bmuf": torn})
    sync, bmuf = (
        runs.compute_tunings(p.read(), ACCURACY)[0] for p in list_run_sets(study)
    )
    assert (sync.low, sync.chosen, sync.high) == (0.2, 0.2, 0.2)
    assert (bmuf.low, bmuf.chosen, bmuf.high) == (0.1, 0.1, 0.2)
    four_seeds = make_study("--tune=lr=0.1,0.2", "--tune-seeds=4", seeds=1)
    write_trials(
        list_run_sets(four_seeds),
        {x: {"0.1": [0.5] * 4, "0.2": [0.6] * 4} for x in BYTES},
    )
    assert (
        runs.compute_tunings(list_run_sets(four_seeds)[0].read(), ACCURACY)[0].low
        is None
    )


def test_an_interval_may_hold_the_noise_of_tuning(make_study):
    study = make_study("--tune=lr=0.1,0.2", "--tune-seeds=6", seeds=5)
    clear = {"0.1": [0.5] * 6, "0.2": [0.9] * 6}
    # 0.2 is chosen by its one good seed; the other half scores it 0.3 lower.
    torn = {"0.1": [0.5] * 6, "0.2": [0.2] * 5 + [2.1]}
    write_trials(list_run_sets(study), {"sync_sgd": clear, "bmuf": torn})
    ends = np.arange(0.90, 0.945, 0.01)
    gains = np.arange(0.01, 0.055, 0.01)
    finals = {("sync_sgd", ""): ends.tolist(), ("bmuf", ""): (ends - gains).tolist()}
    values = [chosen_values(x, None) for x in list_run_sets(study)]
    report = analysis.make_report(study, make_runs(study, finals, values), "")

    comparison = report.rows[1].comparison
    difference = comparison.difference
    interval = comparison.with_tuning
    assert interval and difference and difference.low and difference.high
    assert difference.low - 0.01 < interval.low < difference.high
    assert interval.high > difference.high + 0.2
    assert report.rows[0].comparison.with_tuning is None
    assert find_remarks(report).count("with_tuning") == 1


LAW = ["--algos=bmuf", "--tune=lr=0.1,0.2", "--sweep=period=2,4"]


def test_a_law_is_the_answer_of_a_study_of_one_algorithm(make_study):
    study = make_study(*LAW, "--tune-seeds=5", seeds=1)
    torn = [0.4] * 4 + [0.95]  # the best where the last seed is drawn once: 0.51 > 0.5
    for point, better in zip(list_run_sets(study), ("0.1", "0.2"), strict=True):
        write_trials(
            [point], {"bmuf": {"0.1": [0.5] * 5, "0.2": [0.5] * 5, better: torn}}
        )
    report = analysis.make_report(
        study, final(study, ({"lr": "0.1"}, {"lr": "0.2"})), ""
    )
    ends = [(x.low, x.chosen, x.high) for x in report.tuning]
    assert ends == [(0.1, 0.1, 0.2), (0.1, 0.2, 0.2)]
    lead, law = laws(report.tuning)
    assert (report.lead, report.headline) == (lead, *law)


def test_the_report_says_what_was_tuned_and_flags_an_edge(make_study):
    study = make_study("--tune=lr=0.1:0.3:linear:3", "--tune=period=2,4", seeds=1)
    grid = {
        **{"0.1,2": [0.5], "0.2,2": [0.7], "0.3,2": [0.6]},
        **{"0.1,4": [0.8], "0.2,4": [0.9], "0.3,4": [0.4]},
    }
    peak = {"0.1": [0.1], "0.2": [0.9], "0.3": [0.3]}  # it lacks the period
    write_trials(list_run_sets(study), {"sync_sgd": peak, "bmuf": grid})
    final_runs = final(study, ({"lr": "0.2"}, {"lr": "0.2", "period": "4"}))
    report = analysis.make_report(study, final_runs, "")
    lr, grid_lr, period = report.tuning
    assert (lr.label, lr.flag, lr.chosen, lr.at_edge) == ("sync_sgd", "lr", 0.2, False)
    assert lr.scores == pytest.approx([0.1, 0.9, 0.3])
    assert (grid_lr.chosen, grid_lr.at_edge) == (0.2, False)
    assert grid_lr.scores == pytest.approx([0.8, 0.9, 0.6])  # over both periods
    assert (period.flag, period.chosen, period.at_edge) == ("period", 4.0, True)
    assert period.scores == pytest.approx([0.7, 0.9])
    tuned = [{"lr": 0.2}, {"lr": 0.2, "period": 4.0}]
    assert [row.tuned for row in report.rows] == tuned
    assert [row.at_edge for row in report.rows] == [[], ["period"]]
    assert [*map(find_remarks(report).count, ("edge", "tuned", "budgets"))] == [1, 1, 1]


@pytest.mark.parametrize("times", [(1, 1), (4, 4), (4, 1)])
def test_few_examples_are_said_to_weigh_much(make_study, times):
    """There are so many times 100 and 50 examples for sync_sgd, and for bmuf.

    The interval is 3.9 points wide, and the best two scores are 1 point apart.
    """
    study = make_study("--tune=lr=0.1,0.2,0.3", seeds=5)
    scores = {"0.1": [0.90], "0.2": [0.95], "0.3": [0.94]}
    for point, x in zip(list_run_sets(study), times, strict=True):
        write_trials([point], dict.fromkeys(BYTES, scores), examples={"test": 50 * x})
    ends = {("sync_sgd", ""): [0.9] * 5, ("bmuf", ""): [0.91, 0.92, 0.93, 0.94, 0.95]}
    final_runs = make_runs(study, ends, [{"lr": "0.2"}] * 2)
    for r, x in zip(final_runs, times, strict=True):
        for seed in r.summaries:
            change_summary(r, seed, examples={"train": 1, "test": 100 * x})
    report = analysis.make_report(study, final_runs, "")
    expected = ["examples", "validation"] if 1 in times else []
    assert [
        x for x in find_remarks(report) if x in ("examples", "validation")
    ] == expected
    assert times[0] == 4 or "sync_sgd 2 of 3" in report.remarks[-1]
    assert times[1] == 4 or "worth 2 points" in report.remarks[-1]
    assert times[1] == 4 or "bmuf 2 of 3" in report.remarks[-1]


@pytest.mark.parametrize(
    ("values", "expected_remarks"),
    [(["4"], {"untuned", "budgets"}), (["2", "4"], {"budgets", "tuned"})],
)
def test_one_value_is_not_called_tuned_and_unequal_budgets_are_said(
    make_study, values, expected_remarks
):
    study = make_study(f"--tune=period={','.join(values)}", seeds=1)
    write_trials(list_run_sets(study), {"bmuf": {x: [0.1 * float(x)] for x in values}})
    report = analysis.make_report(study, final(study, ({}, {"period": "4"})), "")
    assert expected_remarks == {"untuned", "budgets", "tuned"} & {*find_remarks(report)}
    assert [row.tuned for row in report.rows] == [{}, {"period": 4.0}]


EQUAL_SCORES = {x: [0.5] for x in ["0.05", "0.1", "0.2", "0.24", "0.4", "0.415", "0.8"]}
FOLLOWED = "A best value at an end of its range was followed beyond it"
TRIALS = "Rows had unequal numbers of trials"


@pytest.mark.parametrize(
    ("beyond", "counts", "names"),
    [
        # (the values that each tried beside 0.1, 0.2 and 0.4)
        ({"sync_sgd": [], "bmuf": []}, "", ""),
        ({"sync_sgd": [], "bmuf": ["0.8"]}, "sync_sgd 3; bmuf 4", "bmuf (--lr)"),
        ({"sync_sgd": [], "bmuf": ["0.05"]}, "sync_sgd 3; bmuf 4", "bmuf (--lr)"),
        # As many trials, and yet both were followed, each at another end.
        ({"sync_sgd": ["0.05"], "bmuf": ["0.8"]}, "", "sync_sgd (--lr), bmuf (--lr)"),
        # Near 0.2 within the range, and near 0.4 after a step that was impossible.
        ({"sync_sgd": ["0.24"], "bmuf": []}, "sync_sgd 4; bmuf 3", ""),
        ({"sync_sgd": [], "bmuf": ["0.415"]}, "sync_sgd 3; bmuf 4", ""),
    ],
)
def test_what_was_followed_beyond_an_end_is_said_of_those_rows_alone(
    make_study, beyond, counts, names
):
    study = make_study("--tune=lr=0.1:0.4:log:3+2", seeds=1)
    run_sets = []
    for point, run_set in zip(list_run_sets(study), final(study, None), strict=True):
        values = ["0.1", "0.2", "0.4", *beyond[point.variant.label]]
        trials = [make_trial(study, point, {"lr": value}) for value in values]
        write_trials(
            [point._replace(trials=trials)], dict.fromkeys(BYTES, EQUAL_SCORES)
        )
        run_sets.append(run_set._replace(trials=[x.read() for x in trials]))
    remarks = analysis.make_report(study, run_sets, "").remarks
    text_by_remark = {x.partition(": ")[0]: x.partition(": ")[2] for x in remarks}
    assert text_by_remark.get(TRIALS, ".") == f"{counts}."
    assert text_by_remark.get(FOLLOWED, ".") == f"{names}."


def test_rows_that_lack_a_tuned_flag_are_named_and_no_end_is_said_to_be_left(
    make_study,
):
    study = make_study("--tune=period=2,4", seeds=1)
    write_trials(list_run_sets(study), {"bmuf": {"2": [0.1], "4": [0.9]}})
    remarks = analysis.make_report(
        study, final(study, ({}, {"period": "4"})), ""
    ).remarks
    assert not any(FOLLOWED in x for x in remarks)
    assert (
        f"{TRIALS}: sync_sgd 0; bmuf 2. sync_sgd lacks a tuned flag, and tried only "
        "the values of the others."
    ) in remarks


# What a reader must know.


@pytest.mark.parametrize(
    ("seeds", "fields", "remarks"),
    [
        (1, {}, ["few_seeds"]),
        (4, {}, ["few_seeds"]),
        (5, {"center_step": 27}, ["late_steps"]),
        (5, {"center_step": 0}, ["no_sync"]),
        (5, {"not_counted": "the tables"}, ["not_counted"]),
        (5, {"config": {"partition": "label"}}, ["partition"]),
    ],
)
def test_remarks_tell_what_to_take_care_of(plain, seeds, fields, remarks):
    # Algorithms of which the same is to be said share a line.
    assert find_remarks(plain([0.8] * seeds, [0.8] * seeds, **fields)) == remarks


def test_what_is_not_counted_is_said_of_each_variant(plain):
    run_changes = {("bmuf", seed): {"not_counted": "the tables"} for seed in range(5)}
    (remark,) = plain([0.8] * 5, [0.8] * 5, run_changes=run_changes).remarks
    assert remark.endswith("sent at most: the tables (bmuf).")


def test_a_fair_study_of_enough_seeds_needs_no_remark(plain):
    report = plain([0.8] * 5, [0.7] * 5)
    assert report.remarks == [] and report.tuning == [] and report.paper is None
    assert [row.tuned for row in report.rows] == [{}, {}]


# Learning rates.


def rated(study, rates):
    """A report of runs with these nominal and effective rates, algorithm by algorithm;
    bmuf is better in every seed."""
    finals = {}
    for number, point in enumerate(list_run_sets(study)):
        finals[point.variant.label, point.point] = [
            0.8 + 0.001 * seed + (0.01 + 1e-5 * seed) * number for seed in point.seeds
        ]
    runs = make_runs(study, finals)
    for r, (lr, effective) in zip(runs, rates, strict=True):
        for seed in r.summaries:
            change_summary(r, seed, lr=lr, effective_lr=effective)
    return analysis.make_report(study, runs, "")


NOMINAL = [(0.05, 0.05), (0.05, 0.4)]
SWEPT_RATE = "--sweep=lr=0.1,1"


@pytest.mark.parametrize(
    ("argv", "rates", "terms"),
    [
        ([], NOMINAL, ONE_NOMINAL),
        # Rates are compared at each value of a sweep.
        ([SWEPT_RATE], [(0.1, 0.1), (1.0, 1.0), (0.1, 0.8), (1.0, 8.0)], ONE_NOMINAL),
        ([SWEPT_RATE], [(0.1, 0.1), (1.0, 1.0)] * 2, ""),
        ([], [(0.05, 0.05), (0.05, 0.07)], ""),  # not far enough apart
        (["--tune=lr=0.1,0.2"], NOMINAL, ""),
        (["--tune=lr=0.1", "--tune=period=2,4"], NOMINAL, ONE_NOMINAL),
        (["--tune=block_lr|lr=0.1,0.2"], NOMINAL, ""),  # one range tunes both
        # One algorithm at several rates compares rates and means to.
        (["--algos=bmuf --lr 0.1,bmuf --lr 1"], [(0.1, 0.8), (1.0, 8.0)], ""),
        (["--algos=bmuf"], [(0.1, 0.8)], ""),
        (
            ["--algos=sync_sgd,A=bmuf --optimizer adam"],
            [(0.05, 0.05), (0.003, 0.024)],
            BY_DEFAULT,
        ),
        (
            ["--algos=sync_sgd,'B, N'=bmuf --nesterov --lr 0.4,bmuf --lr 1,bmuf"],
            [(0.05, 0.05), (0.4, 3.2), (1.0, 8.0), (0.05, 0.4)],
            BY_HAND,
        ),
        (
            ["--algos=sync_sgd --lr 0.05,bmuf --lr 0.4"],
            [(0.05, 0.05), (0.4, 3.2)],
            BY_HAND,
        ),
    ],
)
def test_where_effective_rates_differ_the_report_says_on_what_terms(
    make_study, argv, rates, terms
):
    study = make_study(*argv)
    if study.tune:
        lr = {"0.1": [0.5], "0.2": [0.4], "0.1,2": [0.5], "0.1,4": [0.4]}
        write_trials(list_run_sets(study), {"sync_sgd": lr, "bmuf": lr})
    report = rated(study, rates)
    assert report.terms == terms
    assert ("unfair" in find_remarks(report)) == bool(terms)
    assert not any(x.startswith("--lr, --period: tuned") for x in report.remarks)
    assert terms in page.screen(report, study.out).splitlines()[1]
    if terms == ONE_NOMINAL:
        assert {x.comparison.kind for x in report.rows} <= {Kind.BASELINE, Kind.ABOVE}


def test_all_of_the_largest_and_smallest_rates_are_named(make_study):
    study = make_study("--algos=sync_sgd,A=sync_sgd,bmuf,B=bmuf")
    report = rated(study, [(0.05, 0.05), (0.05, 0.05), (0.05, 0.4), (0.05, 0.4)])
    assert (
        "the largest effective rate (0.4 of bmuf and B) is 8 times the smallest (0.05 "
        "of sync_sgd and A)"
    ) in report.remarks[0]


def test_the_largest_ratio_of_rates_is_said_to_be_of_its_value_of_the_sweep(make_study):
    study = make_study(SWEPT_RATE)
    report = rated(study, [(0.1, 0.1), (1.0, 1.0), (0.1, 0.8), (1.0, 4.0)])
    assert (
        "at lr=0.1 the largest effective rate (0.8 of bmuf at lr=0.1) is 8 times the "
        "smallest (0.1 of sync_sgd at lr=0.1)"
    ) in report.remarks[0]


def test_who_has_no_effective_rate_is_left_out_of_the_comparison_of_rates(make_study):
    study = make_study("--algos=sync_sgd,bmuf,sign_sgd")
    report = rated(study, [(0.05, 0.05), (0.05, 0.4), (0.05, None)])
    assert report.terms and "rate of sign_sgd is not known" in report.remarks[1]
    study = make_study("--algos=sync_sgd,sign_sgd")
    report = rated(study, [(0.05, 0.05), (0.05, None)])
    assert report.terms == "" and find_remarks(report) == ["rates_unknown"]


def test_figures_have_no_time_on_a_network_that_nobody_named(make_study):
    study = replace(make_study(seeds=1), network=())
    report = analysis.make_report(study, final(study, None), "")
    assert report.rows[0].seconds.keys() == {*PRESETS}
    assert not any("time" in x.name for x in figures.plots(report))


# What was run.


def test_settings_and_environment_are_those_of_the_runs(make_study):
    study = make_study("--sweep=period=2,4", seeds=2)
    sizes = {"train": 4000, "test": 1000}
    run_changes = {("bmuf", 1): {"versions": {"syncalgos": "1.3"}, "processor": "P"}}
    made_runs = make_runs(study, SWEPT, run_changes=run_changes, examples=sizes)
    for r, period in zip(made_runs[1:], (2, 4), strict=True):
        r.config["arguments"] = {"period": period, "nesterov": True}
    report = analysis.make_report(study, made_runs, "")
    expected = {
        "arguments": "bmuf: nesterov True",  # the rows give the period
        **{"task": "digits", "workers": "2", "local steps": "30"},
        **{"global batch": "16", "seeds": "0 to 1", "inner optimizer": "sgd"},
        **{"momentum": "0.9", "devices": "2 × cpu", "task: model": "mlp"},
        "partition of the examples": "iid",
        "examples": "4,000 for training, 1,000 for testing",
    }
    assert expected.items() <= report.settings.items()
    assert "period over 2, 4" in report.settings["swept"]
    assert not {"weight decay", "gradients clipped to"} & report.settings.keys()
    expected = {"syncalgos": "1.2.3 and 1.3", "machine": "2 × cpu and 2 × cpu (P)"}
    assert report.environment == expected


@pytest.mark.parametrize(("files", "task_name"), [("aa", "a.csv"), ("ab", "digits")])
def test_a_report_is_named_after_a_file_if_all_runs_read_it(
    make_study, files, task_name
):
    study = make_study(seeds=1)
    runs = make_runs(study, {("sync_sgd", ""): [0.8], ("bmuf", ""): [0.7]})
    for run, file in zip(runs, files, strict=True):
        run.config["task_arguments"]["file"] = f"data/{file}.csv"
    assert analysis.make_report(study, runs, "").settings["task"] == task_name


def test_sizes_of_data_sets_that_differ_are_those_of_each_variant(plain):
    run_changes = {("bmuf", 0): {"examples": {"train": 9, "test": 2}}}
    report = plain(
        [0.8], [0.8], run_changes=run_changes, examples={"train": 4, "test": 1}
    )
    format_sizes = "{}: {} for training, {} for testing".format
    expected = f"{format_sizes('sync_sgd', 4, 1)}; {format_sizes('bmuf', 9, 2)}"
    assert report.settings["examples"] == expected


def test_a_presets_paper_is_in_its_report(make_study):
    study = replace(make_study(seeds=1), preset="block-momentum-long")
    runs = make_runs(study, {("sync_sgd", ""): [0.8], ("bmuf", ""): [0.7]})
    paper = analysis.make_report(study, runs, "").paper
    assert paper == presets.paper("block-momentum-long")


def test_every_line_of_every_run_says_what_it_is_of_and_has_a_name(make_study):
    study = make_study("--sweep=period=2,4", "--algos=sync_sgd,B=bmuf", seeds=2)
    finals = {("B" if a == "bmuf" else a, point): x for (a, point), x in SWEPT.items()}
    lines = [*study_lines(make_runs(study, finals))]
    assert len(lines) == 3 * 2 * len(EVALUATION_STEPS)
    assert lines[0]["label"] == "sync_sgd" and "period" not in lines[0]
    run_lines = [
        x for x in lines if (x["label"], x.get("period"), x["seed"]) == ("B", 4, 1)
    ]
    assert [x["algo"] for x in run_lines] == ["bmuf"] * 3
    assert [x["step"] for x in run_lines] == [*EVALUATION_STEPS]
    assert [x["test_accuracy"] for x in run_lines] == pytest.approx([0.1, 0.4, 0.5])
    assert {x["bytes_per_worker"] for x in run_lines} == {100, 200, 300}
