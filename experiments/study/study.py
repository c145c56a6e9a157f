"""Makes one study: the missing runs, then the report."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jax

from experiments import files
from experiments.checkpoint import lock
from experiments.command import stopping, terminal
from experiments.command.errors import (
    BadRequest,
    describe_os_error,
    explaining_errors,
    refusal,
    refusing,
)
from experiments.command.factories import TASK
from experiments.command.text_tables import terminal_width
from experiments.command.words import clean_words, literal, without
from experiments.study import analysis, jobs, making, page, worker
from experiments.study.config import PROGRAM, StudyConfig, identity
from experiments.study.jobs import ANSWER, reach
from experiments.study.making import Maker, Missing, StopRequested, StudyQueue, progress
from experiments.study.results import Report
from experiments.study.runs import (
    Loader,
    RunSet,
    choose_values,
    further_trials,
    list_command,
    run_sets,
)
from experiments.study.statistics import ACCURACY, choose_measure
from experiments.tasks.task import check_apply, check_model
from experiments.training import run_folder
from experiments.training.machine import cores, use_cpu_devices, use_devices
from experiments.training.progress import MEASURE

NAME = "study.json"
# Fields that a line of finals.jsonl has only if they differ from the line before: the
# code and the machine, which runs of earlier versions lack, the messages, and the
# command that repeats the run if --seed is added. Two devices round otherwise than one,
# by which a seed of a small model ends half a point elsewhere.
MACHINE = "commit", "versions", "processor", "devices", "lanes"
REPEATED = *MACHINE, "sends", "command"
# The fields of a summary to record, beside the measures on test data.
FINAL = "train_loss", "diverged", "bytes_per_worker", "lr", "effective_lr"


def run_study(
    config: StudyConfig, argv: Sequence[str], asked_to_stop: stopping.ReadSignal
) -> int | None:
    """Makes the missing runs, then the report of all runs.

    Returns:
        The exit code; None if it was asked to stop.

    Raises:
        BadRequest: the flags are impossible; one line.
        Unreachable: no scheduler answers.
    """
    try:
        with open_study(config) as (plan, maker):
            if config.list:
                show_commands(config, plan)
                return stopping.COMPLETED
            if not make_runs(config, plan, maker, asked_to_stop):
                return None
            runs = read_runs(plan)
            if plan.failures and not _can_report(config, plan, runs):
                return stopping.FAILED
            return _report(config, make_report(config, argv, runs), runs, plan)
    except OSError as error:
        # Such as a full disk or a lost scheduler, or a folder that is closed to us.
        # Completed runs are not made again.
        terminal.say(
            f"error: {describe_os_error(error)}: completed runs are kept; the same "
            "command continues from them"
        )
        return refusal(error, "").code


@contextmanager
def open_study(config: StudyConfig) -> Iterator[tuple[StudyQueue, Maker]]:
    """Locks a study's folder, and yields the plan of its runs.

    Raises:
        BadRequest: the flags are impossible, or the folder holds something else.
    """
    out = config.folder
    folder_lock = lock.lock_folder(config.folder)
    refusal = None
    with refusing():
        try:
            run_folder.check_writable(out)
        except BadRequest as error:  # a finished study needs no room to be reported
            if not (out / NAME).exists():
                raise
            folder_lock = nullcontext()
            refusal = error
        with folder_lock:
            _use_devices(config)
            maker = Maker()
            runs = run_sets(config, maker.loader)
            content = _identity(config, maker.loader.checksums())
            _check_folder(out, content)
            _check_measure(config, runs[0], maker.loader)
            if config.scheduler is not None:
                reach(config.scheduler, ANSWER)
            if not (out / NAME).exists():
                files.write_json(out / NAME, content)
            choose = partial(choose_values, measure_key=config.measure)
            plan = StudyQueue(
                runs, choose, partial(further_trials, config, maker.loader)
            )
            if refusal is not None and plan.missing:
                raise refusal
            yield plan, maker


def make_runs(
    config: StudyConfig,
    plan: StudyQueue,
    maker: Maker,
    asked_to_stop: stopping.ReadSignal,
) -> bool:
    """Makes all runs of a plan; returns whether it finished.

    Args:
        config: the config of the study, whose folder is open.
        plan: the missing runs.
        maker: prepares and makes runs in this process.
        asked_to_stop: function that is called after each dispatch, or all the time. If
            it asks to stop, runs in progress are discarded and completed ones are kept.

    Raises:
        ValueError: the runs lack the measure.
        OSError: a file cannot be written, or the scheduler is gone. Completed runs are
            kept.
        Unreachable: no scheduler answers.
    """
    with progress(plan) as bar, making.clean_remains(config.folder):
        if plan.num_done:
            bar.say(f"{plan.num_done} of {plan.total} runs are already complete")
        elif plan.total == 1:
            bar.say("1 run")
        else:
            bar.say(f"{plan.total} runs")
        try:
            if config.is_parallel and plan.missing:
                jobs.make_by_jobs(config, bar, asked_to_stop)
            else:
                making.make_all(maker, bar, asked_to_stop)
        except StopRequested:
            bar.say(f"stopped after {plan.num_done} of {plan.total} runs")
            return False
    return True


def write_command(
    run: Missing, devices: int | None, further_words: Sequence[str] = ()
) -> str:
    """Returns the command of one run, for job arrays and xargs.

    Args:
        run: the run.
        devices: CPU devices, and threads; None uses this machine's numbers everywhere.
        further_words: words that follow the command.
    """
    words: list[str] = []
    environ = jobs.job_environment(devices)
    if environ:
        words += ["env", *(f"{name}={value}" for name, value in environ.items())]
    words += [*list_command(run.config), "--seed", str(run.seed), *further_words]
    return shlex.join(words)


def show_commands(config: StudyConfig, plan: StudyQueue) -> None:
    """Shows the commands of the missing runs, and how many more will follow."""
    for run in plan.waiting:
        # An interrupted run continues if it has a checkpoint.
        resume_words = ["--out", str(run.folder), "--resume"]
        terminal.show(write_command(run, config.devices_per_job, resume_words))
    listed_runs = len(plan.waiting)
    later_runs = plan.missing - listed_runs
    if not plan.missing:
        terminal.say(f"all {plan.total} runs are complete")
    elif later_runs:
        terminal.say(
            f"{listed_runs} of {plan.total} runs are listed; {later_runs} more depend "
            "on these trials: list again once they are done"
        )
    else:
        terminal.say(f"{listed_runs} of {plan.total} runs are listed")


def read_runs(plan: StudyQueue) -> list[RunSet]:
    """Returns the runs to report, read from their files."""
    # A report depends only on the files: those just made are read again, too.
    run_sets: list[RunSet] = []
    for planned in plan.reported:
        if planned is None:
            continue
        run_set = planned.read()
        if run_set.summaries:
            run_sets.append(run_set)
    return run_sets


def _use_devices(config: StudyConfig) -> None:
    """Sets up the CPU devices that the runs need, before the first run starts jax."""
    if config.devices_per_job is not None:
        return use_devices(config.devices_per_job)
    # Jobs, and runs without a mesh, get the same number of devices.
    num_devices = cores()
    for points in config.points.values():
        for run_config in points.values():
            num_devices = max(num_devices, run_config.mesh_devices())
    use_cpu_devices(num_devices)
    jax.devices()


def _can_report(config: StudyConfig, plan: StudyQueue, runs: Sequence[RunSet]) -> bool:
    """Says what failed; returns whether a report is possible.

    Raises:
        BadRequest: all runs were refused.
    """
    first_run, refusal = plan.failures[0]
    if not runs and all(refused.is_request for _, refused in plan.failures):
        raise BadRequest(refusal.line)
    terminal.say(
        f"{len(plan.failures)} of {plan.total} runs failed: the same command tries "
        "them again. To run only the first of them: "
        f"{write_command(first_run, config.devices_per_job)}"
    )
    baseline = config.baseline_label
    points = {run_set.point for run_set in runs}
    baseline_points = {
        run_set.point for run_set in runs if run_set.variant.label == baseline
    }
    if points - baseline_points:
        terminal.say(f"no report: the baseline {baseline} has no run to compare with")
        return False
    return bool(runs)


def make_report(config: StudyConfig, argv: Sequence[str], runs: list[RunSet]) -> Report:
    """Returns the report of a study's runs, made by this command line."""
    # Flags that change neither the runs nor the report are left out of the command.
    # Repeating it finds the runs, instead of making them again.
    words = without(clean_words(argv), ("jobs", "scheduler"))
    return analysis.make_report(config, runs, " ".join([PROGRAM, *map(_quote, words)]))


