"""A run that can start: its plan, its data, its engine and its first state."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.cli import terminal
from experiments.cli.errors import BadRequest, explain
from experiments.cli.factories import OWN
from experiments.exit_codes import Terminated
from experiments.pipeline import loading, partition
from experiments.pipeline.indices import check_indices
from experiments.tasks.contract import check_apply, check_model, check_shardings
from experiments.tasks.task import Data, Task
from experiments.training import compile_cache, devices, export, records
from experiments.training.config import RunConfig
from experiments.training.measurements import displacements
from experiments.training.measurements.effective_lr import effective_lr
from experiments.training.measurements.rounds import Rounds, ends_of, planned
from experiments.training.plan import Plan, check_data, make_plan, make_trainer
from experiments.training.process_group import ALONE, ProcessGroup
from experiments.training.records import Progress
from experiments.training.strategies import make_algorithm
from experiments.training.versions import commit, versions
from syncalgos import DataParallel, Replica, Strategy, TrainState
from syncalgos.collectives import PyTree

# Where a model comes from, as an exported one says, too.
ORIGIN = ("algo", "arguments", "task", "task_arguments", "seed", "workers")
COMMON = (*ORIGIN, "batch_size", "optimizer", "lr", "accumulate", "partition")
COMMON += ("validation",)


@dataclass(frozen=True)
class Run(Plan):
    """A run that can start.

    Attributes:
        data: of the task.
        shards: which training examples are each worker's own; None if all share all.
        group: the processes that train together.
        rounds: what is sent, and when.
        state: where it starts; training gives it up.
        facts: what config.json and summary.json have in common.
    """

    data: Data
    shards: list[np.ndarray] | None
    group: ProcessGroup
    rounds: Rounds
    state: TrainState
    facts: dict[str, Any]


def prepare(
    config: RunConfig,
    group: ProcessGroup = ALONE,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
) -> Run:
    """Prepares a run: checks all that can be refused, loads the data, makes the model.

    Args:
        config: as the user has said it.
        group: the processes that train together; they have joined already.
        task: in place of the config's.
        strategy: in place of the config's algorithm.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    return make_run(*checked(config, None, group, task=task, strategy=strategy), group)


