"""The plan of a run: everything that follows from its config, without data.

From the inside out: a task, its inner optimizer, the algorithm, the strategy (the
algorithm with the additions of common flags), and the engine that trains with them.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos
from experiments.command import factories
from experiments.command.errors import BadRequest, explaining_errors, in_one_line
from experiments.command.factories import ALGORITHM, TASK, YOUR_OWN
from experiments.tasks.task import (
    Data,
    Tables,
    Task,
    check_axes,
    check_task,
    losses,
    over_workers,
)
from experiments.training import optimizers
from experiments.training.config import SETTINGS, RunConfig, Settings
from experiments.training.defaults import (
    batch_axes,
    batch_unit,
    nearest_multiple,
    resolve_settings,
    takes,
)
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.optimizers import Schedule
from syncalgos import WORKERS, DataParallel, Placement, Replica, Strategy, checks
from syncalgos.collectives import PyTree
from syncalgos.reducers import Reducer, row_sparse
from syncalgos.strategy import seeing

Numbers = Mapping[str, Any]
"""Values of settings by field; "arguments" has the algorithm's values, by flag."""
MeasureRate = Callable[..., syncalgos.EffectiveRate]
"""Measures the effective rate from `hyperparams`, which are numbers, and the inner
`learning_rate`."""

_OF_OPTIMIZER = "lr", "momentum", "b1", "b2", "weight_decay", "clip_norm"
ROW_SPARSE = "row_sparse"


class TrainingMethod(NamedTuple):
    """The training method: an optimizer and a strategy.

    Attributes:
        optimizer: the inner optimizer.
        strategy: the strategy that synchronizes the workers.
        algorithm: the part of the strategy without shared tables.
    """

    optimizer: optax.GradientTransformation
    strategy: Strategy
    algorithm: Strategy


class Varied(NamedTuple):
    """The settings that may differ between runs of the same programs, as their data.

    Attributes:
        fields: settings of the optimizer, and perhaps the seed.
        arguments: arguments of the algorithm.
    """

    fields: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def select(self, config: Settings) -> Numbers:
        """Returns their values, except those of None."""
        numbers: dict[str, Any] = {}
        for name in self.fields:
            value = getattr(config, name)
            # The optimizer has no part for a decay of 0.
            is_left_out = name == "weight_decay" and not config.weight_decay
            if value is not None and not is_left_out:
                numbers[name] = value
        arguments: dict[str, Any] = {}
        for name in self.arguments:
            value = config.arguments[name]
            if value is not None:
                arguments[name] = value
        return {**numbers, "arguments": arguments}


class Timetable(NamedTuple):
    """When a run sends, and what its center includes then.

    Attributes:
        acts: the local steps at which a sync may act, of `syncalgos.describe`.
        lands: the local steps at which the result of a sync arrives.
        ends: whether a round ends at each step, (steps,); None if only the run decides.
        center_steps: the last local step that the evaluated model includes, after 0, 1,
            … local steps; None if only the run decides.
        unsynced: the reason why no sync comes, with a remedy; "" if one comes.
    """

    acts: Callable[[Any], Any]
    lands: Callable[[Any], Any]
    ends: np.ndarray | None
    center_steps: np.ndarray | None
    unsynced: str = ""


@dataclass
class Programs:
    """The compiled programs of a run, which other runs of a study may share.

    Attributes:
        settings: those of the run that they were made for.
        varied: the settings that are data to them.
        task: the model, its data and its figures.
        make: makes the method for settings that differ in these.
        trainer: the engine.
        rate: measures the effective learning rate; None until a run needs it.
        measuring: the ends of rounds, and the engine that records the displacements
            at them; None until a run needs it.
        hits: whether a model is right on each held-out example; None until a run
            needs it.
        timetable: that of the last run; None before it.
    """

    settings: Settings
    varied: Varied
    task: Task
    make: Callable[[Settings], TrainingMethod]
    trainer: DataParallel
    rate: MeasureRate | None = None
    measuring: tuple[np.ndarray, DataParallel] | None = None
    hits: Callable[..., jax.Array] | None = None
    timetable: Timetable | None = None

    def serve(self, settings: Settings, objects: Objects = NO_OBJECTS) -> bool:
        """Whether a run with other settings can use these programs."""
        structure = _structure(self.settings, self.varied, objects)
        return structure == _structure(settings, self.varied, objects)


