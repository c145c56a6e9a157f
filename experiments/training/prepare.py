"""A run that is ready to start: its plan, data, engine and first state."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import syncalgos
from experiments import files
from experiments.command import terminal
from experiments.command.errors import (
    STOPS,
    BadRequest,
    explain,
    refusing,
    summarize_error,
)
from experiments.data import feeding, sampling
from experiments.tasks.task import (
    Data,
    Task,
    check_apply,
    check_indices,
    check_model,
    convolves,
)
from experiments.training import export, machine, run_folder
from experiments.training.config import RunConfig, Settings
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.optimizers import make_inner_optimizer
from experiments.training.plan import (
    Numbers,
    Programs,
    RunPlan,
    TrainingMethod,
    check_data,
    is_custom,
    make_algorithm,
    make_plan,
    make_trainer,
)
from experiments.training.process_group import ALONE, ProcessGroup
from experiments.training.progress import Progress
from experiments.training.rounds import Rounds, plan_rounds, record_displacements
from syncalgos import DataParallel, Replica, Strategy, TrainState, effective_rate
from syncalgos.collectives import PyTree

COMMON = (*export.ORIGIN, "batch_size", "optimizer", "lr", "accumulate", "partition")
COMMON += ("validation",)


class Run(NamedTuple):
    """A run that is ready to start.

    Attributes:
        plan: what follows from its config, without data.
        data: the data of the task.
        shards: the training examples of each worker; None if workers share all.
        group: the processes that train together.
        trainer: the engine, which records displacements if they are asked for.
        rounds: the bytes sent in each round, and the ends of the rounds.
        state: the first state, which cannot be used after training.
        facts: the content that config.json and summary.json share.
    """

    plan: RunPlan
    data: Data
    shards: list[np.ndarray] | None
    group: ProcessGroup
    trainer: DataParallel
    rounds: Rounds
    state: TrainState
    facts: dict[str, Any]

    @property
    def config(self) -> Settings:
        """The settings."""
        return self.plan.config

    @property
    def task(self) -> Task:
        """The model, its data and its figures."""
        return self.plan.task

    @property
    def origin(self) -> dict[str, Any]:
        """The content of an exported model's header, except for the step."""
        origin = {name: files.to_json_value(self.facts[name]) for name in export.ORIGIN}
        return {
            **origin,
            "syncalgos": syncalgos.__version__,
            **self.data.preparation,
        }


def prepare(
    config: RunConfig,
    group: ProcessGroup = ALONE,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
) -> Run:
    """Prepares a run: makes all checks, loads the data, and makes the model.

    Args:
        config: the config, as given by the user.
        group: the processes that train together, already joined.
        task: the task, in place of the config's.
        strategy: the strategy, in place of the config's algorithm.

    Raises:
        BadRequest: the run cannot be made; one line says why.
    """
    plan, data = prepare_plan(config, group=group, objects=Objects(strategy, task))
    return make_run(plan, data, group)


