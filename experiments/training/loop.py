"""The training loop: dispatches, evaluations, checkpoints and metrics lines."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from experiments.command import stopping
from experiments.command.errors import BadRequest, explaining_errors
from experiments.command.factories import TASK
from experiments.data import feeding, sampling
from experiments.data.feeding import WEIGHT
from experiments.tasks.task import (
    DECISIONS,
    WORKER_LOSSES,
    Task,
    held_out,
    make_value_function,
    number,
)
from experiments.training import rounds
from experiments.training.optimizers import current_rate
from experiments.training.prepare import Run
from experiments.training.process_group import ProcessGroup
from experiments.training.progress import MEASURE, Evaluation, Progress
from syncalgos import LaneFormError, Replica, TrainState

DIVERGED_ABOVE = 1000  # times the first loss, or times LEAST if that is larger
LEAST = 0.1  # as a first loss of 0 would give a limit of 0
UNREAD = 2**10  # used like a signal's number if examples cannot be read
WANTED = ("loss", WORKER_LOSSES, DECISIONS)


class Batches(NamedTuple):
    """Batches as `DataParallel.run` and `evaluate` take them."""

    batches: Any
    data: Any = None


class Watch(NamedTuple):
    """The follower of a training: it shows and writes, and says when to stop.

    Attributes:
        asked_to_stop: returns the number of a signal, or 0; called before each
            dispatch. If one process is asked, all stop.
        stepped: called after each dispatch, whose steps are in the progress.
        evaluated: called with the evaluated model after each evaluation, which is the
            last one of the progress.
        save: saves a checkpoint: (state, whether it is the last of the run).
    """

    asked_to_stop: Callable[[], int]
    stepped: Callable[[], None]
    evaluated: Callable[[Replica], None]
    save: Callable[[TrainState, bool], None]


class Divergence(NamedTuple):
    """The step at which a run diverged; None and () if none did.

    Attributes:
        at: the local step, from 0.
        loss: the mean loss of all workers at that step.
        workers: the workers with a loss that was not finite at that step.
    """

    at: int | None = None
    loss: float | None = None
    workers: Sequence[int] = ()


class Outcome(NamedTuple):
    """The end of a run: its state and progress, and why it ended.

    Attributes:
        state: the state of the engine.
        progress: the progress of the run.
        center: the model of this state, to evaluate and ship.
        stopped: the number of the signal that stopped it before its end, or 0.
        diverged_at: the local step (from 0) at which the loss was not finite, or above
            the limit; None if there was none.
        too_large: the mean loss of all workers at that step.
        not_finite: the workers with a loss that was not finite at that step.
    """

    state: TrainState
    progress: Progress
    center: Replica
    stopped: int = 0
    diverged_at: int | None = None
    too_large: float | None = None
    not_finite: Sequence[int] = ()

    @property
    def last_evaluation(self) -> Evaluation:
        """The last evaluation."""
        return self.progress.evaluations[-1]

    @property
    def diverged(self) -> bool:
        """Whether a loss was too large, or the test loss of a whole run not finite."""
        is_lost = not (self.stopped or math.isfinite(self.last_evaluation.test_loss))
        return is_lost or self.diverged_at is not None


def train(
    run: Run, progress: Progress, watch: Watch, *, evaluate_at_end_only: bool = False
) -> Outcome:
    """Trains to the end, to a divergence, or until asked to stop.

    Args:
        run: the run to train; its state cannot be used afterwards.
        progress: the progress so far, which is updated.
        watch: called before and after each dispatch, and after each evaluation.
        evaluate_at_end_only: whether to leave out all evaluations but the last. The
            dispatches stay the same, and so do the programs.
    """
    c = run.config
    group = run.group
    state = run.state
    to_evaluate = {*c.evaluations}
    to_save = {*c.checkpoints}
    # Any split into dispatches gives the same numbers: a resumed run may shorten one.
    planned_dispatches = dispatches(to_evaluate | to_save, c.dispatch_steps)
    if evaluate_at_end_only:
        to_evaluate = {c.steps}
    schedule = [*remaining(planned_dispatches, progress.step)]
    test = _held_out(run)
    feed = _Feed(run, schedule)
    # The header has already said so: see `remarks.header`.
    warnings.filterwarnings("ignore", "no sync came in")

    def evaluate(state: TrainState) -> Replica:
        evaluation, center = _evaluate(run, state, progress, test)
        progress.add_evaluation(evaluation)
        watch.evaluated(center)
        return center

    center: Replica | None = None  # of the state, if it has been evaluated
    signal = 0
    divergence = Divergence()
    for first_step, steps in schedule:
        batches, waited = feed.read(first_step, steps)
        own_signal = watch.asked_to_stop()
        is_unread = isinstance(batches, BadRequest)
        # If one process is asked to stop, or cannot read, all stop at the same step.
        # This may be within a round: the checkpoint holds all replicas.
        signal = group.largest(UNREAD if is_unread else own_signal)
        if signal:
            watch.save(state, True)
            if signal == UNREAD:
                _end_unread(batches, progress, group)
            break
        center = None  # two may not fit in memory
        training_batches = Batches(batches, feed.placed)
        to_compile = test if first_step == schedule[0][0] else None
        state, metrics, seconds = _dispatch(run, state, training_batches, to_compile)
        losses = metrics["loss"]
        decided = np.argwhere(metrics.get(DECISIONS, ()))
        progress.add_dispatch(
            losses=losses.tolist(),
            worker_losses=metrics[WORKER_LOSSES],
            seconds=seconds + waited,
            decided=decided.tolist(),
        )
        progress.lane_form = run.trainer.lane_form
        watch.stepped()
        bad_step = first_diverged(losses, progress.first_loss)
        if bad_step is not None:
            is_lost = ~np.isfinite(metrics[WORKER_LOSSES][bad_step])
            divergence = Divergence(
                at=first_step + bad_step,
                loss=float(losses[bad_step]),
                workers=np.flatnonzero(is_lost).tolist(),
            )
            break
        if progress.step in to_evaluate:
            center = evaluate(state)
        if progress.step in to_save:
            watch.save(state, progress.step == c.steps)
    if progress.losses or not progress.evaluations:  # it ended between two evaluations
        center = evaluate(state)
    if center is None:  # it was resumed at its end
        center = run.trainer.center(state)
    return Outcome(
        state,
        progress,
        center,
        stopped=signal,
        diverged_at=divergence.at,
        too_large=divergence.loss,
        not_finite=divergence.workers,
    )


def _end_unread(batches: Any, progress: Progress, group: ProcessGroup) -> NoReturn:
    """Ends a run if this or another process could not read the next examples."""
    if not isinstance(batches, BadRequest):
        # The process that could not read reports why, which ends this wait.
        group.largest(0)
        raise RuntimeError("another process could not read its examples")
    if progress.step and progress.saved == progress.step:
        raise type(batches)(f"{batches}; --resume continues after step {progress.step}")
    raise batches


def dispatches(ends: Iterable[int], most_steps: int) -> Iterator[tuple[int, int]]:
    """Yields (steps done, steps of the next dispatch) for a whole run.

    Between two ends, dispatches differ by at most one step, because each length needs
    its own compilation.

    Args:
        ends: steps at which a dispatch must end; the last is the end of the run.
        most_steps: the largest number of steps of a dispatch.
    """
    for start, end in pairwise(sorted({0, *ends})):
        parts = -(-(end - start) // most_steps)
        edges = [start + (end - start) * i // parts for i in range(parts + 1)]
        yield from ((a, b - a) for a, b in pairwise(edges))


def remaining(parts: Iterator[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """Yields the dispatches left after some steps; the first may be shortened."""
    for first_step, steps in parts:
        if first_step + steps > step:
            start = max(first_step, step)
            yield start, first_step + steps - start


def limit_after(first_loss: float) -> float:
    """Returns the loss above which a run with this first loss has diverged."""
    return DIVERGED_ABOVE * max(abs(first_loss), LEAST)


def first_diverged(losses: np.ndarray, first_loss: float | None) -> int | None:
    """Returns the index of the first loss that is not finite or above the limit."""
    limit = math.inf if first_loss is None else limit_after(first_loss)
    fine = np.isfinite(losses) & (losses <= limit)
    return None if fine.all() else int(np.argmin(fine))


def _held_out(run: Run) -> Batches:
    """Places the held-out examples, and cuts them into batches of rows."""
    # Examples of weight 0 fill the last batch, so that every held-out example counts
    # once for any number of workers and devices.
    layout = run.trainer.layout
    data = run.data
    batch = run.task.eval_batch
    test, rows = held_out(data.test, layout.readers, batch, least=data.num_test)
    return Batches(rows[:, layout.own_rows(rows.shape[1])], run.trainer.place(test))


class _Feed:
    """The batches of a run, which are read in the order of its dispatches.

    Args:
        run: the run.
        schedule: (first step, steps) of each dispatch.

    Attributes:
        placed: the examples, if all are on the devices.
    """

    def __init__(self, run: Run, schedule: list[tuple[int, int]]):
        data = run.data
        on_host = feeding.is_read_on_host(run.data)
        part = None if on_host else data.part_of
        train, numbers = part or (data.train, None)
        # No method: its reader would hold what holds it, and its threads would not end.
        self._rows = partial(_rows, run, numbers)
        # Data on the devices is gathered inside the compiled loop. With 188 MB of data
        # as constants of the loop a dispatch costs 85-108 ms; with placed data, 2 ms.
        self.placed = None if on_host else run.trainer.place(train)
        self._ahead = None
        if on_host:
            self._ahead = feeding.read_ahead(train, schedule, self._rows)

    def read(self, first_step: int, steps: int) -> tuple[Any, float]:
        """Returns a dispatch's batches, or a BadRequest; and the seconds waited."""
        start = time.perf_counter()
        try:
            ahead = self._ahead
            batches = next(ahead) if ahead else self._rows(first_step, steps)
        except BadRequest as error:
            batches = error
        return batches, time.perf_counter() - start


