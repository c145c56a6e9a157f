"""Trains a run, and writes config.json, metrics.jsonl and summary.json."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

import syncalgos
from experiments.cli import terminal
from experiments.cli.stopping import keeping_results
from experiments.tasks.task import Task
from experiments.training import export, records
from experiments.training.config import SETTINGS, Settings
from experiments.training.loop import Outcome, Save, train
from experiments.training.measurements import memory, sends
from experiments.training.process_group import on_host
from experiments.training.records import Line, Progress
from experiments.training.run import ORIGIN, Run
from experiments.training.trackers import Tracked, Tracker, Tracking
from syncalgos import Replica, Strategy, TrainState
from syncalgos.combinators import introspection


def train_and_record(
    run: Run,
    out: Path | None,
    report: terminal.Report,
    asked_to_stop: Callable[[], int],
    save: Save = lambda state, progress, last: None,
    progress: Progress | None = None,
    on_evaluation: Callable[[Line], None] | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Trains, writes metrics.jsonl, and returns the summary without writing it.

    Args:
        run: the run to train; its state cannot be used afterwards.
        out: the folder of `record_config`; None writes nothing.
        report: the display of the progress.
        asked_to_stop: called before each dispatch.
        save: saves a checkpoint; by default there are none.
        progress: the progress of a resumed run.
        on_evaluation: called with each line of metrics.jsonl, in the first process.
    """
    metrics = None if out is None else records.Metrics(out, run.group.note)

    def write(state: TrainState, lines: list[Line]) -> None:
        c, line = run.config, lines[-1]
        if metrics is not None and run.group.is_first:
            metrics.add(lines)
        is_best = c.export and c.keep == "best" and best(run, lines) is line
        if is_best and (why := export_center(run, state, line["step"])):
            terminal.say(why)
        if on_evaluation is not None and run.group.is_first:
            on_evaluation(line)

    with keeping_results() as has_trained:
        outcome = train(
            run,
            progress or Progress(),
            report,
            asked_to_stop,
            has_trained,
            write,
            save,
        )
    return outcome, summary_of(run, outcome)


def record_config(run: Run, command: list[str], out: Path, lines: list[Line]) -> None:
    """Writes config.json and the lines so far; removes an earlier run's files.

    Only the first process writes.

    Raises:
        OSError: it cannot be written.
    """
    if not run.group.is_first:
        return
    config = {
        **run.facts,
        "command": command,
        "settings": {name: getattr(run.config, name) for name in SETTINGS},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    records.write_json(out / "config.json", config)
    records.write_metrics(out, lines)


def tracking(
    run: Run, progress: Progress, out: Path | None, own: Iterable[Tracker] = ()
) -> Tracking:
    """Starts and returns the trackers of a run, which follow the first process."""
    c = run.config
    found = Tracking(c.track, own) if run.group.is_first else Tracking(())
    settings = {name: getattr(c, name) for name in SETTINGS}
    found.start(
        Tracked(
            name=f"{c.task}-{c.algo}" if out is None else out.absolute().name,
            id=progress.run_id or secrets.token_hex(16),
            config={**run.facts, **settings, **c.arguments, **c.task_arguments},
            folder=out,
            lines=progress.lines,
        )
    )
    return found


def export_center(run: Run, state: TrainState, step: int) -> str:
    """Writes the center and its origin to a file; returns why it could not, or ""."""
    # All processes take part.
    center = jax.tree.map(on_host, run.trainer.center(state))
    path = run.config.export
    if path is None or not run.group.is_first:
        return ""
    try:
        export.save(path, center, header(run, step))
    except (OSError, SafetensorError) as error:  # the run's files must still be written
        return f"--export {path}: {getattr(error, 'strerror', None) or error}"
    return ""


def header(run: Run, step: int) -> dict[str, str]:
    """Returns the header of an exported model: its run, and the step."""
    found = {name: records.plain(run.facts[name]) for name in ORIGIN}
    found |= {"steps": step, "syncalgos": syncalgos.__version__}
    return {name: json.dumps(x) for name, x in found.items()}


def best(run: Run, lines: Iterable[Line]) -> Line | None:
    """Returns the best of the planned evaluations, which exclude that of a stop."""
    planned = {*run.config.evaluations}
    return records.best(line for line in lines if line["step"] in planned)


def summary_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Returns summary.json, without the fields that its writer adds."""
    progress, line = outcome.progress, outcome.line
    sent = run.rounds.sent(progress)
    steps, seconds, total = line["step"], progress.seconds, line["bytes_per_worker"]
    sha256 = params_sha256(run.trainer.center(outcome.state))
    decided = introspection.has(run.method.strategy, "decided")
    moving = np.diff(sent.per_step[:steps], prepend=0.0) > 0 if sent else None
    # For modelling their time.
    shown = {} if sent is None else sends.to_json(sends.sends(sent))
    delay = delay_of_sends(run.config, run.task, run.method.algorithm)
    return {
        **run.facts,
        **{name: line[name] for name in line if name != "step"},
        "steps": steps,
        "syncs": None if moving is None else int(moving.sum()),
        "decided": len({step for step, _ in progress.decided}) if decided else None,
        "steps_per_second": steps / seconds if seconds else 0.0,
        "params_sha256": sha256,
        "temp_bytes": run.trainer.temp_bytes,
        "device_bytes": memory.device_bytes(outcome.state),
        "device_bytes_without_mesh": memory.bytes_without_mesh(outcome.state),
        "bytes_per_device": sends.each_device(total, run.config.worker_devices),
        "lane_form": progress.lane_form,
        "not_counted": run.task.sends or None,
        "sends": {**shown, "delay": delay} if shown else None,
        "center_step": run.rounds.center_step(steps),
        "export": None,
        "diverged": outcome.diverged_at is not None,
        "diverged_at": outcome.diverged_at,
        "not_finite_workers": outcome.not_finite,
        "stopped": bool(outcome.stopped),
        "resumed_at": progress.resumed_at,
    }


def delay_of_sends(config: Settings, task: Task, algorithm: Strategy) -> int:
    """Returns how many local steps a message may take; 0 if the run waits for it."""
    # An average of the optimizer's state, and shared tables, are used at once.
    waits = config.opt_state_at_sync == "average" or task.kept == "shared"
    return 0 if waits else algorithm.late


def params_sha256(replica: Replica) -> str:
    """Returns the SHA-256 of the params' leaves in order."""
    # The same command gives the same hash: tests use it to show unchanged numbers.
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(on_host(leaf).tobytes())
    return digest.hexdigest()
