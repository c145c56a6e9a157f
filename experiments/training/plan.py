"""The plan of a run: all that follows from its config alone, before there is data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import optax
from jax.sharding import PartitionSpec

from experiments.cli import factories
from experiments.cli.factories import TASK
from experiments.tasks.contract import check_axes, check_task
from experiments.tasks.task import Data, Task, losses
from experiments.training import optimizers
from experiments.training.config import RunConfig, Settings
from experiments.training.defaults import batch_unit, nearest_multiple, resolved
from experiments.training.strategies import declaring, make_strategies
from syncalgos import WORKERS, DataParallel, Placement, Strategy
from syncalgos.combinators import introspection
from syncalgos.engine.placement.layout import Device


@dataclass(frozen=True)
class Plan:
    """The parts of a run that need no data.

    Attributes:
        config: the settings; without the feed where the data decides on it.
        task: the model, its data and its figures.
        optimizer: the inner one.
        strategy: how the workers agree.
        algorithm: its part that is the algorithm's, without shared tables.
        trainer: the engine.
    """

    config: Settings
    task: Task
    optimizer: optax.GradientTransformation
    strategy: Strategy
    algorithm: Strategy
    trainer: DataParallel


def make_plan(
    config: RunConfig,
    hosts: int = 1,
    devices: Sequence[Device] | None = None,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
) -> Plan:
    """Makes the plan of a run.

    Args:
        config: as the user has said it.
        hosts: on how many machines the workers are.
        devices: theirs, in place of the config's.
        task: in place of the config's.
        strategy: in place of the config's algorithm.

    Raises:
        BadRequest: what a task or a strategy cannot be; a ValueError if it is one of
            ours.
    """
    task = make_task(config) if task is None else task
    algorithm = declaring(config, task) if strategy is None else strategy
    settings = resolved(config, task, algorithm)
    _check_mesh(settings, task)
    schedule, optimizer = optimizers.inner(settings, task.muon)
    strategies = make_strategies(settings, schedule, optimizer, hosts, task, strategy)
    _check_plateau(settings, strategies[0])
    trainer = make_trainer(settings, task, optimizer, strategies[0], devices)
    return Plan(settings, task, optimizer, *strategies, trainer)


def make_task(config: RunConfig) -> Task:
    """Calls the task's factory with its flags and what the harness passes.

    Raises:
        BadRequest: what a task cannot be; a ValueError if it is one of ours.
    """
    offered = {
        "data_dir": config.data_dir,
        "seed": config.seed,
        "workers": config.workers,
        "axis": WORKERS,
    }
    return factories.call(TASK, config.task, config.task_arguments, offered, check_task)


def _check_plateau(config: Settings, strategy: Strategy) -> None:
    """Raises a ValueError where each worker would lower its rate by its own loss."""
    is_shared = config.workers == 1 or introspection.reduces(strategy)
    if config.schedule == "plateau" and not is_shared:
        raise ValueError(
            f"--schedule plateau: workers of {config.algo} share no loss, so that each "
            "would lower its own rate: take constant, cosine or step, or an algorithm "
            "that reduces gradients, such as sync_sgd"
        )


def _check_mesh(config: Settings, task: Task) -> None:
    """Raises a ValueError for a mesh that the task, or the batch, cannot have."""
    c = config
    if c.mesh is None:
        return
    check_axes(c.task, task, c.mesh)
    # The engine says so only when it has read a batch.
    each, unit = c.batch_size // c.workers // c.accumulate, batch_unit(c)
    if c.batch_size % unit:
        parts = unit // c.workers // c.accumulate
        raise ValueError(
            f"--mesh: the devices of a worker cut {each} examples into {parts} parts: "
            f"take a --batch-size that is a multiple of {unit}, such as "
            f"{nearest_multiple(c.batch_size, unit)}"
        )


def check_data(config: Settings, data: Data, is_batch_given: bool) -> None:
    """Raises a ValueError unless the data goes with the config.

    Args:
        config: the settings.
        data: of the task.
        is_batch_given: whether the user says the batch.
    """
    c, least = config, batch_unit(config)
    # A default batch grows with the workers, and may outgrow the data.
    if not is_batch_given and least > data.examples:
        each = f" of {c.worker_devices} devices" if c.mesh else ""
        each += f" × {c.accumulate} microbatches" if c.accumulate > 1 else ""
        raise ValueError(
            f"{c.workers} workers{each} need a batch of at least {least}, but "
            f"the training data of {c.task} holds {data.examples} examples"
        )
    if c.batch_size > data.examples:
        raise ValueError(
            f"global batch of {c.batch_size} is larger than the training data of "
            f"{c.task} ({data.examples} examples)"
        )
    if c.feed == "device" and not isinstance(data.train, dict):
        raise ValueError(f"--feed device: the data of {c.task} is made on the host")


def make_trainer(
    config: Settings,
    task: Task,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    devices: Sequence[Device] | None = None,
) -> DataParallel:
    """Makes the engine for a strategy, on these devices or the config's."""
    train_loss, eval_loss = losses(task)
    given = config.devices if devices is None else devices
    # Rows in parts are no replicas: the engine keeps the strategy away from them.
    tables = None
    if task.tables is not None and task.kept == "sharded":
        tables = jax.tree.map(bool, task.tables.names)
    placement = Placement(
        devices=None if given is None else [*given],
        lanes=config.lanes,
        lane_form=config.lane_form,
        mesh=None if config.mesh is None else dict(config.mesh),
        shardings=_shardings(config, task),
        sync_memory=config.sync_memory,
    )
    return DataParallel(
        train_loss,
        optimizer,
        strategy,
        workers=config.workers,
        backend=config.backend,
        eval_loss=eval_loss,
        accumulate=config.accumulate,
        tables=tables,
        each_worker=True,
        placement=placement,
    )


def _shardings(
    config: Settings, task: Task
) -> Callable[[str, tuple[int, ...]], PartitionSpec] | None:
    """Returns the task's shardings over the run's mesh, as the engine takes them."""
    mesh, rule = config.mesh, task.shardings
    if mesh is None or rule is None:
        return None
    return lambda path, shape: rule(path, shape, mesh)
