"""The components of a run, made of its config before anything compiles."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.cli.factories import TASK
from experiments.pipeline import loading, partition
from experiments.tasks.contract import check_axes, check_task
from experiments.tasks.task import Data, Task, losses
from experiments.training import compile_cache, export, optimizers, records
from experiments.training.config import RunConfig
from experiments.training.defaults import batch_unit, nearest_multiple, resolved
from experiments.training.process_group import ALONE, ProcessGroup
from experiments.training.strategies import make_strategies
from syncalgos import WORKERS, DataParallel, Strategy
from syncalgos.combinators import introspection
from syncalgos.engine.placement.layout import Device


@dataclass(frozen=True)
class Trainable:
    """The parts of a run that need no data.

    Attributes:
        config: with all defaults filled in but the feed.
        task: the model, its data and its figures.
        optimizer: the inner one.
        strategy: how the workers agree.
        algorithm: its part that is the algorithm's, without shared tables.
        trainer: the engine.
    """

    config: RunConfig
    task: Task
    optimizer: optax.GradientTransformation
    strategy: Strategy
    algorithm: Strategy
    trainer: DataParallel


@dataclass(frozen=True)
class Components(Trainable):
    """The parts of a run, before it has a state; all defaults are filled in.

    Attributes:
        data: of the task.
        shards: which training examples are each worker's own; None if all share all.
        group: the processes that train together.
    """

    data: Data
    shards: list[np.ndarray] | None
    group: ProcessGroup


def make_components(
    config: RunConfig, data: Data | None = None, group: ProcessGroup = ALONE
) -> Components:
    """Checks a config, fills in what it leaves open, and makes what it asks for.

    Args:
        config: from the command line.
        data: the task's, if it is loaded already.
        group: the processes that train together; they have joined already.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    own_cores = max(1, cores() // group.sharing)
    use_cpu_devices(config.mesh_devices(group.processes) or own_cores)
    compile_cache.use()
    try:
        return _make(config, data, group)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def use_cpu_devices(count: int) -> None:
    """Has so many virtual CPU devices, unless the environment says otherwise."""
    # The setting overrides XLA_FLAGS' device count without a word.
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if in_flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # the backend runs already, with the devices it was started with


def use_devices(count: int) -> None:
    """Has so many virtual CPU devices, and as many threads.

    Raises:
        ValueError: the backend runs already, with another number.
    """
    # Threads, too: XLA splits sums over them, so their number changes the bits.
    os.environ |= environment(count, count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise ValueError(
                f"jax runs already, with {jax.device_count()} devices, not {count}"
            ) from None


def environment(devices: int, threads: int) -> dict[str, str]:
    """Returns the variables by which a process has so many CPU devices and threads."""
    return {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(threads)}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _make(config: RunConfig, data: Data | None, group: ProcessGroup) -> Components:
    """Makes the components; raises a ValueError for what cannot be done."""
    if group.is_first:
        if config.out is not None:
            records.check_writable(config.out)
        check_files(config, config.out)
    is_batch_given = config.batch_size is not None
    made = make_trainable(config, group.hosts)
    config = made.config
    # Data comes last: what is wrong with the rest is reported in under a second.
    if data is None:
        data = loading.load(made.task, config.task, config.validation)
    check_data(config, data, is_batch_given)
    config = dataclasses.replace(config, feed=config.feed or loading.default_feed(data))
    shards = partition.shards(
        config.partition, data.groups, data.examples, config.workers, config.seed
    )
    of_data = {"config": config, "data": data, "shards": shards, "group": group}
    return Components(**{**vars(made), **of_data})


def check_files(config: RunConfig, out: Path | None) -> None:
    """Raises a ValueError if a run would replace what is not to be replaced.

    Args:
        config: of the run.
        out: the folder of its files; None: a new one.
    """
    goes_on = config.resume or config.resume_center
    if out is not None:
        records.check_out(out, config.overwrite or goes_on)
    if config.export is not None:
        before = records.exported(out) if out is not None and goes_on else None
        is_own = before is not None and before.absolute() == config.export.absolute()
        export.check(config.export, config.overwrite or is_own)


def make_trainable(
    config: RunConfig, hosts: int, devices: Sequence[Device] | None = None
) -> Trainable:
    """Makes what needs no data.

    Args:
        config: from the command line.
        hosts: on how many machines the workers are.
        devices: theirs, in place of the config's.

    Raises:
        BadRequest: what a task or a strategy cannot be; a ValueError if it is one of
            ours.
    """
    task = make_task(config)
    config = resolved(config, task)
    _check_mesh(config, task)
    schedule, optimizer = optimizers.inner(config, task.muon)
    strategies = make_strategies(config, schedule, optimizer, hosts, task)
    _check_plateau(config, strategies[0])
    trainer = make_trainer(config, task, optimizer, strategies[0], devices)
    return Trainable(config, task, optimizer, *strategies, trainer)


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


def _check_plateau(config: RunConfig, strategy: Strategy) -> None:
    """Raises a ValueError where each worker would lower its rate by its own loss."""
    is_shared = config.workers == 1 or introspection.reduces(strategy)
    if config.schedule == "plateau" and not is_shared:
        raise ValueError(
            f"--schedule plateau: workers of {config.algo} share no loss, so that each "
            "would lower its own rate: take constant, cosine or step, or an algorithm "
            "that reduces gradients, such as sync_sgd"
        )


def _check_mesh(config: RunConfig, task: Task) -> None:
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


def check_data(config: RunConfig, data: Data, is_batch_given: bool) -> None:
    """Raises a ValueError unless the data goes with the config.

    Args:
        config: with all defaults filled in.
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
    config: RunConfig,
    task: Task,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    devices: Sequence[Device] | None = None,
) -> DataParallel:
    """Makes the engine for a strategy, on these devices or the config's."""
    train_loss, eval_loss = losses(task)
    given = config.devices if devices is None else devices
    # Rows in parts are no replicas: the engine keeps the strategy away from them.
    sharded = None
    if task.tables is not None and task.kept == "sharded":
        sharded = jax.tree.map(bool, task.tables.names)
    return DataParallel(
        train_loss,
        optimizer,
        strategy,
        workers=config.workers,
        backend=config.backend,
        mesh=None if config.mesh is None else dict(config.mesh),
        shardings=_shardings(config, task),
        devices=None if given is None else [*given],
        eval_loss=eval_loss,
        accumulate=config.accumulate,
        sharded=sharded,
        lanes=config.lanes,
        lane_form=config.lane_form,
        each_worker=True,
        sync_memory=config.sync_memory,
    )


def _shardings(
    config: RunConfig, task: Task
) -> Callable[[str, tuple[int, ...]], PartitionSpec] | None:
    """Returns the task's shardings over the run's mesh, as the engine takes them."""
    mesh, rule = config.mesh, task.shardings
    if mesh is None or rule is None:
        return None
    return lambda path, shape: rule(path, shape, mesh)
