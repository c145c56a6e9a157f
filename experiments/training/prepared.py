"""Prepared runs: made of a config, trained and recorded."""

import hashlib
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import syncalgos
from experiments.cli import terminal
from experiments.cli.errors import BadRequest, explain
from experiments.cli.signals import keeping_results
from experiments.exit_codes import Terminated
from experiments.pipeline import partition
from experiments.pipeline.indices import check_indices
from experiments.tasks.contract import check_apply, check_model, check_shardings
from experiments.tasks.task import Data, Task
from experiments.training import export, records
from experiments.training.components import Components, make_components, make_trainer
from experiments.training.config import SETTINGS, RunConfig
from experiments.training.defaults import facts
from experiments.training.loop import Hooks, Outcome, Save, train
from experiments.training.measurements import displacements, memory, sends
from experiments.training.measurements.effective_lr import effective_lr
from experiments.training.measurements.rounds import Rounds, planned
from experiments.training.process_group import ALONE, ProcessGroup, on_host
from experiments.training.records import Progress
from experiments.training.strategies import steady_strategy
from syncalgos import Communication, Replica, TrainState
from syncalgos.combinators import introspection

# Where a model comes from, as an exported one says, too.
ORIGIN = ("algo", "arguments", "task", "task_arguments", "seed", "workers")
COMMON = (*ORIGIN, "batch_size", "optimizer", "lr", "accumulate", "partition")
COMMON += ("validation",)


@dataclass(frozen=True)
class PreparedRun(Components):
    """A run that can start: its components and what is known before it trains.

    Attributes:
        state: where it starts; training gives it up.
        rounds: what is sent, and when.
        facts: what config.json and summary.json have in common.
    """

    state: TrainState
    rounds: Rounds
    facts: dict[str, Any]


def prepare(
    config: RunConfig, data: Data | None = None, group: ProcessGroup = ALONE
) -> PreparedRun:
    """Prepares a run; the arguments and errors are those of `make_components`."""
    parts = make_components(config, data, group)
    return initialized(parts)


def initialized(parts: Components) -> PreparedRun:
    """Makes the model and counts what will be sent.

    Raises:
        BadRequest: what the task or the strategy cannot do.
    """
    params, state = _start(parts)
    facts = _facts(parts, _effective_lr(parts, params))
    rounds = planned(parts, state)
    if not rounds.is_fixed:
        how = "counted as it is decided" if rounds.sent(Progress()) else "not counted"
        terminal.say(f"what is sent depends on more than the step: bytes are {how}")
    run = PreparedRun(**vars(parts), state=state, rounds=rounds, facts=facts)
    if rounds.ends is None or not parts.config.displacements:
        return run
    return _measured(run, rounds.ends)


def reseeded(run: PreparedRun, seed: int) -> PreparedRun:
    """Returns the same run from another seed, with its compiled programs.

    Only for a run that draws from the seed at its start alone: see `draws`.
    """
    # Compilation is most of a short run, and is paid once for all seeds this way. On
    # CPUs it beats stacking seeds as one more vmap axis, as lanes fill the cores.
    config = replace(run.config, seed=seed)
    shards = partition.shards(
        config.partition, run.data.groups, run.data.examples, config.workers, seed
    )
    facts = {**run.facts, "seed": seed}
    run = replace(run, config=config, shards=shards, facts=facts)
    return replace(run, state=_start(run)[1])


def _measured(run: PreparedRun, ends: np.ndarray) -> PreparedRun:
    """Returns the same run, whose strategy notes the workers' displacements."""
    # The rounds must be known first: measuring sends params, which no run shall count.
    strategy = displacements.measured(run.strategy, ends, run.config.evaluations)
    trainer = make_trainer(run.config, run.task, run.optimizer, strategy)
    run = replace(run, trainer=trainer)
    return replace(run, state=_start(run)[1])


def _effective_lr(parts: Components, params: Any) -> float | None:
    """Returns the effective learning rate, for the first process, which writes it."""
    c = parts.config
    if not parts.group.is_first:
        return math.nan
    try:
        steady = steady_strategy(c, parts.optimizer, parts.group.hosts, parts.task)
        return effective_lr(steady, params, parts.optimizer, c.workers, c.lr)
    except Exception as error:  # one figure of the report must not end the run
        terminal.say(
            f"no effective learning rate found: {type(error).__name__}: {error}"
        )
        return math.nan


def _start(parts: Components) -> tuple[Any, TrainState]:
    """Returns the model's params and the state that training starts from."""
    c = parts.config
    with refused("task", c.task):
        params, buffers = check_model(parts.task, c.seed)
        if ":" in c.task:  # a user's own is tried out on shapes alone
            check_apply(parts.task, params, buffers, parts.data.test)
            check_indices(parts.task, params, buffers, parts.data)
        if c.mesh is not None:
            check_shardings(parts.task, params, parts.trainer.layout)
        if c.export is not None:
            export.named(Replica(params, (), buffers))
    with refused("algo", c.algo):
        return params, parts.trainer.init(params, buffers, c.seed)