class RunPlan(NamedTuple):
    """The parts of a run that need no data.

    Attributes:
        config: the settings.
        numbers: the settings that are data to the compiled programs.
        method: the method of this run.
        programs: its programs.
        objects: what Python code passed in place of names.
    """

    config: Settings
    numbers: Numbers
    method: TrainingMethod
    programs: Programs
    objects: Objects = NO_OBJECTS

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
    devices: Sequence[Any] | None = None,
    *,
    objects: Objects = NO_OBJECTS,
    programs: Programs | None = None,
) -> RunPlan:
    """Makes the plan of a run.

    Args:
        config: the config, as given by the user.
        hosts: the number of machines.
        devices: the devices, in place of the config's.
        objects: what Python code passed in place of the config's names.
        programs: those of an earlier run, which this run shares if possible.

    Raises:
        BadRequest: a custom task or strategy cannot be used.
        ValueError: a registered task or algorithm refuses its settings.
    """
    task = make_task(config, objects)
    settings = resolve_settings(config, task, declaring(config, task, objects))
    _check_mesh(settings, task)

    make = partial(make_method, task=task, hosts=hosts, objects=objects)
    method = make(settings)
    _check_plateau(settings, method.strategy)
    if programs is None or not programs.serve(settings, objects):
        varied = find_varied(settings, objects)
        numbers = varied.select(settings)
        _check_varied(settings, make, task, objects, numbers)
        trainer = make_trainer(settings, task, make, numbers, method, devices)
        programs = Programs(settings, varied, task, make, trainer)
    numbers = programs.varied.select(settings)
    return RunPlan(settings, numbers, method, programs, objects)


def make_task(config: RunConfig, objects: Objects = NO_OBJECTS) -> Task:
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
    return factories.call(
        TASK,
        config.task,
        config.task_arguments,
        offered,
        check_task,
        objects.find_factory(TASK, config.task),
    )


def is_custom(name: str) -> bool:
    """Whether a task or an algorithm is the user's own."""
    return ":" in name or name == YOUR_OWN


def make_method(
    config: Settings, task: Task, hosts: int, objects: Objects = NO_OBJECTS
) -> TrainingMethod:
    """Makes the method of a run.

    Args:
        config: the settings.
        task: the task to train.
        hosts: the number of machines.
        objects: what Python code passed in place of names.

    Raises:
        BadRequest: a custom algorithm cannot be used.
        ValueError: a registered algorithm refuses its arguments.
    """
    rate, optimizer = optimizers.make_inner_optimizer(config, task.muon)
    make = partial(
        make_algorithm, config, rate, optimizer, hosts, task, objects=objects
    )
    algorithm = make()
    if config.arguments.get("reduce") == ROW_SPARSE:
        algorithm = make(reduce=_rows_of_a_step(config, algorithm, task))
    strategy = algorithm
    if task.tables is not None and task.kept == "shared":
        # Shared tables lie beside the algorithm, and are updated at every step.
        are_tables = jax.tree.map(bool, task.tables.names)
        table_reduction = syncalgos.reduce_with(_row_sparse(config, task.tables))
        algorithm = syncalgos.masked(algorithm, jax.tree.map(operator.not_, are_tables))
        tables = syncalgos.masked(table_reduction, are_tables)
        strategy = syncalgos.chain(tables, algorithm)
    # From the inside out: actions at syncs are part of the algorithm, and a synchronous
    # start precedes all of it.
    if config.opt_state_at_sync != "keep":
        at_sync = optimizers.AT_SYNC[config.opt_state_at_sync](optimizer)
        strategy = syncalgos.at_syncs(strategy, at_sync)
    n = config.sync_until
    if n:
        start = syncalgos.until(syncalgos.sync_sgd(), n)
        strategy = syncalgos.chain(start, syncalgos.after(strategy, n))
    return TrainingMethod(optimizer, strategy, algorithm)