def prepare_plan(
    config: RunConfig,
    data: Data | None = None,
    group: ProcessGroup = ALONE,
    *,
    objects: Objects = NO_OBJECTS,
    programs: Programs | None = None,
) -> tuple[RunPlan, Data]:
    """Returns a run's plan and data; the arguments are those of `prepare`.

    Args:
        objects: what Python code passed in place of the config's names.
        data: the data of the task, if already loaded.
        programs: those of an earlier run, which this run shares if possible.

    Raises:
        BadRequest: the run cannot be made; one line says why.
    """
    own_cores = max(1, machine.cores() // group.sharing)
    machine.use_cpu_devices(config.mesh_devices(group.processes) or own_cores)
    machine.use_cache()
    if group.is_first:
        if config.out is not None:
            run_folder.check_writable(config.out)
        check_files(config)
    with refusing():
        plan = make_plan(config, group.hosts, objects=objects, programs=programs)
        # Data comes last: all other errors are reported within a second.
        if data is None:
            name = plan.config.task
            held_out = plan.config.validation
            data = feeding.load_data(plan.task.load, name, held_out)
        check_data(plan.config, data, config.batch_size is not None)
        _shards(plan, data)  # raises for a partition that the data does not support
    # Otherwise, a process would wait for ever for another, as in an evaluation.
    sizes = data.examples, *map(len, data.test.values())
    if not group.agree(f"{data.sha256} {sizes}"):
        raise BadRequest("processes read different data: give all the same files")
    return plan, data


def check_files(config: RunConfig) -> None:
    """Raises a BadRequest if a run would replace files that it must not."""
    out = config.out
    goes_on = config.resume or config.resume_center
    if out is not None:
        run_folder.check_out(out, config.overwrite or goes_on)
    export_path = config.export
    if export_path is not None:
        earlier_export = None
        if out is not None and goes_on:
            earlier_export = run_folder.find_export(out)
        is_own = earlier_export is not None and (
            earlier_export.absolute() == export_path.absolute()
        )
        export.check_path(export_path, config.overwrite or is_own)


def make_run(plan: RunPlan, data: Data, group: ProcessGroup = ALONE) -> Run:
    """Prepares a run from its plan and its data.

    Args:
        plan: the plan of the run.
        data: the data of its task.
        group: the processes that train together.

    Raises:
        BadRequest: the task or the strategy cannot be used.
    """
    params, buffers = _make_model(plan, data)
    if plan.programs.rate is None:  # else an earlier run has said it
        _warn_if_slow(plan, params, buffers, data)
    trainer = plan.trainer
    start = (params, buffers, plan.config.seed, plan.numbers)
    with convert_errors("algo", plan.config.algo):
        state = trainer.init(*start)
        rounds = plan_rounds(plan, state)
        if plan.config.displacements and rounds.ends is not None:
            # Measuring sends params, which must not be counted: see `planned`.
            try:
                trainer = _measuring(plan, rounds.ends)
            except ValueError as error:  # compare asks for them in all runs
                terminal.say(f"displacements are left out: {error}")
            else:
                del state  # two may not fit in memory
                state = trainer.init(*start)
    if not rounds.is_fixed:
        if rounds.communication(Progress()):
            terminal.say(
                "what workers send is not known in advance: bytes are counted during "
                "the run"
            )
        else:
            terminal.say(
                "what workers send is not known in advance: bytes are not counted"
            )
    return Run(
        plan=plan,
        data=data,
        shards=_shards(plan, data),
        group=group,
        trainer=trainer,
        rounds=rounds,
        state=state,
        facts=_facts(plan, data, _effective_lr(plan, params, group)),
    )


def _warn_if_slow(plan: RunPlan, params: PyTree, buffers: PyTree, data: Data) -> None:
    """Says so if the user's model has convolutions, slower in long dispatches."""
    c = plan.config
    task = plan.task
    is_on_cpu = plan.trainer.layout.devices[0].platform == "cpu"
    # The models of this project have no convolutions on CPUs.
    may_be_slow = is_on_cpu and c.dispatch_steps > 1 and is_custom(c.task)
    if may_be_slow and convolves(task, params, buffers, data.test):
        terminal.say(
            "convolutions are several times slower on CPUs in dispatches of "
            f"{c.dispatch_steps} steps: try --dispatch-steps 1"
        )


def _measuring(plan: RunPlan, ends: np.ndarray) -> DataParallel:
    """Returns the engine that records the displacements at the ends of rounds."""
    config = plan.config
    programs = plan.programs

    def noting(method: TrainingMethod) -> TrainingMethod:
        noted = record_displacements(method.strategy, ends, config.evaluations)
        return method._replace(strategy=noted)

    def make(settings: Settings) -> TrainingMethod:
        return noting(programs.make(settings))

    if programs.measuring is None or not np.array_equal(ends, programs.measuring[0]):
        trainer = make_trainer(
            config, plan.task, make, plan.numbers, noting(plan.method)
        )
        programs.measuring = ends, trainer
    return programs.measuring[1]


def _shards(plan: RunPlan, data: Data) -> list[np.ndarray] | None:
    """Returns the training examples of each worker; None if workers share all."""
    c = plan.config
    return sampling.shards(c.partition, data.groups, data.examples, c.workers, c.seed)


def _make_model(plan: RunPlan, data: Data) -> tuple[PyTree, PyTree]:
    """Returns the task's params and buffers, checked."""
    c = plan.config
    with convert_errors("task", c.task):
        params, buffers = check_model(plan.task, c.seed)
        if is_custom(c.task):  # it is tried out on shapes
            check_apply(plan.task, params, buffers, data.test)
            why_unchecked = check_indices(plan.task, params, buffers, data)
            if why_unchecked:
                terminal.say(
                    "labels and tokens are not compared with the model's sizes: "
                    f"{why_unchecked}"
                )
        if c.mesh is not None:
            plan.trainer.shardings(params)
        if c.export is not None:
            export.name_tensors(Replica(params, (), buffers))
    if c.init_from is not None:
        model = export.read_start(c.init_from, Replica(params, (), buffers))
        return model.params, model.buffers
    return params, buffers


@contextmanager
def convert_errors(flag: str, name: str) -> Iterator[None]:
    """Converts errors inside to BadRequests, except for bugs of our own.

    Args:
        flag: algo or task.
        name: the value of the flag.
    """
    try:
        yield
    except STOPS:
        raise
    # A user's task or strategy may raise anything.
    except BaseException as error:
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
        is_full = is_of_jax and str(error).startswith("RESOURCE_EXHAUSTED")
        if is_full or isinstance(error, MemoryError):
            raise BadRequest("the model does not fit in memory") from error
        if ":" in name:
            raise explain(f"--{flag} {name}", error) from error
        if isinstance(error, ValueError):
            raise BadRequest(str(error)) from error
        raise


def _effective_lr(plan: RunPlan, params: PyTree, group: ProcessGroup) -> float | None:
    """Returns the effective learning rate; NaN if this is not the first process."""
    if not group.is_first:
        return math.nan
    programs = plan.programs

    def make_optimizer(numbers: Numbers) -> Any:
        config = plan.config.at(numbers)
        if isinstance(plan.objects.strategy, Strategy):
            return plan.method.optimizer
        return make_inner_optimizer(config, plan.task.muon)[1]

    def make_strategy(numbers: Numbers) -> Strategy:
        config = plan.config.at(numbers)
        if isinstance(plan.objects.strategy, Strategy):
            return plan.method.algorithm
        optimizer = make_optimizer(numbers)
        return make_algorithm(
            config,
            config.lr,
            optimizer,
            group.hosts,
            plan.task,
            objects=plan.objects,
        )

    if programs.rate is None:  # later runs need no other program
        programs.rate = partial(
            effective_rate,
            make_strategy,
            make_optimizer,
            workers=plan.config.workers,
            params=params,
        )
    try:
        rate = programs.rate(
            learning_rate=plan.config.lr, hyperparams=plan.numbers
        ).rate
    except Exception as error:  # one figure must not end the run
        terminal.say(
            f"the effective learning rate is unknown: {summarize_error(error)}"
        )
        return math.nan
    return None if rate is None else float(f"{rate:.4g}")


def _facts(plan: RunPlan, data: Data, effective_lr: float | None) -> dict[str, Any]:
    """Returns the content that config.json and summary.json share."""
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
        "processor": machine.processor(),
        "examples": {
            "train": data.examples,
            "test": len(next(iter(data.test.values()))),
        },
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
