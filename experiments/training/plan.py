"""The plan of a run: everything that follows from its config, without data."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from experiments.cli import factories
from experiments.cli.factories import ALGORITHM, TASK
from experiments.tasks.task import (
    Data,
    Task,
    check_axes,
    check_task,
    losses,
    over_workers,
)
from experiments.training import optimizers
from experiments.training.config import SETTINGS, RunConfig, Settings
from experiments.training.defaults import (
    batch_unit,
    nearest_multiple,
    resolved,
    takes,
)
from experiments.training.strategies import declaring, make_strategies
from syncalgos import WORKERS, DataParallel, Placement, Replica, Strategy
from syncalgos.combinators import introspection
from syncalgos.engine.placement.layout import Device
from syncalgos.strategy import seeing

Numbers = Mapping[str, Any]
"""Values of settings by field; "arguments" has the algorithm's values, by flag."""
Rate = Callable[[Numbers, float], float | None]
"""Computes the effective learning rate from numbers and the inner rate."""

_OF_OPTIMIZER = "lr", "momentum", "b1", "b2", "weight_decay", "clip_norm"


class Method(NamedTuple):
    """The training method: an optimizer and a strategy.

    Attributes:
        optimizer: the inner optimizer.
        strategy: the strategy that synchronizes the workers.
        algorithm: the part of the strategy without shared tables.
    """

    optimizer: optax.GradientTransformation
    strategy: Strategy
    algorithm: Strategy


@dataclass
class Programs:
    """The compiled programs of a run, which other runs of a study may share.

    Attributes:
        settings: those of the run that they were made for.
        numbers: the settings that are data to them.
        task: the model, its data and its figures.
        make: makes the method for settings that differ in these numbers.
        trainer: the engine.
        rate: computes the effective learning rate; None until a run needs it.
        measuring: the ends of rounds, and the engine that records the displacements
            at them; None until a run needs it.
    """

    settings: Settings
    numbers: Numbers
    task: Task
    make: Callable[[Settings], Method]
    trainer: DataParallel
    rate: Rate | None = None
    measuring: tuple[np.ndarray, DataParallel] | None = None

    def serve(self, settings: Settings) -> bool:
        """Whether a run with other settings can use these programs."""
        same = _structure(self.settings, self.numbers)
        return same == _structure(settings, self.numbers)


class Plan(NamedTuple):
    """The parts of a run that need no data.

    Attributes:
        config: the settings.
        numbers: the settings that are data to the compiled programs.
        method: the method of this run.
        programs: its programs.
    """

    config: Settings
    numbers: Numbers
    method: Method
    programs: Programs

    @property
    def task(self) -> Task:
        """The model, its data and its figures."""
        return self.programs.task

    @property
    def trainer(self) -> DataParallel:
        """The engine."""
        return self.programs.trainer


def make_plan(
    config: RunConfig,
    hosts: int = 1,
    devices: Sequence[Device] | None = None,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
    programs: Programs | None = None,
) -> Plan:
    """Makes the plan of a run.

    Args:
        config: the config, as given by the user.
        hosts: the number of machines.
        devices: the devices, in place of the config's.
        task: the task, in place of the config's.
        strategy: the strategy, in place of the config's algorithm.
        programs: those of an earlier run, which this run shares if possible.

    Raises:
        BadRequest: a custom task or strategy cannot be used.
        ValueError: a registered task or algorithm refuses its settings.
    """
    task = make_task(config) if task is None else task
    algorithm = declaring(config, task) if strategy is None else strategy
    settings = resolved(config, task, algorithm)
    _check_mesh(settings, task)

    def make(settings: Settings) -> Method:
        rate, optimizer = optimizers.inner(settings, task.muon)
        made = make_strategies(settings, rate, optimizer, hosts, task, strategy)
        return Method(optimizer, *made)

    method = make(settings)
    _check_plateau(settings, method.strategy)
    if programs is not None and programs.serve(settings):
        return Plan(settings, _like(settings, programs.numbers), method, programs)
    numbers = _as_data(settings, make, task)
    trainer = make_trainer(settings, task, make, numbers, devices, method)
    programs = Programs(settings, numbers, task, make, trainer)
    return Plan(settings, numbers, method, programs)