def declaring(config: RunConfig, task: Task, objects: Objects = NO_OBJECTS) -> Strategy:
    """Makes a config's algorithm to read its declarations, before the rate is known."""
    return make_algorithm(
        config, lambda step: 1.0, optax.sgd(1.0), 1, task, objects=objects
    )


def make_algorithm(
    config: RunConfig,
    learning_rate: Schedule,
    optimizer: optax.GradientTransformation,
    hosts: int,
    task: Task,
    reduce: Reducer | str = "mean",
    *,
    objects: Objects = NO_OBJECTS,
) -> Strategy:
    """Calls the algorithm's factory with its flags and what the harness passes.

    Args:
        config: the settings.
        learning_rate: the `schedule` of `make_strategies`.
        optimizer: as in `make_strategies`.
        hosts: as in `make_strategies`.
        task: as in `make_strategies`.
        reduce: the reducer for `--reduce row_sparse`. A mean gives the same result, for
            params of any shape.
        objects: what Python code passed in place of names.
    """
    arguments = {**config.arguments}
    if arguments.get("reduce") == ROW_SPARSE:
        arguments["reduce"] = reduce
    # In a model with stacked layers a few leaves hold most params: fragments of whole
    # leaves would have very different sizes.
    if "cut" in arguments and arguments["cut"] is None and task.layered:
        arguments["cut"] = "bytes"
    offered = {
        "seed": config.seed,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "axis": WORKERS,
        "hosts": hosts,
        "layered": task.layered,
    }
    return factories.call(
        ALGORITHM,
        config.algo,
        arguments,
        offered,
        _check_strategy,
        objects.find_factory(ALGORITHM, config.algo),
    )


def _check_strategy(strategy: Any) -> None:
    """Raises a ValueError unless a factory has made a strategy."""
    if not isinstance(strategy, Strategy):
        raise ValueError(
            "the factory must return a syncalgos.Strategy, got "
            f"{checks.shown(strategy)}"
        )


def _rows_of_a_step(config: Settings, plain: Strategy, task: Task) -> Reducer:
    """Returns the reducer that takes the place of `--reduce row_sparse`.

    Args:
        config: the settings.
        plain: the algorithm with a mean in place of that reducer.
        task: the task to train.

    Raises:
        ValueError: the task has no tables, or the algorithm does not average the
            gradients of one step.
    """
    if not syncalgos.describe(plain).averages_grads:
        raise ValueError(
            f"--reduce {ROW_SPARSE} sends only the rows of one step's gradient: "
            f"use it with --algo sync_sgd, not {config.algo}"
        )
    if task.tables is None:
        raise ValueError(
            f"--reduce {ROW_SPARSE} needs a task with tables, such as embeddings"
        )
    if task.kept != "replicated":
        raise ValueError(
            f"--reduce {ROW_SPARSE} needs --tables replicated: {task.kept} tables send "
            "only rows anyway"
        )
    return _row_sparse(config, task.tables)


def _row_sparse(config: Settings, tables: Tables) -> Reducer:
    """Makes the reducer for the rows that all microbatches of a step touch."""
    examples = config.batch_size // config.workers // config.accumulate
    rows_by_table: dict[str, int] = {}
    for name, rows_of_microbatch in tables.rows(examples).items():
        rows_by_table[name] = config.accumulate * rows_of_microbatch
    return row_sparse(rows_by_table, tables=tables.names)


