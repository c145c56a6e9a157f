"""Remarks on a run: the lines before it, and cautions about its figures after it."""

import math

import jax
import numpy as np

from experiments.cli import terminal
from experiments.training.config import never_reached
from experiments.training.defaults import batch_unit
from experiments.training.loop import DIVERGED_ABOVE, LEAST, Outcome, limit_after
from experiments.training.measurements import memory
from experiments.training.run import Run
from syncalgos import at_end


def header(run: Run, is_batch_given: bool) -> list[str]:
    """Returns the lines before a run, first those that call it vain.

    Args:
        run: the one that starts.
        is_batch_given: whether the user has set the batch size.
    """
    c, layout = run.config, run.facts
    # Said before the run: without a sync its figures are those of an untrained model.
    vain = [never_reached("--switch", c.arguments.get("switch"), c.steps)]
    if run.rounds.untrained:
        vain.append(
            f"the figures will be of the model as it is now: {run.rounds.untrained}"
        )
    elif run.rounds.unsynced and c.workers > 1:
        vain.append(f"no sync will come: {run.rounds.unsynced}")
    batch = f"batch {c.batch_size} ({c.batch_size // c.workers} a worker)"
    if not is_batch_given and c.batch_size != run.task.batch_size:
        unit = batch_unit(c)
        batch += f", the multiple of {unit} nearest to {run.task.batch_size}"
    there, taken, text = len(jax.devices()), layout["devices"], ""
    if c.devices is None and c.backend != "vmap" and 0 < there - taken < c.workers:
        text = f" ({taken} of {there} devices divide them)"
    no_rate = ""
    if layout["effective_lr"] is None:
        no_rate = ": twice the gradient does not move the model twice as far"
    inner = run.trainer.layout.inner
    idle = [
        f"no leaf of the model is sharded over {name}: each of its {inner[name]} "
        "devices has all of it"
        for name in memory.whole_axes(run.state, inner)
    ]
    return [
        *filter(None, vain),
        *idle,
        f"{c.algo} on {c.task}: {c.steps} steps, {batch}, seed {c.seed}",
        f"{terminal.layout_text(layout)}, backend {layout['backend']}{text}",
        f"{c.optimizer}, learning rate {terminal.rate(c.lr)}, effective "
        f"{terminal.rate(layout['effective_lr'])}{no_rate}",
        *_untrained(run),
    ]


def _untrained(run: Run) -> list[str]:
    """Says which evaluations come before the first sync."""
    rounds, evaluated = run.rounds, run.config.evaluations[0]
    if rounds.untrained or rounds.ends is None or rounds.center_step(evaluated):
        return []
    first = int(np.argmax(rounds.ends)) + 1
    return [
        f"the first sync comes after step {first}: test figures before it are of the "
        "untrained model"
    ]


def after(run: Run, outcome: Outcome, center_step: int) -> list[str]:
    """Returns the lines after a run.

    Args:
        run: the one that has ended.
        outcome: how it did.
        center_step: the last local step that is in the evaluated model.
    """
    c, steps, found = run.config, outcome.line["step"], []
    since = steps - center_step
    if since and not center_step:
        why = run.rounds.untrained or f"no sync came in these {steps} steps"
        found.append(f"the figures are of the model as it was at the start: {why}")
    elif since:
        found.append(
            "the figures are of the global model as of the last sync: the last "
            f"{since} local steps are not in it{_way_to_sync(run, steps)}"
        )
    if outcome.diverged_at is not None:
        found.append(
            f"diverged: the loss of step {outcome.diverged_at} was {_how(outcome)}"
        )
        if c.export is not None:
            found.append(f"no model was written to {c.export}")
    if outcome.stopped:
        found.append(f"stopped after step {steps} of {c.steps}: --resume goes on")
    found += _unsaved(c.checkpoints, outcome)
    if c.workers > 1 and run.task.sends:
        found.append(f"not counted in what each worker sent: {run.task.sends}")
    if run.task.kept != "replicated":
        found.append(
            "the effective learning rate is that of the rest: tables follow the mean "
            "gradient at every step"
        )
    return found


def _way_to_sync(run: Run, steps: int) -> str:
    """Says how the last local steps get into the center, if they can."""
    if steps < run.config.steps:
        return ""
    try:
        at_end(steps, run.algorithm)
    except ValueError:
        return ""
    return " (--sync-at-end syncs after them, too)"


def _unsaved(due: list[int], outcome: Outcome) -> list[str]:
    """Says which checkpoint is the newest, if a later one could not be saved."""
    end, saved = outcome.progress.step, outcome.progress.saved
    if outcome.diverged_at is not None:  # nothing is saved from there on
        end = outcome.diverged_at
    last = max((step for step in due if step <= end), default=0)
    if saved >= (end if outcome.stopped else last):
        return []
    if not saved:
        return ["no checkpoint could be saved: --resume would start from the beginning"]
    return [f"the newest checkpoint is of step {saved}: --resume would go on from it"]


def _how(outcome: Outcome) -> str:
    """Says in which way the loss was too large, and on which workers."""
    loss, first = outcome.too_large, outcome.progress.first_loss
    if loss is not None and first is not None and math.isfinite(loss):
        if abs(first) < LEAST:
            return f"{loss:.3g}, above {limit_after(first):g} (the first: {first:.3g})"
        return f"{loss:.3g}, above {DIVERGED_ABOVE} times the first, {first:.3g}"
    workers = outcome.not_finite
    if not workers:  # the sum over them was too large
        return "not finite"
    few = ", ".join(str(worker) for worker in workers[:4])
    more = f" and {len(workers) - 4} more" if workers[4:] else ""
    noun = "worker" if len(workers) == 1 else "workers"
    return f"not finite on {noun} {few}{more}"