def _numbers(config: Settings, names: Collection[str], own: Iterable[str]) -> Numbers:
    """Returns these settings and arguments of the algorithm, except those of None."""
    given = {name: x for name in names if (x := getattr(config, name)) is not None}
    if not config.weight_decay:  # the optimizer has no part for a decay of 0
        given.pop("weight_decay", None)
    arguments = {name: config.arguments[name] for name in own}
    arguments = {name: x for name, x in arguments.items() if x is not None}
    return {**given, "arguments": arguments}


def _as_data(
    config: Settings, make: Callable[[Settings], Method], task: Task
) -> Numbers:
    """Returns the numbers of a run that its programs take as data.

    There are none if an optimizer or a custom algorithm needs their values.
    """
    floats = {k: x for k, x in config.arguments.items() if isinstance(x, float)}
    is_own = ":" in config.algo  # tests check that ours accept traced numbers

    def traced(numbers: Numbers) -> None:
        if is_own:
            _trace_a_step(make, config, numbers, task)
        else:
            make(config.at(numbers))

    def is_taken(numbers: Numbers) -> bool:
        return _is_traceable(lambda x: (declaring(config.at(x), task), ())[1], numbers)

    # Usually all are data; otherwise each argument is asked for by itself.
    numbers = _numbers(config, [*_OF_OPTIMIZER, "seed"], floats)
    if _is_traceable(traced, numbers):
        return numbers
    own = [k for k, x in floats.items() if is_taken({"arguments": {k: x}})]
    seed = ["seed"] if is_taken({"seed": config.seed}) else []
    numbers = _numbers(config, [*_OF_OPTIMIZER, *seed], own)
    return numbers if _is_traceable(traced, numbers) else {}


def _trace_a_step(
    make: Callable[[Settings], Method], config: Settings, numbers: Numbers, task: Task
) -> None:
    """Makes a method, and takes a local step with it, on the task's params."""

    def local_step(params, numbers, step):
        method = make(config.at(numbers))
        strategy, optimizer = method.strategy, method.optimizer
        replica = seeing(strategy, Replica(params, optimizer.init(params)))
        state = strategy.init(params)
        grads, state = strategy.reduce(params, replica, state, step)
        replica, state = strategy.sync(replica._replace(params=grads), state, step)
        return strategy.center(replica.params, state)

    params = jax.eval_shape(task.init, jax.random.key(0))[0]
    of_all = jax.tree.map(
        lambda x: jnp.zeros((1, config.workers, *x.shape), x.dtype), params
    )
    over_workers(local_step, (0, None, None))(of_all, numbers, 0)


def _is_traceable(function: Callable[[Any], Any], given: Any) -> bool:
    """Whether jax can trace a function of numbers."""
    try:
        jax.eval_shape(function, given)
    except Exception:  # it may raise any error for a number without a value
        return False
    return True


def _structure(config: Settings, numbers: Numbers) -> dict[str, Any]:
    """Returns all settings that a run's programs depend on, except for data."""
    apart = {*numbers, "arguments", "validation", "seed", "init_from"}
    names = [x.parameter for x in SETTINGS.values() if x.scope != "process"]
    found = {name: getattr(config, name) for name in names if name not in apart}
    own = numbers.get("arguments", {})
    found["arguments"] = {k: x for k, x in config.arguments.items() if k not in own}
    found["task_arguments"] = dict(config.task_arguments)
    if takes(config, "seed", [TASK] if "seed" in numbers else [ALGORITHM, TASK]):
        found["seed"] = config.seed
    # A momentum of None is not a number.
    found["data"] = jax.tree.structure(_like(config, numbers))
    return found


def _like(config: Settings, numbers: Numbers) -> Numbers:
    """Returns the same numbers of other settings."""
    if not numbers:
        return numbers
    names = {*_OF_OPTIMIZER, *numbers} - {"arguments"}
    return _numbers(config, names, numbers["arguments"])


def make_task(config: RunConfig) -> Task:
    """Calls the task's factory with its flags and what the harness passes.

    Raises:
        BadRequest: a custom task cannot be used.
        ValueError: a registered task refuses its arguments.
    """
    offered = {
        "data_dir": config.data_dir,
        "seed": config.seed,
        "workers": config.workers,
        "axis": WORKERS,
    }
    return factories.call(TASK, config.task, config.task_arguments, offered, check_task)