def find_varied(config: Settings, objects: Objects = NO_OBJECTS) -> Varied:
    """Returns the settings that the programs of a run take as data.

    These are the numbers of the inner optimizer, the seed, and the algorithm's floats
    except those that its factory names as `static` (see `syncalgos.writing.factory`).
    A factory of the user's that has no attribute `static` may need the value of each,
    as in `if weight > 0.7`.
    """
    factory = objects.find_factory(ALGORITHM, config.algo)
    parameters = inspect.signature(factory).parameters
    flags = factories.spellings(parameters)
    floats = [name for name, x in config.arguments.items() if isinstance(x, float)]
    static_names = find_static(factory)
    if static_names is not None or not is_custom(config.algo):
        static_flags = {flags.get(name, name) for name in static_names or ()}
    else:
        static_flags = {*floats}
        if "seed" in parameters:
            static_flags.add("seed")
        if "learning_rate" in parameters:
            static_flags.add("lr")
    fields = (*_OF_OPTIMIZER, "seed")
    return Varied(
        fields=[name for name in fields if name not in static_flags],
        arguments=[name for name in floats if name not in static_flags],
    )


def find_static(factory: Callable[..., Any]) -> Sequence[str] | None:
    """Returns the parameters that a factory names as static; None if it does not."""
    return getattr(factory, "static", None)


def _check_varied(
    config: Settings,
    make: Callable[[Settings], TrainingMethod],
    task: Task,
    objects: Objects,
    numbers: Numbers,
) -> None:
    """Raises a BadRequest if a factory of the user's does not accept its data.

    Tests check that those of the library do.
    """
    factory = objects.find_factory(ALGORITHM, config.algo)
    if find_static(factory) is None or not is_custom(config.algo):
        return

    params = jax.eval_shape(task.init, jax.random.key(0))[0]

    def take_local_step(numbers: Numbers) -> PyTree:
        optimizer, strategy, _ = make(config.at(numbers))

        def local_step(params: PyTree, step: Any) -> PyTree:
            replica = seeing(strategy, Replica(params, optimizer.init(params)))
            state = strategy.init(params)
            grads, state = strategy.reduce(params, replica, state, step)
            replica, state = strategy.sync(replica._replace(params=grads), state, step)
            return strategy.center(replica.params, state)

        worker_params = jax.tree.map(
            lambda x: jnp.zeros((1, config.workers, *x.shape), x.dtype), params
        )
        return over_workers(local_step, (0, None))(worker_params, 0)

    try:
        with explaining_errors(ALGORITHM.flag, config.algo):
            jax.eval_shape(take_local_step, numbers)
    except (BadRequest, ValueError) as error:
        names = ", ".join(numbers["arguments"]) or "seed, learning_rate"
        raise BadRequest(
            f"{in_one_line(error)}: what of {names} it needs as a Python number, it "
            "must name as static, as in @syncalgos.writing.factory(static=['weight'])"
        ) from error


def _structure(
    config: Settings, varied: Varied, objects: Objects = NO_OBJECTS
) -> dict[str, Any]:
    """Returns all settings that a run's programs depend on, except for data."""
    numbers = varied.select(config)
    free_names = {*numbers, "validation", "seed", "init_from"}
    names = [x.parameter for x in SETTINGS.values() if x.scope != "process"]
    structure = {x: getattr(config, x) for x in names if x not in free_names}
    fixed = config.arguments.keys() - numbers["arguments"]
    structure["arguments"] = {name: config.arguments[name] for name in fixed}
    structure["task_arguments"] = dict(config.task_arguments)
    kinds = [TASK] if "seed" in numbers else [ALGORITHM, TASK]
    if takes(config, "seed", kinds, objects):
        structure["seed"] = config.seed
    # A momentum of None is not a number.
    structure["data"] = jax.tree.structure(numbers)
    return structure


def _check_plateau(config: Settings, strategy: Strategy) -> None:
    """Raises a ValueError if each worker would lower its own learning rate."""
    combines_grads = syncalgos.describe(strategy).combines_grads
    is_shared = config.workers == 1 or combines_grads
    if config.schedule == "plateau" and not is_shared:
        raise ValueError(
            f"--schedule plateau: workers of {config.algo} share no loss, so each "
            "would lower its own rate: use another schedule, or an algorithm that "
            "averages gradients, such as sync_sgd"
        )


