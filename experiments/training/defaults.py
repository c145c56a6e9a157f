"""Defaults of a config that depend on its task, its algorithm or other fields."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from experiments.command import factories
from experiments.command.factories import ALGORITHM, TASK, FactoryKind
from experiments.command.flags import describe_factories
from experiments.tasks.task import Task
from experiments.training.config import RunConfig, Settings, never_reached
from experiments.training.objects import NO_OBJECTS, Objects
from syncalgos import Strategy

# Axes with these names cut the model's arithmetic, not the batch.
TENSOR_AXES = ("tensor", "model", "tp")


def resolve_settings(config: RunConfig, task: Task, algorithm: Strategy) -> Settings:
    """Returns the settings of a config, with every default filled in.

    Args:
        config: the config, as given by the user.
        task: the task to train.
        algorithm: the strategy, which declares how its steps move; see `Strategy`.

    Raises:
        ValueError: settings that the task or the algorithm does not support together.
    """
    # The task's momentum and decay were tuned with its own optimizer.
    optimizer_settings = _optimizer_settings(config, task, algorithm)
    if optimizer_settings["clip_norm"] is not None and task.kept == "sharded":
        raise ValueError(
            "--clip-norm cannot be used with --tables sharded, as each worker has the "
            "norm of its own rows only: use --tables replicated"
        )
    # If an algorithm moves entries like Adam, the default is the task's rate for Adam
    # (digits: 0.001), not that for SGD (0.05), and the momentum for SGD is not used.
    kind = config.algo if algorithm.unit_steps else str(optimizer_settings["optimizer"])
    lr = config.lr or task.lr.get(kind) or task.lr.get("")
    if lr is None:
        raise ValueError(f"{config.task} has no default --lr for {kind}: set --lr")
    steps = config.steps or task.steps
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(task.warmup * steps)
    folder = os.environ.get("SYNCALGOS_DATA")
    unit = batch_unit(config)
    filled = {
        **optimizer_settings,
        "lr": lr,
        "steps": steps,
        "schedule": config.schedule or task.schedule,
        "warmup_steps": warmup_steps,
        "batch_size": config.batch_size or nearest_multiple(task.batch_size, unit),
        "eval_every": min(config.eval_every or -(-steps // 10), steps),
        "dispatch_steps": config.dispatch_steps or task.dispatch_steps,
        "data_dir": config.data_dir or (Path(folder) if folder else None),
        "resume": config.resume or config.resume_center,
    }
    # This also checks the fields together.
    settings = Settings(**{**vars(config), **filled})
    _check_dense_steps(settings)
    # The plateau is in the inner optimizer's state, which an algorithm cannot see.
    if settings.schedule == "plateau" and takes(settings, "learning_rate"):
        raise ValueError(
            f"--schedule plateau: {settings.algo} needs each step's learning rate in "
            "advance, but here it depends on the loss: use constant, cosine or step"
        )
    return settings


def takes(
    config: RunConfig,
    argument: str,
    kinds: Collection[FactoryKind] = (ALGORITHM, TASK),
    objects: Objects = NO_OBJECTS,
) -> bool:
    """Whether the algorithm or the task has a parameter that the run passes.

    Args:
        config: the config that names the algorithm and the task.
        argument: the parameter.
        kinds: the kinds of factories to look at.
        objects: what Python code passed in place of names.
    """
    for kind in kinds:
        name = config.algo if kind is ALGORITHM else config.task
        factory = objects.find_factory(kind, name)
        if factories.select_offered(kind, factory, {argument: 0}):
            return True
    return False


def _optimizer_settings(
    config: RunConfig, task: Task, algorithm: Strategy
) -> dict[str, Any]:
    """Returns the inner optimizer and its settings, by field."""
    names = ("optimizer", "momentum", "weight_decay", "clip_norm")
    settings = {name: getattr(config, name) for name in names}
    if config.optimizer not in (None, task.optimizer):
        return settings  # the task's momentum and decay may not fit another optimizer
    if algorithm.unit_steps or algorithm.own_momentum:
        task = task._replace(momentum=None)
    if algorithm.own_steps:  # plain SGD alone may be inside
        task = task._replace(optimizer="sgd", weight_decay=None, clip_norm=None)
    for name in names:
        if settings[name] is None:
            settings[name] = getattr(task, name)
    return settings


def _check_dense_steps(config: Settings) -> None:
    """Raises a ValueError if the user sets --dense-steps beyond the run's end.

    The default may be beyond the end of a short run; the header then says so.
    """
    steps = config.arguments.get("dense_steps")
    late = never_reached("--dense-steps", steps, config.steps)
    if late:
        usual, _ = describe_factories(config.algo, config.task, config.preset)
        if steps != usual.defaults.get("dense_steps"):
            raise ValueError(late)


def batch_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh over which a worker's part of a batch is cut."""
    return tuple(name for name in mesh if name not in TENSOR_AXES)


def batch_unit(config: RunConfig) -> int:
    """Returns the number that must divide the global batch."""
    mesh = config.mesh or {}
    parts = math.prod(mesh[name] for name in batch_axes(mesh))
    return config.workers * config.accumulate * parts


def nearest_multiple(n: int, unit: int) -> int:
    """Returns the positive multiple of a unit nearest to n; of two, the lower."""
    lower = n - n % unit
    upper = lower + unit
    return lower if lower and n - lower <= upper - n else upper