def _quote(word: str) -> str:
    """Quotes a word for a shell; labels in single quotes stay readable."""
    is_plain = "'" in word and not {*word} & {*'"$`\\!'}
    return f'"{word}"' if is_plain else shlex.quote(word)


def _report(
    config: StudyConfig, report: Report, runs: Sequence[RunSet], plan: StudyQueue
) -> int:
    """Writes the files of a study beside those of its runs, and shows its table."""
    write_error = ""
    try:
        write_all(config, report, runs)
    except OSError as error:  # the table is still shown
        write_error = describe_os_error(error)
    # Decided before the last line is printed: later signals change nothing.
    is_done = not (plan.failures or write_error)
    code = stopping.decide(stopping.COMPLETED if is_done else stopping.FAILED)
    text = page.screen(report, config.folder, terminal_width(), not write_error)
    if write_error:
        # The last line names the report.
        terminal.show(text.rpartition("\n")[0])
        terminal.say(
            f"error: {write_error}: the report's files are incomplete; the same "
            "command writes them"
        )
    else:
        terminal.show(text)
    return code


def write_all(config: StudyConfig, report: Report, runs: Sequence[RunSet]) -> None:
    """Writes the files of a study beside those of its runs."""
    out = config.folder
    files.write(out / "metrics.jsonl", files.json_lines(study_lines(runs)))
    finals = files.json_lines(without_repeats(final_lines(runs)))
    files.write(out / "finals.jsonl", finals)
    page.write_report(report, out)


