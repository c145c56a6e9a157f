"""From a request to everything that a run needs, refused before anything compiles."""

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM
from experiments.cli.flags import Request
from experiments.pipeline import loading
from experiments.tasks.task import Data, Task, losses
from experiments.training import (
    compile_cache,
    embedding_tables,
    export,
    optimizers,
    records,
)
from experiments.training.bounds import check_length, never_reached
from experiments.training.components import make_strategy, make_task, takes
from experiments.training.process_group import ALONE, Team
from syncalgos import (
    DataParallel,
    Strategy,
    after,
    at_syncs,
    chain,
    checks,
    ema,
    sync_sgd,
    until,
)

# With these flags they move entries by about the learning rate, whatever the gradient,
# as Adam does: a task's rate for it is their default, and its momentum for SGD is not.
UNIT_STEPS: dict[str, dict[str, Any]] = {
    "signum": {},
    "distributed_lion": {},
    "one_bit_adam": {},
    "sign_sgd": {"majority": True},
    "demo": {"sign": True},
}
OWN_MOMENTUM = {"dgc"}  # which does without the task's, too


class Plan(NamedTuple):
    """A run that can start.

    Attributes:
        settings: the common flags, all defaults filled in.
        arguments: the algorithm's own.
        task_arguments: the task's own.
        task: what is trained on what.
        data: the task's.
        optimizer: the inner one.
        strategy: how the workers agree.
        algorithm: its part that is the algorithm's, without shared tables.
        steady: the algorithm alone, for a constant learning rate.
        trainer_of: the engine for another strategy, all else as it is.
        trainer: the engine.
        shards: which training examples are each worker's own; None: all are everyone's.
        seeded: whether the algorithm or the task draws from the seed while it trains:
            then each seed is another program.
        team: the processes that train together.
    """

    settings: Namespace
    arguments: dict[str, Any]
    task_arguments: dict[str, Any]
    task: Task
    data: Data
    optimizer: optax.GradientTransformation
    strategy: Strategy
    algorithm: Strategy
    steady: Strategy
    trainer_of: Callable[[Strategy], DataParallel]
    trainer: DataParallel
    shards: list[np.ndarray] | None
    seeded: bool
    team: Team


def prepare(request: Request, data: Data | None = None, team: Team = ALONE) -> Plan:
    """Checks a request and fills in what it leaves open.

    Args:
        request: from the command line.
        data: the task's, where it is loaded already, as `Plan.data` was.
        team: the processes that train together; they have joined already.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    use_all_cores(team.sharing)
    compile_cache.use()
    try:
        return _prepare(request, data, team)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def use_all_cores(sharing: int = 1) -> None:
    """One virtual CPU device a core, unless the environment says otherwise.

    Args:
        sharing: processes on this host, which share its cores.
    """
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if in_flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", max(1, cores // sharing))
    except RuntimeError:
        return  # the backend runs already: whoever started it chose its devices


def _prepare(request: Request, data: Data | None, team: Team) -> Plan:
    settings = Namespace(**vars(request.settings))
    settings.resume = settings.resume or settings.resume_center
    if settings.out is not None and team.is_first:
        records.check_out(settings.out, settings.overwrite or settings.resume)
    if settings.export is not None and team.is_first:
        export.check(settings.export, settings.overwrite or settings.resume)
    task = make_task(request)
    _fill_in(settings, task, request.arguments)
    _check_switch(request, settings.steps)
    if settings.schedule == "plateau" and takes(request, "learning_rate"):
        raise ValueError(
            f"--schedule plateau: {settings.algo} has to know the learning rate of a "
            "step, which here follows from the loss: take constant, cosine or step"
        )
    schedule, optimizer = _inner(settings, task)
    arguments = embedding_tables.with_row_sparse(request, settings, task)
    strategy = make_strategy(request, arguments, schedule, optimizer, team, task)
    algorithm = embedding_tables.of_rest(strategy, task)
    strategy = embedding_tables.beside_shared(algorithm, settings, task)
    strategy = _composed(strategy, settings, optimizer)
    train_loss, eval_loss = losses(task)

    def trainer_of(strategy: Strategy) -> DataParallel:
        return DataParallel(
            train_loss,
            optimizer,
            strategy,
            workers=settings.workers,
            backend=settings.backend,
            devices=settings.devices,
            eval_loss=eval_loss,
            accumulate=settings.accumulate,
            sharded=embedding_tables.sharded(task),
            lanes=settings.lanes,
            lane_form=settings.lane_form,
            each_worker=True,
        )

    trainer = trainer_of(strategy)
    arguments = embedding_tables.dense(request.arguments)
    steady = make_strategy(request, arguments, settings.lr, optimizer, team, task)
    data = loading.load(settings, task) if data is None else data
    loading.check(settings, data, request.settings.batch_size is not None)
    settings.feed = settings.feed or loading.default_feed(data)
    return Plan(
        settings=settings,
        arguments=request.arguments,
        task_arguments=request.task_arguments,
        task=task,
        data=data,
        optimizer=optimizer,
        strategy=strategy,
        algorithm=algorithm,
        steady=steady,
        trainer_of=trainer_of,
        trainer=trainer,
        shards=loading.shards(settings, data),
        seeded=takes(request, "seed"),
        team=team,
    )


def _inner(
    s: Namespace, task: Task
) -> tuple[optimizers.Schedule, optax.GradientTransformation]:
    """The learning rate's schedule, and the inner optimizer that follows it."""
    schedule = optimizers.schedule(s.schedule, s.lr, s.steps, s.warmup_steps)
    optimizer = optimizers.make(
        s.optimizer, schedule, s.momentum, s.weight_decay, s.clip_norm, task.muon
    )
    if s.schedule == "plateau":
        optimizer = optax.chain(optimizer, optimizers.plateau(s.steps))
    return schedule, optimizer


