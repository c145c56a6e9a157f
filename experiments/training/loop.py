"""The loop: dispatches, evaluations, checkpoints, and a run's lines."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.cli import terminal
from experiments.cli.errors import BadRequest, explained
from experiments.cli.factories import TASK
from experiments.cli.signals import keeping_results
from experiments.pipeline import prefetch, sampler
from experiments.tasks.task import Task, held_out
from experiments.training import displacements
from experiments.training.progress import Line, Progress
from experiments.training.rounds import Count
from experiments.training.setup import Plan
from syncalgos import Communication, TrainState
from syncalgos.combinators.decided import METRIC
from syncalgos.engine.lanes.selection import Unfit
from syncalgos.engine.losses import OF_WORKERS

DIVERGED_ABOVE = 1000  # times the first loss
WANTED = ("loss", OF_WORKERS, METRIC)


class Hooks(NamedTuple):
    """What the loop calls as it goes.

    Attributes:
        asked_to_stop: () -> the number of a signal, or 0; looked at before each
            dispatch. All processes stop if one is asked.
        write: takes all lines of metrics.jsonl, of which the last is new.
        save: (state, progress), where a checkpoint is due.
    """

    asked_to_stop: Callable[[], int]
    write: Callable[[list[Line]], None]
    save: Callable[[TrainState, Progress], None]


class Outcome(NamedTuple):
    """How the loop ended.

    Attributes:
        state: of the engine.
        progress: all that it has behind it.
        diverged_at: the local step (from 0) whose loss was not finite, or above 1000
            times the first; None where there was none.
        too_large: that loss, over all workers.
        not_finite: the workers whose loss was not finite then.
        stopped: the number of the signal that stopped it before its end, or 0.
    """

    state: TrainState
    progress: Progress
    diverged_at: int | None
    too_large: float | None
    not_finite: list[int]
    stopped: int

    @property
    def line(self) -> Line:
        """The last evaluation."""
        return self.progress.lines[-1]


def train(
    plan: Plan,
    state: TrainState,
    progress: Progress,
    count: Count,
    report: terminal.Report,
    hooks: Hooks,
) -> Outcome:
    """Trains to the end, to a divergence, or until asked to stop.

    Args:
        plan: what is trained.
        state: where it starts.
        progress: what is behind it.
        count: what each worker has sent.
        report: where progress is shown.
        hooks: what is called on the way.
    """
    s, team = plan.settings, plan.team
    to_tell, to_save = set(evaluations(s)), set(checkpoints(s))
    whole = dispatches(to_tell | to_save, s.dispatch_steps)
    parts = [*remaining(whole, progress.step)]
    dispatch, evaluate = _make_dispatch(plan, parts), _make_evaluation(plan, count)
    diverged_at, too_large, not_finite, stopped = None, None, [], 0

    def tell(state):
        team.tell("evaluate", progress.step)
        line = evaluate(state, progress)
        report.line(terminal.evaluation_line(line, s.steps))
        progress.told(line)
        hooks.write(progress.lines)

    with keeping_results() as has_trained:
        for first, steps in parts:
            if stopped := team.largest(hooks.asked_to_stop()):
                break
            team.tell("train", first)
            state, metrics, took = dispatch(state, first, steps)
            has_trained()
            losses = metrics["loss"]
            decided = np.argwhere(metrics.get(METRIC, ())).tolist()
            progress.stepped(losses.tolist(), took, decided)
            progress.lane_form = plan.trainer.lane_form
            report.step(progress.step)
            if (bad := first_diverged(losses, progress.first_loss)) is not None:
                diverged_at, too_large = first + bad, float(losses[bad])
                of_workers = metrics[OF_WORKERS][bad]
                not_finite = np.flatnonzero(~np.isfinite(of_workers)).tolist()
                break
            if progress.step in to_tell:
                tell(state)
            if progress.step in to_save:
                hooks.save(state, progress)
        if stopped:
            hooks.save(state, progress)
        if progress.losses or not progress.lines:  # it ended between two evaluations
            tell(state)
    return Outcome(state, progress, diverged_at, too_large, not_finite, stopped)


def evaluations(s: Any) -> list[int]:
    """The local steps after which a run is evaluated."""
    return [*range(s.eval_every, s.steps, s.eval_every), s.steps]


def checkpoints(s: Any) -> list[int]:
    """The local steps after which a run saves a checkpoint; none unless it is asked."""
    every = s.checkpoint_every
    return [*range(every, s.steps, every), s.steps] if every else []


def dispatches(ends: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Yields (steps done, steps of the next dispatch) of a whole run.

    Those between two ends are as equal as can be: each length is compiled anew.

    Args:
        ends: steps at which a dispatch must end; the run does at the last.
        most: steps of a dispatch.
    """
    for start, end in pairwise(sorted({0, *ends})):
        parts = -(-(end - start) // most)
        edges = [start + (end - start) * i // parts for i in range(parts + 1)]
        yield from ((a, b - a) for a, b in pairwise(edges))


def remaining(parts: Iterator[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """The dispatches that are left after so many steps; one may be left in part."""
    for first, steps in parts:
        if first + steps > step:
            start = max(first, step)
            yield start, first + steps - start


def first_diverged(losses: np.ndarray, first: float | None) -> int | None:
    """The index of the first loss that is not finite or above 1000 times the first."""
    limit = math.inf if first is None else DIVERGED_ABOVE * abs(first)
    fine = np.isfinite(losses) & (losses <= limit)
    return None if fine.all() else int(np.argmin(fine))


def _make_dispatch(
    plan: Plan, parts: list[tuple[int, int]]
) -> Callable[..., tuple[TrainState, dict[str, np.ndarray], float]]:
    """Returns (state, first step, steps) -> (state, metrics, seconds of training)."""
    s, trainer = plan.settings, plan.trainer

    def rows(first, steps):
        draw = (s.seed, first, steps, s.batch_size)
        if plan.shards is None:
            return plan.team.part(sampler.rows(*draw, plan.data.examples))
        return plan.team.part(sampler.rows_of_shards(*draw, plan.shards))

    if s.feed == "host":
        ahead, data = prefetch.read_ahead(plan.data.train, parts, rows), None
    else:
        ahead, data = None, trainer.place(plan.data.train)

    def dispatch(state, first, steps):
        start, compiled = time.perf_counter(), trainer.compile_seconds
        batches = rows(first, steps) if ahead is None else next(ahead)
        try:
            state, metrics = trainer.run(state, batches, data)
        except Unfit as error:
            raise BadRequest(f"--lane-form: {error}") from error
        jax.block_until_ready(metrics)  # unlike np.asarray, it lets Ctrl-C in
        took = time.perf_counter() - start - (trainer.compile_seconds - compiled)
        kept = {
            name: np.asarray(metrics[name], np.float64)
            for name in WANTED
            if name in metrics
        }
        return state, kept, took

    return dispatch


def _make_evaluation(plan: Plan, count: Count) -> Callable[..., dict]:
    s, trainer = plan.settings, plan.trainer
    planned = set(evaluations(s))
    test, rows = held_out(plan.data.test, trainer.workers, plan.task.eval_batch)
    data, rows = trainer.place(test), plan.team.part(rows)

    def evaluate(state, progress):
        metrics = jax.device_get(trainer.evaluate(state, rows, data))
        means = {name: float(np.mean(x)) for name, x in metrics.items()}
        measured = {"loss": means["loss"], "accuracy": None}  # a task may lack one
        with explained(TASK.flag, s.task):
            measured |= _figures(plan.task, means["loss"])
        done, losses = progress.step, progress.losses
        return {
            "step": done,
            "train_loss": float(np.mean(losses)) if losses else None,
            **{f"test_{name}": x for name, x in {**measured, **means}.items()},
            "bytes_per_worker": bytes_after(count(progress), progress),
            "divergence": trainer.divergence(state),
            **(_displacements(state, done in planned) if s.displacements else {}),
            "seconds": round(progress.seconds, 6),
        }

    return evaluate


def _figures(task: Task, loss: float) -> dict[str, float]:
    """Returns the task's own figures of a held-out loss."""
    found = {}
    for name, figure in task.figures.items():
        try:
            found[name] = figure(loss)
        except ArithmeticError:  # the perplexity of a run that diverges
            found[name] = math.nan
    return found


def _displacements(state: TrainState, planned: bool) -> dict[str, Any]:
    """Those of the last round, which are known where an evaluation was planned."""
    found = displacements.figures(state)
    return found if planned else dict.fromkeys(found)


def bytes_after(sent: Communication | None, progress: Progress) -> float | int | None:
    """What each worker has sent; None where only the run can tell."""
    if sent is None or progress.sent_before is None:
        return None

    def until(step):
        return float(sent.per_step[step - 1]) if step else 0.0

    since = until(progress.step) - until(progress.sent_since)
    count = progress.sent_before + since
    return int(count) if count.is_integer() else count
