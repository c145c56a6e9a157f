"""One run of the command line, from its request to its files."""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

import syncalgos
from experiments.checkpoint import lock
from experiments.checkpoint.manager import FOLDER, Saves, check_config, identified
from experiments.cli import exits, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.flags import Request
from experiments.training import export, records
from experiments.training.bounds import never_reached
from experiments.training.loop import DIVERGED_ABOVE, Outcome, checkpoints
from experiments.training.prepared import Ready, begin, finish, ready
from experiments.training.process_group import ALONE, Team
from experiments.training.progress import Progress
from experiments.training.setup import Plan, prepare


def run(
    request: Request,
    argv: list[str],
    started: float,
    asked_to_stop: Callable[[], int],
    team: Team = ALONE,
) -> int:
    """Runs a request: header, training, files, summary.

    Args:
        request: from the command line.
        argv: its flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        asked_to_stop: looked at before each dispatch.
        team: the processes that train together; they have joined already.

    Returns:
        The exit code.

    Raises:
        BadRequest: what cannot be done, before anything is written.
    """
    plan = prepare(request, team=team)
    s = plan.settings
    out = s.out or records.default_out(s.task, s.algo)
    with lock.held(out) if team.is_first else nullcontext():
        return _run(plan, request, argv, out, started, asked_to_stop)


def _run(
    plan: Plan,
    request: Request,
    argv: list[str],
    out: Path,
    started: float,
    asked_to_stop: Callable[[], int],
) -> int:
    """Runs what is planned, in a folder that no other run writes to."""
    s, team = plan.settings, plan.team
    job = ready(plan)
    saves = Saves(job, out / FOLDER, started)
    job, progress = _begin(job, argv, out, saves)
    for text in _header(job, request):
        terminal.say(text)
    with terminal.report(s.steps) as report:
        outcome, summary = finish(job, out, report, asked_to_stop, saves.save, progress)
    if s.export is not None and outcome.diverged_at is None:
        summary["export"] = _export(plan, outcome, job.facts)
    spent = progress.earlier_seconds + time.perf_counter() - started
    summary["total_seconds"] = round(spent, 3)
    is_written = not team.is_first or _written(out, summary, outcome)
    if team.is_first:
        terminal.show(terminal.summary_text(summary, out))
    for text in _remarks(job, outcome, summary):
        terminal.say(text)
    if not is_written:
        return exits.FAILED
    if outcome.diverged_at is not None:
        return exits.DIVERGED
    return exits.stopped_by(outcome.stopped) if outcome.stopped else exits.DONE


def _written(out: Path, summary: dict[str, Any], outcome: Outcome) -> bool:
    """Writes the last files; what cannot be written is shown at least."""
    try:
        records.finish(out, summary, outcome.progress.lines)
    except OSError as error:
        terminal.say(f"--out {out}: {error.strerror}: its files are not complete")
        return False
    return True


def _begin(
    job: Ready, argv: list[str], out: Path, saves: Saves
) -> tuple[Ready, Progress]:
    """Starts the run's files; where the run goes on, its state and what is behind it.

    Raises:
        BadRequest: a checkpoint of another run, or files that cannot be written.
    """
    s, progress = job.plan.settings, Progress()
    if s.resume:
        found = saves.restore()
        if found is None:
            if job.plan.team.is_first:
                check_config(out, job)
            terminal.say(f"no checkpoint in {out}: the run starts from the beginning")
        else:
            state, progress = found
            job = job._replace(state=state)
            terminal.say(f"going on from the checkpoint of step {progress.step}")
    progress = identified(progress, job.plan.team)
    try:
        if job.plan.team.is_first:
            begin(job, argv, out, progress)
        saves.prune(progress.step)
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}") from error
    return job, progress


