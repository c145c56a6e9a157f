"""A run that can start: its model, what it sends, how fast it learns; its record."""

import hashlib
import math
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import syncalgos
from experiments.cli import terminal
from experiments.cli.errors import BadRequest, Terminated, explain
from experiments.cli.flags import PROGRAM
from experiments.pipeline.loading import shards
from experiments.tasks.contract import check_apply, check_model
from experiments.training import displacements, export, records, rounds
from experiments.training.effective_lr import effective_lr
from experiments.training.loop import Hooks, Outcome, train
from experiments.training.progress import Line, Progress
from experiments.training.setup import Plan
from syncalgos import Replica, TrainState
from syncalgos.combinators import introspection


class Ready(NamedTuple):
    """A run that can start.

    Attributes:
        plan: what is trained.
        state: where it starts; training gives it up.
        counter: what each worker sends in the whole run, as far as it is known.
        rounds: whether a round ends with a step, (steps,); None where only the run can
            tell.
        untrained: why the evaluated model never changes, and the way out; "" where it
            does.
        facts: what config.json and summary.json both say.
    """

    plan: Plan
    state: TrainState
    counter: rounds.Count
    rounds: np.ndarray | None
    untrained: str
    facts: dict[str, Any]


def ready(plan: Plan) -> Ready:
    """Makes the model and counts what will be sent.

    Raises:
        BadRequest: what the task or the strategy cannot do.
    """
    params, state = _start(plan)
    sent = rounds.count(plan, state, plan.settings.steps)
    counter = rounds.counter(plan, state, sent)
    if sent is None:
        how = "counted as it is decided" if counter(Progress()) else "not counted"
        terminal.say(f"what is sent depends on more than the step: bytes are {how}")
    ends = rounds.ends(plan, state, plan.settings.steps, sent)
    never = rounds.untrained(plan, state, ends)
    facts = _facts(plan, _effective_lr(plan, params))
    run = Ready(plan, state, counter, ends, never, facts)
    return _measured(run) if plan.settings.displacements and ends is not None else run


def _effective_lr(plan: Plan, params: Any) -> float | None:
    """NaN where it is not found; for the first process, which writes it down."""
    s = plan.settings
    if not plan.team.is_first:
        return math.nan
    try:
        return effective_lr(plan.steady, params, plan.optimizer, s.workers, s.lr)
    except Exception as error:  # a figure of the report must not end the run
        terminal.say(
            f"no effective learning rate found: {type(error).__name__}: {error}"
        )
        return math.nan


def _measured(run: Ready) -> Ready:
    """The same run, whose strategy notes the workers' displacements."""
    assert run.rounds is not None
    plan, s = run.plan, run.plan.settings
    evaluated = [*range(s.eval_every, s.steps, s.eval_every), s.steps]
    strategy = displacements.measured(plan.strategy, run.rounds, evaluated)
    plan = plan._replace(trainer=plan.trainer_of(strategy))
    return run._replace(plan=plan, state=_start(plan)[1])


def reseeded(before: Ready, seed: int) -> Ready:
    """The same run from another seed, with the programs that are compiled already.

    Only for what does not draw from the seed but at the start: see `Plan.seeded`.
    """
    plan = before.plan
    settings = type(plan.settings)(**{**vars(plan.settings), "seed": seed})
    plan = plan._replace(settings=settings, shards=shards(settings, plan.data))
    _, state = _start(plan)
    return before._replace(plan=plan, state=state, facts={**before.facts, "seed": seed})


def _start(plan: Plan) -> tuple[Any, TrainState]:
    s = plan.settings
    try:
        params, buffers = check_model(plan.task, s.seed)
        if ":" in s.task:  # a user's own is tried out on shapes alone
            check_apply(plan.task, params, buffers, plan.data.test)
        if s.export is not None:
            export.named(Replica(params, (), buffers))
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # a user's task may raise anything
        raise _refusal("task", s.task, error) from error
    try:
        return params, plan.trainer.init(params, buffers, s.seed)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # and a user's strategy
        raise _refusal("algo", s.algo, error) from error