def without_repeats(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines without what the line before says, too."""
    # It is more than half of a line's bytes.
    for previous, line in pairwise(chain([{}], lines)):
        changed_line: dict[str, Any] = {}
        for key, value in line.items():
            if key not in REPEATED or value != previous.get(key, ()):
                changed_line[key] = value
        yield changed_line


def study_lines(runs: Iterable[RunSet]) -> Iterator[dict[str, Any]]:
    """Yields every line of every run's metrics, with its variant and seed."""
    for run_set in runs:
        for seed, lines in run_set.lines.items():
            for line in lines:
                yield {**_name(run_set), "seed": seed, **line}


def final_lines(runs: Iterable[RunSet]) -> Iterator[dict[str, Any]]:
    """Yields the final measures of every run, trials included, for a record."""
    for reported_runs in runs:
        for run_set in (*reported_runs.trials, reported_runs):
            is_reported = run_set is reported_runs
            names = _name(run_set, run_set.values)
            keys = (*FINAL, *MACHINE, "sends")
            for seed, summary in run_set.summaries.items():
                line = {**names, "seed": seed, "reported": is_reported}
                for key, value in summary.to_json().items():
                    if key in keys or key.startswith(MEASURE):
                        line[key] = value
                line["command"] = run_set.command
                if is_reported:  # a bit for each test example
                    line["correct"] = summary.correct
                yield line


def _name(run_set: RunSet, values: Mapping[str, str] = {}) -> dict[str, Any]:
    """Returns the fields that identify a variant at one point, and further values."""
    fields: dict[str, Any] = {
        "label": run_set.variant.label,
        "algo": run_set.variant.algo,
    }
    flag, _, value = run_set.point.partition("=")
    if flag:
        fields[flag] = literal(value)
    for name, text in values.items():
        fields[name] = literal(text)
    return fields


def _identity(config: StudyConfig, checksums: list[str]) -> dict[str, Any]:
    """Returns the content of study.json, which must match that in the folder."""
    content = {
        "settings": identity(config),
        "versions": worker.of_runs(config.factories),
        "data": {"files": checksums},
    }
    # Converted as JSON does, so that it can be compared with what is read.
    return json.loads(json.dumps(content))


def _check_measure(config: StudyConfig, run_set: RunSet, loader: Loader) -> None:
    """Raises a ValueError if no run will have the measure or can reach the target.

    The first run of the set is traced on shapes.
    """
    key = config.measure
    target = config.target
    if key is None and target is None:
        return
    seed = run_set.seeds[0]
    run_config = run_set.make_config(seed)
    plan, data = loader.plan(run_config, objects=run_set.variant.objects)
    with explaining_errors(TASK.flag, plan.config.task):
        params, buffers = check_model(plan.task, seed)
        values = check_apply(plan.task, params, buffers, data.test)
    figures = (*plan.task.figures, *plan.task.mean_figures)
    names = [f"test_{name}" for name in (*values, *figures)]
    measure = choose_measure(key, [dict.fromkeys(names, 1.0)])
    if target is not None and measure is ACCURACY and target > 1:
        raise ValueError(f"--target {target:g}: an accuracy is at most 1, such as 0.95")


def _check_folder(out: Path, content: dict[str, Any]) -> None:
    """Raises a ValueError if the folder holds something other than this study."""
    path = out / NAME
    if not path.exists():
        if any(entry.name != lock.NAME for entry in out.iterdir()):
            raise ValueError(f"--out {out} holds other files: use another folder")
        return
    try:
        recorded = files.read(path, "settings", "versions")
        with files.using(path):
            # Another syncalgos continues a study: finals.jsonl names each run's.
            expected_versions = {**content["versions"]}
            if "syncalgos" in recorded["versions"]:
                expected_versions["syncalgos"] = recorded["versions"]["syncalgos"]
            expected = {**content, "versions": expected_versions}
            differences = []
            for key, value in expected.items():
                # Studies of 0.3 did not note the user's files.
                recorded_value = recorded.get(key, value)
                if recorded_value != value:
                    differences.append(
                        f"{key} ({_describe_change(recorded_value, value)})"
                    )
    except files.Damaged as error:
        raise ValueError(f"{error}: use another --out") from None
    if differences:
        raise ValueError(
            f"--out {out} holds a study with other {differences[0]}: use another folder"
        )
    if expected != content:
        terminal.say("another syncalgos began this study: results may differ since")


def _describe_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns the first difference as text."""
    name = next(name for name in {**new, **old} if old.get(name) != new.get(name))
    noun = {"entries": "algorithms", "words": "flags"}.get(name, name)
    old_text = _format_setting(old.get(name))
    return f"{noun}: {old_text}; now: {_format_setting(new.get(name))}"


def _format_setting(value: Any) -> str:
    """Returns a setting as on a command line: "bmuf, Slow=diloco --period 64"."""
    match value:
        case [str(label), str(algo), [*words]]:
            call = " ".join([algo, *words])
            return call if label in (algo, call) else f"{label}={call}"
        case [[*_], *_]:
            return ", ".join(map(_format_setting, value))
        case [*words]:
            return " ".join(words) or "none"
        case _:
            return "none" if value is None else str(value)
