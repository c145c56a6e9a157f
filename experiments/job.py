"""One run from its request to its files."""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

import syncalgos
from experiments import export, records, screen
from experiments.effective_lr import effective_lr
from experiments.errors import BadRequest, explain
from experiments.flags import PROGRAM, Request
from experiments.plan import Plan, prepare
from experiments.tasks.task import check_apply
from experiments.train import DIVERGED_ABOVE, Outcome, train
from syncalgos import Communication, MeanCenter, Replica, Strategy, TrainState


def run(
    request: Request,
    argv: list[str],
    started: float,
    asked_to_stop: Callable[[], bool],
) -> Outcome:
    """Runs a request: header, training, files, summary.

    Args:
        request: from the command line.
        argv: its flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        asked_to_stop: looked at after each dispatch.

    Raises:
        BadRequest: what cannot be done, before anything is written.
    """
    plan = prepare(request)
    s = plan.settings
    try:
        params, buffers = _make_model(plan)
        if s.export is not None:
            export.named(Replica(params, (), buffers))
    except Exception as error:  # a user's task may raise anything
        raise _refusal("task", s.task, error) from error
    try:
        state = plan.trainer.init(params, buffers, s.seed)
    except Exception as error:  # and a user's strategy
        raise _refusal("algo", s.algo, error) from error
    sent = _count(plan, state)
    if sent is None:
        screen.say("what is sent depends on more than the step: bytes are not counted")
    try:
        effective = effective_lr(plan.steady, params, plan.optimizer, s.workers, s.lr)
    except Exception as error:  # a figure of the report must not end the run
        screen.say(f"no effective learning rate found: {type(error).__name__}: {error}")
        effective = math.nan
    facts = _facts(plan, effective)
    out = s.out or records.default_out(s.task, s.algo)
    try:
        records.start(out, {**facts, **_environment(argv, vars(s))})
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}") from error
    for text in _header(plan, request, facts):
        screen.say(text)
    outcome = train(plan, state, out, sent and sent.per_step, asked_to_stop)
    summary = _summary(plan, facts, outcome, sent)
    if s.export is not None and outcome.diverged_at is None:
        summary["export"] = _export(plan, outcome, facts)
    summary["total_seconds"] = round(time.perf_counter() - started, 3)
    records.finish(out, summary)
    screen.show(screen.summary_text(summary, out))
    for text in _remarks(plan, outcome, sent):
        screen.say(text)
    return outcome


def _make_model(plan: Plan) -> tuple[Any, Any]:
    """The task's params and buffers; a user's own task is tried out on shapes alone."""
    params, buffers = plan.task.init(jax.random.key(plan.settings.seed))
    if ":" in plan.settings.task:
        check_apply(plan.task, params, buffers, plan.data.test)
    return params, buffers


def _refusal(flag: str, name: str, error: Exception) -> Exception:
    """What to tell the user of an error; a bug of ours as it is."""
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        return BadRequest("the model does not fit in memory")
    if ":" in name:
        return explain(f"--{flag} {name}", error)
    return BadRequest(str(error)) if isinstance(error, ValueError) else error


def _remarks(plan: Plan, outcome: Outcome, sent: Communication | None) -> list[str]:
    """What the reader of the figures should know."""
    steps = outcome.line["step"]
    remarks = []
    if outcome.diverged_at is not None:
        remarks.append(
            f"diverged: the loss of step {outcome.diverged_at} was not finite, or "
            f"above {DIVERGED_ABOVE} times the first"
        )
        if plan.settings.export is not None:
            remarks.append(f"no model was written to {plan.settings.export}")
    if outcome.stopped:
        remarks.append(f"stopped after step {steps} of {plan.settings.steps}")
    if plan.settings.workers > 1 and plan.task.sends:
        remarks.append(f"not counted in what each worker sent: {plan.task.sends}")
    if plan.task.kept != "replicated":
        remarks.append(
            "the effective learning rate is that of the rest: tables follow the mean "
            "gradient at every step"
        )
    since = steps - last_sync(plan, outcome.state, sent, steps)
    if since:
        remarks.append(
            "the figures are of the global model as of the last sync: the last "
            f"{since} local steps are not in it"
        )
    return remarks


