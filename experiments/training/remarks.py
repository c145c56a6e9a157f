"""Remarks on a run: lines before it, and cautions about its results after it."""

import math
from collections.abc import Sequence

import jax

from experiments.command import terminal
from experiments.training import sends
from experiments.training.config import never_reached
from experiments.training.defaults import batch_unit
from experiments.training.loop import DIVERGED_ABOVE, LEAST, Outcome, limit_after
from experiments.training.prepare import Run
from experiments.training.progress import Evaluation

# An end is worse than the best evaluation if it is so by more than this: less is noise.
ACCURACY_MARGIN = 0.02
LOSS_MARGIN = 0.1  # of the lowest loss


def header(run: Run, is_batch_given: bool) -> list[str]:
    """Returns the lines before a run, warnings that it may be useless first.

    Args:
        run: the run that starts.
        is_batch_given: whether the user has set the batch size.
    """
    c = run.config
    rounds = run.rounds
    layout = run.facts
    lines = [never_reached("--dense-steps", c.arguments.get("dense_steps"), c.steps)]
    # Said before the run: without a sync its results describe an untrained model.
    if rounds.untrained:
        lines.append(
            f"the results will be those of the initial model: {rounds.untrained}"
        )
    elif rounds.unsynced and c.workers > 1:
        lines.append(f"the workers will never sync: {rounds.unsynced}")
    mesh = run.trainer.layout.inner
    lines += [
        f"no array of the model is sharded over mesh axis {name}: each of its "
        f"{mesh[name]} devices holds the whole model"
        for name in sends.whole_axes(run.state, mesh)
    ]
    batch = f"batch {c.batch_size} ({c.batch_size // c.workers} per worker)"
    if not is_batch_given and c.batch_size != run.task.batch_size:
        unit = batch_unit(c)
        batch += f", the multiple of {unit} nearest to the task's {run.task.batch_size}"
    lines.append(f"{c.algo} on {c.task}: {c.steps} steps, {batch}, seed {c.seed}")
    num_present = len(jax.devices())
    num_used = layout["devices"]
    num_idle = num_present - num_used
    backend = str(run.trainer)
    if c.devices is None and c.backend != "vmap" and 0 < num_idle < c.workers:
        backend += (
            f" ({num_used} of {num_present} devices used: workers must divide over "
            "them)"
        )
    method = c.optimizer
    if c.momentum:
        method += f" with momentum {c.momentum:g}"
    lr = f"{c.schedule} learning rate {terminal.rate(c.lr)}"
    rates = f"{method}, {lr} nominal, {terminal.effective(layout['effective_lr'])}"
    if layout["effective_lr"] is None:
        rates += ": the model's step is not proportional to the gradient"
    lines += [backend, rates]
    is_early = not (rounds.untrained or rounds.center_step(c.evaluations[0]))
    if is_early and rounds.first_use is not None:
        first_use = rounds.first_use
        sends_before = rounds.ends is not None and rounds.ends[: first_use - 1].any()
        if sends_before:
            lines.append(
                f"the first sync is used after step {first_use}: test results before "
                "it are those of the untrained model"
            )
        else:
            lines.append(
                f"the first sync comes after step {first_use}: test results before it "
                "are those of the untrained model"
            )
    return [*filter(None, lines)]


def cautions(run: Run, outcome: Outcome, center_step: int) -> list[str]:
    """Returns the lines after a run.

    Args:
        run: the run that has ended.
        outcome: the outcome of the run.
        center_step: the last local step that the evaluated model includes.
    """
    c = run.config
    steps = outcome.last_evaluation.step
    lines = []
    steps_after_sync = steps - center_step
    if steps_after_sync and not center_step:
        why = run.rounds.untrained or f"no sync came in these {steps} steps"
        lines.append(f"the results are those of the initial model: {why}")
    elif steps_after_sync:
        lines.append(
            "the results are those of the model at the last sync: it does not include "
            f"the last {steps_after_sync} local steps"
        )
    bad_step = outcome.diverged_at
    if bad_step is not None:
        loss = _describe_loss(outcome)
        lines.append(f"diverged: the loss of step {bad_step} was {loss}")
    elif outcome.diverged:
        lines.append(
            f"diverged: the test loss is {outcome.last_evaluation.test_loss:g}"
        )
    else:
        best_note = compare_with_best(outcome.progress.evaluations, c.validation)
        if best_note:
            lines.append(best_note)
    if outcome.stopped:
        lines.append(f"stopped after step {steps} of {c.steps}: --resume continues")
    if c.workers > 1 and run.task.sends:
        lines.append(f"not included in the bytes that workers sent: {run.task.sends}")
    if run.task.kept != "replicated":
        lines.append(
            "the effective learning rate does not apply to the embedding tables: all "
            "workers update them with the mean gradient at every step"
        )
    return lines


def compare_with_best(
    evaluations: Sequence[Evaluation], validation: float | None
) -> str | None:
    """Says which evaluation was the best, if the last one is clearly worse.

    Args:
        evaluations: the evaluations of the run.
        validation: the share of training data that was held out; None means that the
            test data was used.
    """
    held_out = "test" if validation is None else "validation"
    last = evaluations[-1]
    if last.test_accuracy is None:
        best = min(evaluations, key=lambda evaluation: evaluation.test_loss)
        if last.test_loss - best.test_loss <= LOSS_MARGIN * abs(best.test_loss):
            return None
        measure = "loss"
        best_value = best.test_loss
        last_value = last.test_loss
    else:
        best = max(evaluations, key=lambda evaluation: evaluation.test_accuracy or 0.0)
        best_value = best.test_accuracy or 0.0
        last_value = last.test_accuracy
        if best_value - last_value <= ACCURACY_MARGIN:
            return None
        measure = "accuracy"
    best_figure = terminal.figure(best_value)
    last_figure = terminal.figure(last_value)
    return (
        f"{held_out} {measure}: best {best_figure} at step {best.step}, "
        f"{last_figure} at the end"
    )


def remark_unsaved(due: list[int], outcome: Outcome) -> list[str]:
    """Says which checkpoint is the newest, if a later one could not be saved."""
    end = outcome.progress.step
    saved = outcome.progress.saved
    if outcome.diverged_at is not None:  # no later checkpoint is saved
        end = outcome.diverged_at
    due_step = max((step for step in due if step <= end), default=0)
    if outcome.stopped:
        due_step = end
    if saved >= due_step:
        return []
    if not saved:
        return ["no checkpoint could be saved: --resume would start from the beginning"]
    return [f"the newest checkpoint is of step {saved}: --resume continues from there"]


def _describe_loss(outcome: Outcome) -> str:
    """Describes the loss that was too large, and names the workers."""
    loss = outcome.too_large
    first_loss = outcome.progress.first_loss
    if loss is not None and first_loss is not None and math.isfinite(loss):
        if abs(first_loss) < LEAST:
            return (
                f"{loss:.3g}, above {limit_after(first_loss):g} (first loss: "
                f"{first_loss:.3g})"
            )
        return (
            f"{loss:.3g}, above {DIVERGED_ABOVE} times the first loss, {first_loss:.3g}"
        )
    workers = outcome.not_finite
    if not workers:  # the sum over the workers was too large
        return "not finite"
    if len(workers) == 1:
        return f"not finite on worker {workers[0]}"
    first_workers = ", ".join(str(worker) for worker in workers[:4])
    if len(workers) <= 4:
        return f"not finite on workers {first_workers}"
    return f"not finite on workers {first_workers} and {len(workers) - 4} more"