def _remarks(job: Ready, outcome: Outcome, summary: dict[str, Any]) -> list[str]:
    """What the reader of the figures should know."""
    plan, steps = job.plan, outcome.line["step"]
    remarks = []
    since = steps - summary["center_step"]
    if since and not summary["center_step"]:
        why = job.untrained or f"no sync came in these {steps} steps"
        remarks.append(f"the figures are of the model as it was at the start: {why}")
    elif since:
        remarks.append(
            "the figures are of the global model as of the last sync: the last "
            f"{since} local steps are not in it"
        )
    if outcome.diverged_at is not None:
        remarks.append(
            f"diverged: the loss of step {outcome.diverged_at} was {_how(outcome)}"
        )
        if plan.settings.export is not None:
            remarks.append(f"no model was written to {plan.settings.export}")
    if outcome.stopped:
        remarks.append(
            f"stopped after step {steps} of {plan.settings.steps}: --resume goes on"
        )
    remarks += _unsaved(plan, outcome)
    if plan.settings.workers > 1 and plan.task.sends:
        remarks.append(f"not counted in what each worker sent: {plan.task.sends}")
    if plan.task.kept != "replicated":
        remarks.append(
            "the effective learning rate is that of the rest: tables follow the mean "
            "gradient at every step"
        )
    return remarks


def _unsaved(plan: Plan, outcome: Outcome) -> list[str]:
    """Which checkpoint is the newest, if a later one could not be saved."""
    end, saved = outcome.progress.step, outcome.progress.saved
    if outcome.diverged_at is not None:  # nothing is saved from there on
        end = outcome.diverged_at
    due = [x for x in checkpoints(plan.settings) if x <= end]
    if saved >= (end if outcome.stopped else max(due, default=0)):
        return []
    if not saved:
        return ["no checkpoint could be saved: --resume would start from the beginning"]
    return [f"the newest checkpoint is of step {saved}: --resume would go on from it"]


def _how(outcome: Outcome) -> str:
    """Says in which way the loss was too large, and on which workers."""
    loss, first = outcome.too_large, outcome.progress.first_loss
    if loss is not None and math.isfinite(loss):
        return f"{loss:.3g}, above {DIVERGED_ABOVE} times the first, {first:.3g}"
    workers = outcome.not_finite
    if not workers:  # the sum over them was too large
        return "not finite"
    few = ", ".join(str(worker) for worker in workers[:4])
    more = f" and {len(workers) - 4} more" if workers[4:] else ""
    noun = "worker" if len(workers) == 1 else "workers"
    return f"not finite on {noun} {few}{more}"


def _export(plan: Plan, outcome: Outcome, facts: dict[str, Any]) -> str | None:
    """Writes the center, with what says how it was made; returns where, if it could."""
    path, center = plan.settings.export, plan.trainer.center(outcome.state)
    if not plan.team.is_first:
        return None
    kept = ("algo", "arguments", "task", "task_arguments", "seed", "workers")
    header = {name: json.dumps(facts[name]) for name in kept}
    header |= {"steps": json.dumps(outcome.line["step"])}
    header |= {"syncalgos": json.dumps(syncalgos.__version__)}
    try:
        export.save(path, center, header)
    except (OSError, SafetensorError) as error:  # the run's files are still to come
        terminal.say(f"--export {path}: {error}")
        return None
    return str(path)


def _header(job: Ready, request: Request) -> list[str]:
    """Returns the lines before a run; first those that say that it is vain."""
    plan, facts, s = job.plan, job.facts, job.plan.settings
    switch = plan.arguments.get("switch")
    vain = [never_reached("--switch", switch, s.steps)]
    if job.untrained:
        vain.append(f"the figures will be of the model as it is now: {job.untrained}")
    batch = f"batch {s.batch_size} ({s.batch_size // s.workers} a worker)"
    if request.settings.batch_size is None and s.batch_size != plan.task.batch_size:
        unit = s.workers * s.accumulate
        batch += f", the multiple of {unit} nearest to {plan.task.batch_size}"
    lines = [
        f"{s.algo} on {s.task}: {s.steps} steps, {batch}, seed {s.seed}",
        f"{terminal.layout_text(facts)}, backend {s.backend}",
        f"{s.optimizer}, learning rate {terminal.rate(s.lr)}, effective "
        f"{terminal.rate(facts['effective_lr'])}",
    ]
    unused = len(jax.devices()) - facts["devices"]
    if s.devices is None and s.backend != "vmap" and 0 < unused < s.workers:
        lines[1] += f" ({facts['devices']} of {len(jax.devices())} devices divide them)"
    return [*filter(None, vain), *lines]