def checked(
    config: RunConfig,
    data: Data | None = None,
    group: ProcessGroup = ALONE,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
) -> tuple[Plan, Data]:
    """Returns a run's plan and data; the arguments are those of `prepare`.

    Args:
        data: the task's, if it is loaded already.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    own_cores = max(1, devices.cores() // group.sharing)
    devices.use_cpu_devices(config.mesh_devices(group.processes) or own_cores)
    compile_cache.use()
    try:
        if group.is_first:
            if config.out is not None:
                records.check_writable(config.out)
            check_files(config)
        plan = make_plan(config, group.hosts, task=task, strategy=strategy)
        # Data comes last: what is wrong with the rest is reported in under a second.
        if data is None:
            data = loading.load(plan.task, plan.config.task, plan.config.validation)
        check_data(plan.config, data, config.batch_size is not None)
        _shards(plan, data)  # it refuses a partition that the data lacks
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return plan, data


def check_files(config: RunConfig) -> None:
    """Raises a BadRequest if a run would replace what is not to be replaced."""
    out, goes_on = config.out, config.resume or config.resume_center
    try:
        if out is not None:
            records.check_out(out, config.overwrite or goes_on)
        if (path := config.export) is not None:
            before = records.exported(out) if out is not None and goes_on else None
            is_own = before is not None and before.absolute() == path.absolute()
            export.check(path, config.overwrite or is_own)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def make_run(plan: Plan, data: Data, group: ProcessGroup = ALONE) -> Run:
    """Makes what a run starts with, in the order of what depends on what.

    Raises:
        BadRequest: what the task or the strategy cannot do.
    """
    config = replace(plan.config, feed=plan.config.feed or loading.default_feed(data))
    plan = replace(plan, config=config)
    params, buffers = _model(plan, data)

    def start(params: PyTree, buffers: PyTree) -> Replica:
        return Replica(params, plan.optimizer.init(params), buffers)

    ends, trainer = None, plan.trainer
    if config.displacements:
        with refused("algo", config.algo):
            replica = jax.eval_shape(start, params, buffers)
            ends = ends_of(plan, replica, config.steps)
        if ends is not None:
            # Measuring sends params, which no run shall count: the plan's trainer does.
            strategy = displacements.measured(plan.strategy, ends, config.evaluations)
            trainer = make_trainer(config, plan.task, plan.optimizer, strategy)
    state = _state(plan, trainer, params, buffers)
    rounds = planned(plan, state, ends)
    if not rounds.is_fixed:
        how = "counted as it is decided" if rounds.sent(Progress()) else "not counted"
        terminal.say(f"what is sent depends on more than the step: bytes are {how}")
    rate = _effective_lr(plan, params, group)
    return Run(
        **vars(replace(plan, trainer=trainer)),
        data=data,
        shards=_shards(plan, data),
        group=group,
        rounds=rounds,
        state=state,
        facts=_facts(plan, data, rate),
    )


def reseeded(run: Run, seed: int) -> Run:
    """Returns the same run from another seed, with its compiled programs.

    Only for a run that draws from the seed at its start alone: see `draws`.
    """
    # Compilation is most of a short run, and is paid once for all seeds this way. On
    # CPUs it beats stacking seeds as one more vmap axis, as lanes fill the cores.
    run = replace(
        run,
        config=replace(run.config, seed=seed),
        facts={**run.facts, "seed": seed},
    )
    state = _state(run, run.trainer, *_model(run, run.data))
    return replace(run, shards=_shards(run, run.data), state=state)


def _shards(plan: Plan, data: Data) -> list[np.ndarray] | None:
    """Returns the training examples of each worker, where they do not share all."""
    c = plan.config
    return partition.shards(c.partition, data.groups, data.examples, c.workers, c.seed)


def _model(plan: Plan, data: Data) -> tuple[PyTree, PyTree]:
    """Returns the task's params and buffers, checked."""
    c = plan.config
    with refused("task", c.task):
        params, buffers = check_model(plan.task, c.seed)
        if ":" in c.task or c.task == OWN:  # it is tried out on shapes alone
            check_apply(plan.task, params, buffers, data.test)
            check_indices(plan.task, params, buffers, data)
        if c.mesh is not None:
            check_shardings(plan.task, params, plan.trainer.layout)
        if c.export is not None:
            export.named(Replica(params, (), buffers))
    return params, buffers


def _state(
    plan: Plan, trainer: DataParallel, params: PyTree, buffers: PyTree
) -> TrainState:
    """Returns the state that training starts from."""
    with refused("algo", plan.config.algo):
        return trainer.init(params, buffers, plan.config.seed)


@contextmanager
def refused(flag: str, name: str) -> Iterator[None]:
    """Raises errors inside as those for the user; a bug of ours as it is.

    Args:
        flag: algo or task.
        name: its value.
    """
    try:
        yield
    except Terminated:
        raise
    # A user's task or strategy may raise anything.
    except (Exception, SystemExit) as error:
        if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
            raise BadRequest("the model does not fit in memory") from error
        if ":" in name:
            raise explain(f"--{flag} {name}", error) from error
        if isinstance(error, ValueError):
            raise BadRequest(str(error)) from error
        raise


def _effective_lr(plan: Plan, params: PyTree, group: ProcessGroup) -> float | None:
    """Returns the effective learning rate, for the first process, which writes it."""
    c = plan.config
    if not group.is_first:
        return math.nan
    try:
        steady = plan.algorithm
        if c.algo != OWN:
            steady = make_algorithm(c, c.lr, plan.optimizer, group.hosts, plan.task)
        return effective_lr(steady, params, plan.optimizer, c.workers, c.lr)
    except Exception as error:  # one figure of the report must not end the run
        terminal.say(
            f"no effective learning rate found: {type(error).__name__}: {error}"
        )
        return math.nan


def _facts(plan: Plan, data: Data, effective_lr: float | None) -> dict[str, Any]:
    """Returns what config.json and summary.json have in common."""
    layout = plan.trainer.layout
    return {
        **{name: getattr(plan.config, name) for name in COMMON},
        "effective_lr": effective_lr,
        "backend": layout.backend,
        "devices": len(layout.devices),
        "lanes": layout.lanes,
        "mesh": dict(layout.inner),
        "processes": layout.processes,
        "platform": layout.devices[0].platform,
        "examples": {
            "train": data.examples,
            "test": len(next(iter(data.test.values()))),
        },
        "versions": versions(),
        "commit": commit(),
    }