def _rows(
    run: Run, numbers: np.ndarray | None, first_step: int, steps: int
) -> np.ndarray:
    """Returns the numbers of the examples, (steps, batch)."""
    draw = (run.config.seed, first_step, steps, run.config.batch_size)
    if run.shards is None:
        rows = sampling.rows(*draw, run.data.examples)
    else:
        rows = sampling.rows_of_shards(*draw, run.shards)
    own_rows = rows[:, run.trainer.layout.own_rows(run.config.batch_size)]
    return own_rows if numbers is None else numbers[own_rows]


def _dispatch(
    run: Run,
    state: TrainState,
    training_batches: Batches,
    to_compile: Batches | None,
) -> tuple[TrainState, dict[str, np.ndarray], float]:
    """Trains on batches; returns the state, the metrics and the training seconds.

    All programs are compiled before it if held-out batches are given, too.
    """
    trainer = run.trainer
    # Seconds exclude compilation, which the first dispatch includes.
    start = time.perf_counter()
    compiled = trainer.compile_seconds
    try:
        if to_compile is None:
            state, metrics = trainer.run(state, *training_batches)
        else:
            # Otherwise the first evaluation would have to wait for its compilation.
            with stopping.compiling():
                trainer.compile(state, training_batches, to_compile, assesses=True)
            # Of several processes, each compiles a program at its first call.
            is_alone = trainer.layout.processes == 1
            with nullcontext() if is_alone else stopping.compiling():
                state, metrics = trainer.run(state, *training_batches)
    except LaneFormError as error:
        raise BadRequest(f"--task {run.config.task}: {error}") from error
    # Unlike np.asarray, this can be interrupted by Ctrl-C.
    jax.block_until_ready(metrics)
    seconds = time.perf_counter() - start - (trainer.compile_seconds - compiled)
    host_metrics = {
        name: np.asarray(metrics[name], np.float64)
        for name in WANTED
        if name in metrics
    }
    return state, host_metrics, seconds