@contextmanager
def refused(flag: str, name: str) -> Iterator[None]:
    """Raises errors inside as those for the user; a bug of ours as it is.

    Args:
        flag: algo or task.
        name: its value.
    """
    try:
        yield
    except Terminated:
        raise
    # A user's task or strategy may raise anything.
    except (Exception, SystemExit) as error:
        if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
            raise BadRequest("the model does not fit in memory") from error
        if ":" in name:
            raise explain(f"--{flag} {name}", error) from error
        if isinstance(error, ValueError):
            raise BadRequest(str(error)) from error
        raise


def train_and_record(
    run: PreparedRun,
    out: Path,
    report: terminal.Report,
    asked_to_stop: Callable[[], int],
    save: Save | None = None,
    progress: Progress | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Trains, and writes metrics.jsonl; returns the summary, yet to be written.

    Args:
        run: whose state is given up.
        out: the folder of `record_config`.
        report: where progress is shown.
        asked_to_stop: looked at before each dispatch.
        save: as in `Hooks`; None keeps no checkpoint.
        progress: of a run that goes on.
    """
    metrics = records.Metrics(out, run.group.note)
    with keeping_results() as has_trained:
        hooks = Hooks(
            asked_to_stop=asked_to_stop,
            has_trained=has_trained,
            write=metrics.add if run.group.is_first else lambda lines: None,
            save=save or (lambda state, progress, last: None),
            sent=run.rounds.sent,
        )
        outcome = train(run, run.state, progress or Progress(), report, hooks)
    return outcome, _summary(run, outcome)


def record_config(
    run: PreparedRun, command: list[str], out: Path, lines: list[records.Line]
) -> None:
    """Writes config.json and the lines so far; an earlier run's files are removed.

    Raises:
        OSError: it cannot be written.
    """
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


def _facts(parts: Components, effective_lr: float | None) -> dict[str, Any]:
    """Returns what config.json and summary.json have in common."""
    layout = parts.trainer.layout
    return {
        **{name: getattr(parts.config, name) for name in COMMON},
        "effective_lr": effective_lr,
        "backend": layout.backend,
        "devices": len(layout.devices),
        "lanes": layout.lanes,
        "mesh": dict(layout.inner),
        "processes": layout.processes,
        "platform": layout.devices[0].platform,
        "examples": {
            "train": parts.data.examples,
            "test": len(next(iter(parts.data.test.values()))),
        },
        "versions": versions(),
        "commit": commit(),
    }


@cache  # each checkpoint asks, and reading the packages' metadata takes 30 ms
def versions() -> dict[str, str]:
    """Returns the versions of all that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "syncalgos": syncalgos.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


@cache  # code that is edited while runs are made is not the code that makes them
def commit() -> str | None:
    """Returns the checkout's commit, "-dirty" if files differ; None without one."""
    root = Path(syncalgos.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    # By --exclude no tag is named; a status of others' must not wait for this one.
    words = ("git", "--no-optional-locks", "describe", "--always", "--dirty")
    words += ("--abbrev=12", "--exclude=*")
    try:
        found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None


def _summary(run: PreparedRun, outcome: Outcome) -> dict[str, Any]:
    """Returns summary.json, but for what its writer adds."""
    progress, line = outcome.progress, outcome.line
    sent = run.rounds.sent(progress)
    steps, seconds, total = line["step"], progress.seconds, line["bytes_per_worker"]
    sha256 = params_sha256(run.trainer.center(outcome.state))
    decided = introspection.decides(run.strategy)
    moving = np.diff(sent.per_step[:steps], prepend=0.0) > 0 if sent else None
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
        "sends": None if sent is None else _sends(run, sent),
        "center_step": run.rounds.center_step(steps),
        "export": None,
        "diverged": outcome.diverged_at is not None,
        "diverged_at": outcome.diverged_at,
        "not_finite_workers": outcome.not_finite,
        "stopped": bool(outcome.stopped),
        "resumed_at": progress.resumed_at,
    }


def _sends(run: PreparedRun, sent: Communication) -> dict[str, Any]:
    """Returns the sends of each step and their delay, for a model of their time."""
    delay = delay_of_sends(run.config, run.task)
    return {**sends.to_json(sends.sends(sent)), "delay": delay}


def delay_of_sends(config: RunConfig, task: Task) -> int:
    """Returns the local steps that a run's messages may take; 0: it waits for them."""
    # An average of the optimizer's state, and shared tables, are used at once.
    waits = config.opt_state_at_sync == "average" or task.kept == "shared"
    return 0 if waits else facts(config).late


def params_sha256(replica: Replica) -> str:
    """Returns the SHA-256 of the params' leaves in order."""
    # Same command, same hash: the test of every claim that numbers did not change.
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(on_host(leaf).tobytes())
    return digest.hexdigest()