def _check_mesh(c: Settings, task: Task) -> None:
    """Raises a ValueError for a mesh that does not fit the task or the batch."""
    if c.mesh is None:
        return
    check_axes(c.task, task, c.mesh)
    # The engine would refuse it only after it has read a batch.
    examples = c.batch_size // c.workers // c.accumulate
    unit = batch_unit(c)
    if c.batch_size % unit:
        parts = unit // c.workers // c.accumulate
        raise ValueError(
            f"--mesh: {examples} examples do not divide over {parts} parts of a "
            f"worker's devices: use a --batch-size that is a multiple of {unit}, such "
            f"as {nearest_multiple(c.batch_size, unit)}"
        )


def check_data(config: Settings, data: Data, is_batch_given: bool) -> None:
    """Raises a ValueError unless the data fits the config.

    Args:
        config: the settings.
        data: the data of the task.
        is_batch_given: whether the user sets the batch size.
    """
    c = config
    least = batch_unit(config)
    # A default batch grows with the workers, and may outgrow the data.
    if not is_batch_given and least > data.examples:
        workers = f"{c.workers} workers"
        if c.mesh:
            workers += f" of {c.worker_devices} devices"
        if c.accumulate > 1:
            workers += f" × {c.accumulate} microbatches"
        raise ValueError(
            f"{workers} need a batch of at least {least}, but the training data of "
            f"{c.task} holds {data.examples} examples: use fewer --workers"
        )
    if c.batch_size > data.examples:
        raise ValueError(
            f"--batch-size {c.batch_size} is larger than the training data of {c.task} "
            f"({data.examples} examples): use at most that many"
        )


def make_trainer(
    config: Settings,
    task: Task,
    make: Callable[[Settings], TrainingMethod],
    numbers: Numbers,
    method: TrainingMethod,
    devices: Sequence[Any] | None = None,
) -> DataParallel:
    """Makes the engine for a method, on the given devices or the config's.

    Args:
        config: the settings.
        task: the task to train.
        make: makes the method for settings that differ in the numbers.
        numbers: the settings that are data to the programs.
        method: the method of these numbers.
        devices: the devices; None means the config's.
    """
    methods = _Methods(lambda changed: make(config.at(changed)), numbers, method)
    if devices is None:
        devices = config.devices
    # Sharded rows are not replicas: the engine hides them from the strategy.
    tables = None
    if task.tables is not None and task.kept == "sharded":
        tables = jax.tree.map(bool, task.tables.names)
    placement = Placement(devices=None if devices is None else [*devices])
    mesh = config.mesh
    rule = task.shardings
    if mesh is not None:
        placement = replace(placement, mesh=dict(mesh), batch_axes=batch_axes(mesh))
        if rule is not None:
            placement = replace(
                placement, shardings=lambda path, shape: rule(path, shape, mesh)
            )
    train_loss, eval_loss = losses(task)
    return DataParallel(
        train_loss,
        lambda numbers: methods.find(numbers).optimizer,
        lambda numbers: methods.find(numbers).strategy,
        workers=config.workers,
        backend=config.backend,
        eval_loss=eval_loss,
        accumulate=config.accumulate,
        tables=tables,
        each_worker=True,
        hyperparams=numbers,
        placement=placement,
    )


class _Methods:
    """Makes methods of numbers, and remembers the last one.

    The engine asks for the optimizer and for the strategy of the same numbers.

    Args:
        make: makes a method.
        numbers: the first numbers.
        method: their method.
    """

    def __init__(
        self,
        make: Callable[[Numbers], TrainingMethod],
        numbers: Numbers,
        method: TrainingMethod,
    ):
        self._make = make
        self._values = jax.tree.leaves(numbers)
        self._method = method

    def find(self, numbers: Numbers) -> TrainingMethod:
        """Returns the method of numbers."""
        values = jax.tree.leaves(numbers)
        if not all(map(_is_same, values, self._values)):
            self._values = values
            self._method = self._make(numbers)
        return self._method


def _is_same(x: Any, y: Any) -> bool:
    """Whether two numbers are the same one; a traced one has no value to compare."""
    return x is y or (type(x) is type(y) and isinstance(x, int | float) and x == y)
