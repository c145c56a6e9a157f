"""One run of the command line, from its request to its files."""

import json
import time
from collections.abc import Callable
from typing import Any

import jax
from safetensors import SafetensorError

import syncalgos
from experiments import export, records, screen
from experiments.errors import BadRequest
from experiments.flags import Request
from experiments.plan import Plan, prepare
from experiments.ready import begin, finish, ready
from experiments.train import DIVERGED_ABOVE, Outcome


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
    job = ready(plan)
    out = s.out or records.default_out(s.task, s.algo)
    try:
        begin(job, argv, out)
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}") from error
    for text in _header(plan, request, job.facts):
        screen.say(text)
    with screen.report(s.steps) as report:
        outcome, summary = finish(job, out, report, asked_to_stop)
    if s.export is not None and outcome.diverged_at is None:
        summary["export"] = _export(plan, outcome, job.facts)
    summary["total_seconds"] = round(time.perf_counter() - started, 3)
    records.finish(out, summary)
    screen.show(screen.summary_text(summary, out))
    for text in _remarks(plan, outcome, summary):
        screen.say(text)
    return outcome


def _remarks(plan: Plan, outcome: Outcome, summary: dict[str, Any]) -> list[str]:
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
    if since := steps - summary["center_step"]:
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
