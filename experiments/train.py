"""The loop: dispatches, evaluations, and a run's files."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import displacements, feed, records, screen, stream
from experiments.plan import Plan
from experiments.tasks.task import held_out
from syncalgos import TrainState

DIVERGED_ABOVE = 1000  # times the first loss


class Outcome(NamedTuple):
    """How the loop ended.

    Attributes:
        state: of the engine.
        line: the last evaluation.
        seconds: of training, compilation and evaluation excluded.
        diverged_at: the local step (from 0) whose loss was not finite, or above 1000
            times the first; None where there was none.
        stopped: whether it was asked to stop before its end.
    """

    state: TrainState
    line: dict[str, Any]
    seconds: float
    diverged_at: int | None
    stopped: bool


def train(
    plan: Plan,
    state: TrainState,
    out: Path,
    sent: np.ndarray | None,
    report: screen.Report,
    asked_to_stop: Callable[[], bool],
) -> Outcome:
    """Trains to the end, to a divergence, or until asked to stop.

    Args:
        plan: what is trained.
        state: where it starts.
        out: a folder in which `records.start` was called.
        sent: cumulative bytes of each worker after each local step; None: unknown.
        report: where progress is shown.
        asked_to_stop: looked at after each dispatch.
    """
    s = plan.settings
    dispatch, evaluate = _make_dispatch(plan), _make_evaluation(plan, sent)
    losses, seconds, first_loss, diverged_at, stopped = [], 0.0, None, None, False
    line: dict[str, Any] = {}

    def write_line(done):
        line = evaluate(state, done, losses, seconds)
        records.add_line(out, line)
        report.line(screen.evaluation_line(line, s.steps))
        return line

    for first, steps in dispatches(s.steps, s.eval_every, s.dispatch_steps):
        if stopped := asked_to_stop():
            break
        state, new, took = dispatch(state, first, steps)
        seconds += took
        losses.append(new)
        done = first + steps
        report.step(done)
        first_loss = new[0] if first_loss is None else first_loss
        if (bad := first_diverged(new, first_loss)) is not None:
            diverged_at = first + bad
            break
        if done % s.eval_every == 0 or done == s.steps:
            line, losses = write_line(done), []
    if losses or not line:  # it ended between two evaluations
        line = write_line(int(state.step))
    return Outcome(state, line, seconds, diverged_at, stopped)


def dispatches(steps: int, eval_every: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (steps done, steps of the next dispatch).

    A dispatch ends at every evaluation, and those between two evaluations are as equal
    as can be: each length is compiled anew.
    """
    for start in range(0, steps, eval_every):
        end = min(start + eval_every, steps)
        parts = -(-(end - start) // most)
        edges = [start + (end - start) * i // parts for i in range(parts + 1)]
        yield from ((a, b - a) for a, b in pairwise(edges))


def first_diverged(losses: np.ndarray, first: float) -> int | None:
    """The index of the first loss that is not finite or above 1000 times the first."""
    fine = np.isfinite(losses) & (losses <= DIVERGED_ABOVE * abs(first))
    return None if fine.all() else int(np.argmin(fine))


def _make_dispatch(plan: Plan) -> Callable[..., tuple[TrainState, np.ndarray, float]]:
    """Returns (state, first step, steps) -> (state, losses, seconds of training)."""
    s, trainer = plan.settings, plan.trainer

    def rows(first, steps):
        if plan.shards is None:
            return stream.rows(s.seed, first, steps, s.batch_size, plan.data.examples)
        return stream.rows_of_shards(s.seed, first, steps, s.batch_size, plan.shards)

    if s.feed == "host":
        parts = list(dispatches(s.steps, s.eval_every, s.dispatch_steps))
        ahead, data = feed.read_ahead(plan.data.train, parts, rows), None
    else:
        ahead, data = None, trainer.place(plan.data.train)

    def dispatch(state, first, steps):
        start, compiled = time.perf_counter(), trainer.compile_seconds
        batches = rows(first, steps) if ahead is None else next(ahead)
        state, metrics = trainer.run(state, batches, data)
        jax.block_until_ready(metrics)  # unlike np.asarray, it lets Ctrl-C in
        took = time.perf_counter() - start - (trainer.compile_seconds - compiled)
        return state, np.asarray(metrics["loss"], np.float64), took

    return dispatch


def _make_evaluation(plan: Plan, sent: np.ndarray | None) -> Callable[..., dict]:
    s, trainer = plan.settings, plan.trainer
    test, rows = held_out(plan.data.test, trainer.workers, plan.task.eval_batch)
    data = trainer.place(test)

    def evaluate(state, done, losses, seconds):
        metrics = jax.device_get(trainer.evaluate(state, rows, data))
        means = {name: float(np.mean(x)) for name, x in metrics.items()}
        measured = {"loss": means["loss"], "accuracy": None}  # a task may lack one
        for name, figure in plan.task.figures.items():
            try:
                measured[name] = figure(means["loss"])
            except ArithmeticError:  # the perplexity of a run that diverges
                measured[name] = math.nan
        return {
            "step": done,
            "train_loss": float(np.mean(np.concatenate(losses))) if losses else None,
            **{f"test_{name}": x for name, x in {**measured, **means}.items()},
            "bytes_per_worker": _bytes_after(sent, done),
            "divergence": trainer.divergence(state),
            **(_displacements(plan, state, done) if s.displacements else {}),
            "seconds": round(seconds, 6),
        }

    return evaluate


def _displacements(plan: Plan, state: TrainState, done: int) -> dict[str, Any]:
    """Those of the last round, which are known where an evaluation was planned."""
    s, found = plan.settings, displacements.figures(state)
    planned = done % s.eval_every == 0 or done == s.steps
    return found if planned else dict.fromkeys(found)


def _bytes_after(sent: np.ndarray | None, done: int) -> float | int | None:
    if sent is None:
        return None
    count = float(sent[done - 1]) if done else 0.0
    return int(count) if count.is_integer() else count