def _composed(
    strategy: Strategy, s: Namespace, optimizer: optax.GradientTransformation
) -> Strategy:
    """Adds what common flags ask for: optimizer state, a synchronous start, an EMA."""
    if s.opt_state_at_sync != "keep":
        at_sync = optimizers.AT_SYNC[s.opt_state_at_sync](optimizer)
        strategy = at_syncs(strategy, at_sync)
    if s.sync_until:
        n = s.sync_until
        strategy = chain(until(n, sync_sgd()), after(n, strategy))
    return strategy if s.ema is None else ema(strategy, s.ema)


def _fill_in(s: Namespace, task: Task, arguments: dict[str, Any]) -> None:
    needed = UNIT_STEPS.get(s.algo)
    takes_unit_steps = needed is not None and needed.items() <= arguments.items()
    if s.optimizer in (None, task.optimizer):  # else the task's may not fit
        if takes_unit_steps or s.algo in OWN_MOMENTUM:
            task = task._replace(momentum=None)
        for flag in ("optimizer", "momentum", "weight_decay", "clip_norm"):
            if getattr(s, flag) is None:
                setattr(s, flag, getattr(task, flag))
    if s.clip_norm is not None and task.kept == "sharded":
        raise ValueError(
            "--clip-norm with --tables sharded: each worker holds other rows, whose "
            "norms differ; take shared or replicated tables"
        )
    s.data_dir = s.data_dir or os.environ.get("SYNCALGOS_DATA")
    s.steps = s.steps or task.steps
    kind = s.algo if takes_unit_steps else str(s.optimizer)
    s.lr = s.lr or task.lr.get(kind) or task.lr.get("")
    if s.lr is None:
        raise ValueError(f"{s.task} has no --lr for {kind}: say one")
    s.schedule = s.schedule or task.schedule
    if s.warmup_steps is None:
        s.warmup_steps = round(task.warmup * s.steps)
    s.batch_size = s.batch_size or nearest_multiple(
        task.batch_size, s.workers * s.accumulate
    )
    s.eval_every = min(s.eval_every or -(-s.steps // 10), s.steps)
    s.dispatch_steps = s.dispatch_steps or task.dispatch_steps
    checks.global_batch(s.batch_size, s.workers, s.accumulate)
    check_length(s)


def _check_switch(request: Request, steps: int) -> None:
    """Raises a ValueError where --switch is given a step that never comes.

    Its default may be such a step, as in a short trial; the header says so.
    """
    switch = request.arguments.get("switch")
    late = never_reached("--switch", switch, steps)
    parameters = factories.describe(ALGORITHM, request.settings.algo).parameters
    if late and switch not in [p.default for p in parameters if p.name == "switch"]:
        raise ValueError(late)


def nearest_multiple(n: int, of: int) -> int:
    """The multiple nearest to n, at least one; the lower of two."""
    below = n - n % of
    return below if below and n - below <= below + of - n else below + of