def begin(
    run: Ready, argv: list[str], out: Path, progress: Progress | None = None
) -> None:
    """Writes config.json; an earlier run's files there are removed.

    Args:
        run: that is to start.
        argv: its flags.
        out: the folder.
        progress: of the run that goes on there.

    Raises:
        OSError: it cannot be written.
    """
    config = {**run.facts, **_environment(argv, vars(run.plan.settings))}
    records.start(out, config, progress.lines if progress else [])


def _not_saved(state: TrainState, progress: Progress) -> None:
    """A run that keeps no checkpoints."""


def _not_written(lines: list[Line]) -> None:
    """The first process writes for all."""


def finish(
    run: Ready,
    out: Path,
    report: terminal.Report,
    asked_to_stop: Callable[[], int],
    save: Callable[[TrainState, Progress], None] = _not_saved,
    progress: Progress | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Trains, and writes metrics.jsonl; returns the summary, yet to be written.

    Args:
        run: whose state is given up.
        out: the folder of `begin`.
        report: where progress is shown.
        asked_to_stop: looked at before each dispatch.
        save: called where a checkpoint is due.
        progress: of a run that goes on.
    """
    team, metrics = run.plan.team, records.Metrics(out, run.plan.team.note)
    write = metrics.add if team.is_first else _not_written
    hooks = Hooks(asked_to_stop, write, save)
    progress = progress or Progress()
    outcome = train(run.plan, run.state, progress, run.counter, report, hooks)
    return outcome, _summary(run, outcome)


def _refusal(flag: str, name: str, error: BaseException) -> BaseException:
    """What to tell the user of an error; a bug of ours as it is."""
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        return BadRequest("the model does not fit in memory")
    if ":" in name:
        return explain(f"--{flag} {name}", error)
    return BadRequest(str(error)) if isinstance(error, ValueError) else error


def _facts(plan: Plan, effective: float | None) -> dict[str, Any]:
    """What config.json and summary.json both say."""
    s, layout = plan.settings, plan.trainer.layout
    return {
        "algo": s.algo,
        "arguments": plan.arguments,
        "task": s.task,
        "task_arguments": plan.task_arguments,
        "seed": s.seed,
        "workers": s.workers,
        "batch_size": s.batch_size,
        "optimizer": s.optimizer,
        "lr": s.lr,
        "accumulate": s.accumulate,
        "partition": s.partition,
        "validation": s.validation,
        "effective_lr": effective,
        "backend": s.backend,
        "devices": len(layout.devices),
        "lanes": layout.lanes,
        "processes": layout.processes,
        "platform": layout.devices[0].platform,
    }


def _environment(argv: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """What else it takes to repeat the run."""
    return {
        "command": [*PROGRAM.split(), *argv],
        "settings": settings,
        "versions": versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, str]:
    """Of all that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "syncalgos": syncalgos.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _summary(run: Ready, outcome: Outcome) -> dict[str, Any]:
    plan, facts, sent = run.plan, run.facts, run.counter(outcome.progress)
    steps, seconds = outcome.line["step"], outcome.progress.seconds
    moving = np.diff(sent.per_step[:steps], prepend=0.0) > 0 if sent else None
    return {
        **facts,
        **{name: outcome.line[name] for name in outcome.line if name != "step"},
        "steps": steps,
        "syncs": None if moving is None else int(moving.sum()),
        "decided": _decided(plan, outcome),
        "steps_per_second": steps / seconds if seconds else 0.0,
        "params_sha256": params_sha256(plan.trainer.center(outcome.state)),
        "temp_bytes": plan.trainer.temp_bytes,
        "lane_form": outcome.progress.lane_form,
        "not_counted": plan.task.sends or None,
        "center_step": rounds.center_step(plan, run.rounds, steps),
        "export": None,
        "diverged": outcome.diverged_at is not None,
        "diverged_at": outcome.diverged_at,
        "not_finite_workers": outcome.not_finite,
        "stopped": bool(outcome.stopped),
        "resumed_at": outcome.progress.resumed_at,
    }


def _decided(plan: Plan, outcome: Outcome) -> int | None:
    """The local steps at which the data decided on a sync; None where they do not."""
    if not introspection.decides(plan.strategy):
        return None
    return len({step for step, _ in outcome.progress.decided})


def params_sha256(replica: Replica) -> str:
    """The SHA-256 of the params' leaves in order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