def _evaluate(
    run: Run, state: TrainState, progress: Progress, test: Batches
) -> tuple[Evaluation, Replica]:
    """Evaluates a state; returns its evaluation, and the evaluated model."""
    c = run.config
    metrics, center, divergence = run.trainer.assess(state, *test)
    metrics = jax.device_get(metrics)
    means = {name: float(np.mean(x)) for name, x in metrics.items()}
    held_out_measures = {"loss": means["loss"], "accuracy": None}  # a task may lack one
    with explaining_errors(TASK.flag, c.task):
        held_out_measures |= _figures(run.task, means)
    held_out_measures |= means
    losses = progress.losses
    displacements: dict[str, float] = {}
    if c.displacements:
        displacements = rounds.figures(state, run.rounds.ends)
    evaluation = Evaluation(
        step=progress.step,
        train_loss=float(np.mean(losses)) if losses else None,
        worker_losses=progress.mean_worker_losses(),
        measures={f"{MEASURE}{name}": x for name, x in held_out_measures.items()},
        bytes_per_worker=run.rounds.count_bytes(progress),
        divergence=divergence,
        learning_rate=current_rate(c, state.replica.opt_state, progress.step),
        displacements=displacements,
        seconds=round(progress.seconds, 6),
    )
    return evaluation, center


def correct(run: Run, outcome: Outcome) -> str | None:
    """Returns which held-out examples the center is right on, a bit each, in hex.

    None for a trial, without an accuracy of 0 or 1, or if a model lies on devices.
    """
    task = run.task
    programs = run.plan.programs
    c = run.config
    is_cut = c.mesh is not None or task.kept == "sharded"
    if (
        is_cut
        or c.validation is not None
        or outcome.last_evaluation.test_accuracy is None
    ):
        return None
    data, rows = held_out(run.data.test, 1, task.eval_batch)
    if programs.hits is None:

        def of_rows(model, data, rows):
            batch = {name: x[rows] for name, x in data.items()}
            values = make_value_function(task, train=False)
            return values(model.params, model.buffers, batch)["accuracy"]

        programs.hits = jax.jit(
            lambda model, data, rows: jax.lax.map(partial(of_rows, model, data), rows)
        )
    hits = np.ravel(programs.hits(outcome.center, data, rows))
    hits = hits[: len(data[WEIGHT]) - 1]
    if not np.isin(hits, (0, 1)).all():
        return None
    return np.packbits(hits > 0).tobytes().hex()


def _figures(task: Task, means: dict[str, float]) -> dict[str, float]:
    """Returns the task's own figures, computed from held-out means."""
    calls = {name: partial(x, means["loss"]) for name, x in task.figures.items()}
    calls |= {name: partial(x, means) for name, x in task.mean_figures.items()}
    figures = {}
    for name, compute in calls.items():
        try:
            figures[name] = number(name, compute())
        except ArithmeticError:  # the perplexity of a run that diverges
            figures[name] = math.nan
    return figures