def _check_plateau(config: Settings, strategy: Strategy) -> None:
    """Raises a ValueError if each worker would lower its own learning rate."""
    is_shared = config.workers == 1 or introspection.reduces(strategy)
    if config.schedule == "plateau" and not is_shared:
        raise ValueError(
            f"--schedule plateau: workers of {config.algo} share no loss, so each "
            "would lower its own rate: use another schedule, or an algorithm that "
            "averages gradients, such as sync_sgd"
        )


def _check_mesh(config: Settings, task: Task) -> None:
    """Raises a ValueError for a mesh that does not fit the task or the batch."""
    c = config
    if c.mesh is None:
        return
    check_axes(c.task, task, c.mesh)
    # The engine would refuse it only after it has read a batch.
    each, unit = c.batch_size // c.workers // c.accumulate, batch_unit(c)
    if c.batch_size % unit:
        parts = unit // c.workers // c.accumulate
        raise ValueError(
            f"--mesh: {each} examples do not divide over {parts} parts of a worker's "
            f"devices: use a --batch-size that is a multiple of {unit}, such as "
            f"{nearest_multiple(c.batch_size, unit)}"
        )


def check_data(config: Settings, data: Data, is_batch_given: bool) -> None:
    """Raises a ValueError unless the data fits the config.

    Args:
        config: the settings.
        data: the data of the task.
        is_batch_given: whether the user sets the batch size.
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
            f"--batch-size {c.batch_size} is larger than the training data of {c.task} "
            f"({data.examples} examples)"
        )


def make_trainer(
    config: Settings,
    task: Task,
    make: Callable[[Settings], Method],
    numbers: Numbers,
    devices: Sequence[Device] | None = None,
    method: Method | None = None,
) -> DataParallel:
    """Makes the engine for a method, on the given devices or the config's.

    Args:
        config: the settings.
        task: the task to train.
        make: makes the method for settings that differ in the numbers.
        numbers: the settings that are data to the programs.
        devices: the devices; None means the config's.
        method: the method of these numbers, if it is already made.
    """
    method_of = _remembering(lambda given: make(config.at(given)), numbers, method)
    given = config.devices if devices is None else devices
    # Sharded rows are not replicas: the engine hides them from the strategy.
    tables = None
    if task.tables is not None and task.kept == "sharded":
        tables = jax.tree.map(bool, task.tables.names)
    placement = Placement(
        devices=None if given is None else [*given],
        mesh=None if config.mesh is None else dict(config.mesh),
        shardings=_shardings(config, task),
    )
    train_loss, eval_loss = losses(task)
    return DataParallel(
        train_loss,
        lambda numbers: method_of(numbers).optimizer,
        lambda numbers: method_of(numbers).strategy,
        workers=config.workers,
        backend=config.backend,
        eval_loss=eval_loss,
        accumulate=config.accumulate,
        tables=tables,
        each_worker=True,
        hyperparams=numbers,
        placement=placement,
    )


def _remembering(
    make: Callable[[Numbers], Method], numbers: Numbers, method: Method | None
) -> Callable[[Numbers], Method]:
    """Returns `make`, which remembers the last method.

    The engine asks for the optimizer and for the strategy of the same numbers.
    """
    last, made = jax.tree.leaves(numbers), method

    def method_of(numbers: Numbers) -> Method:
        nonlocal last, made
        given = jax.tree.leaves(numbers)
        if made is None or not all(map(_is_same, given, last)):
            last, made = given, make(numbers)
        return made

    return method_of


def _is_same(x: Any, y: Any) -> bool:
    """Whether two numbers are the same one; a traced one has no value to compare."""
    return x is y or (type(x) is type(y) and isinstance(x, int | float) and x == y)


def _shardings(
    config: Settings, task: Task
) -> Callable[[str, tuple[int, ...]], PartitionSpec] | None:
    """Returns the task's shardings over the run's mesh, in the engine's form."""
    mesh, rule = config.mesh, task.shardings
    if mesh is None or rule is None:
        return None
    return lambda path, shape: rule(path, shape, mesh)