def _export(plan: Plan, outcome: Outcome, facts: dict[str, Any]) -> str | None:
    """Writes the center, with what says how it was made; returns where, if it could."""
    path = plan.settings.export
    kept = ("algo", "arguments", "task", "task_arguments", "seed", "workers")
    header = {name: json.dumps(facts[name]) for name in kept}
    header |= {"steps": json.dumps(outcome.line["step"])}
    header |= {"syncalgos": json.dumps(syncalgos.__version__)}
    try:
        export.save(path, plan.trainer.center(outcome.state), header)
    except (OSError, SafetensorError) as error:  # the run's files are still to come
        screen.say(f"--export {path}: {error}")
        return None
    return str(path)


def last_sync(
    plan: Plan, state: TrainState, sent: Communication | None, steps: int
) -> int:
    """How many steps were done at the last sync; all, where the center is the mean."""
    if isinstance(plan.algorithm.center, MeanCenter) or not steps:
        return steps
    if plan.task.kept == "shared":  # tables are sent at every step
        sent = _count(plan, state, workers=2, strategy=plan.algorithm)
    elif plan.settings.workers == 1:  # it sends nothing, yet its blocks end
        sent = _count(plan, state, workers=2)
    if sent is None:
        return steps
    moved = np.flatnonzero(np.diff(sent.per_step[:steps], prepend=0.0))
    return int(moved[-1]) + 1 if len(moved) else 0


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
        "effective_lr": effective,
        "backend": s.backend,
        "devices": len(layout.devices),
        "lanes": layout.lanes,
        "platform": layout.devices[0].platform,
    }


def _environment(argv: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """What else it takes to repeat the run."""
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn", "grain")
    return {
        "command": [*PROGRAM.split(), *argv],
        "settings": settings,
        "versions": {
            "syncalgos": syncalgos.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _header(plan: Plan, request: Request, facts: dict[str, Any]) -> list[str]:
    s = plan.settings
    batch = f"batch {s.batch_size} ({s.batch_size // s.workers} a worker)"
    if request.settings.batch_size is None and s.batch_size != plan.task.batch_size:
        unit = s.workers * s.accumulate
        batch += f", the multiple of {unit} nearest to {plan.task.batch_size}"
    lines = [
        f"{s.algo} on {s.task}: {s.steps} steps, {batch}, seed {s.seed}",
        f"{screen.layout_text(facts)}, backend {s.backend}",
        f"{s.optimizer}, learning rate {screen.rate(s.lr)}, effective "
        f"{screen.rate(facts['effective_lr'])}",
    ]
    unused = len(jax.devices()) - facts["devices"]
    if s.devices is None and s.backend != "vmap" and 0 < unused < s.workers:
        lines[1] += f" ({facts['devices']} of {len(jax.devices())} devices divide them)"
    return lines


def _count(
    plan: Plan,
    state: TrainState,
    workers: int | None = None,
    strategy: Strategy | None = None,
) -> Communication | None:
    """What each worker sends; None where only the run can tell."""
    steps = plan.settings.steps
    try:
        if strategy is None:
            return plan.trainer.communication(state, steps, workers)
        replica = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), state.replica
        )
        return syncalgos.communication(strategy, replica, workers or 1, steps)
    except ValueError:
        return None


def _summary(
    plan: Plan,
    facts: dict[str, Any],
    outcome: Outcome,
    sent: Communication | None,
) -> dict[str, Any]:
    steps = outcome.line["step"]
    moving = np.diff(sent.per_step[:steps], prepend=0.0) > 0 if sent else None
    return {
        **facts,
        **{name: outcome.line[name] for name in outcome.line if name != "step"},
        "steps": steps,
        "syncs": None if moving is None else int(moving.sum()),
        "steps_per_second": steps / outcome.seconds if outcome.seconds else 0.0,
        "params_sha256": params_sha256(plan.trainer.center(outcome.state)),
        "temp_bytes": plan.trainer.temp_bytes,
        "not_counted": plan.task.sends or None,
        "export": None,
        "diverged": outcome.diverged_at is not None,
        "diverged_at": outcome.diverged_at,
        "stopped": outcome.stopped,
    }


def params_sha256(replica: Replica) -> str:
    """The SHA-256 of the params' leaves in order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
