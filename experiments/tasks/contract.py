"""Checks of a user's task; errors name the field that is wrong."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.tasks import Schedule
from experiments.tasks.task import WEIGHT, Arrays, Data, Kept, Tables, Task
from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.combinators.decided import METRIC
from syncalgos.engine.losses import OF_WORKERS
from syncalgos.engine.placement import shardings
from syncalgos.engine.placement.layout import DEVICES, LANES, Layout
from syncalgos.reducers import stacking

OPTIONAL = ("muon", "shardings", "blank")
BOUNDS = {
    "momentum": {"least": 0, "below": 1},
    "weight_decay": {"least": 0},
    "clip_norm": {"above": 0},
}


def check_task(task: Any) -> None:
    """Raises a ValueError unless this is a Task with usable fields."""
    if not isinstance(task, Task):
        raise ValueError(
            "the factory must return an experiments.tasks.task.Task, got "
            f"{checks.shown(task)}"
        )
    for name in ("init", "apply", "load", *OPTIONAL):
        found = getattr(task, name)
        if not callable(found) and not (name in OPTIONAL and found is None):
            raise ValueError(f"{name} must be a function, got {checks.shown(found)}")
    for name in ("batch_size", "steps", "dispatch_steps", "eval_batch"):
        checks.whole(name, getattr(task, name), least=1)
    for name, bounds in BOUNDS.items():
        if (value := getattr(task, name)) is not None:
            checks.real(name, value, **bounds)
    checks.one_of("schedule", task.schedule, get_args(Schedule))
    if checks.real("warmup", task.warmup, least=0) > 1:
        raise ValueError(f"warmup must be at most 1, got {task.warmup!r}")
    if task.tables is not None and not isinstance(task.tables, Tables):
        raise ValueError(f"tables must be Tables, got {checks.shown(task.tables)}")
    checks.one_of("way of keeping tables", task.kept, get_args(Kept))
    stacking.check("stacked", task.stacked)
    _check_rates(task.lr)
    for name, figure in dict(task.figures).items():
        if not callable(figure):
            raise ValueError(f"figures[{name!r}] must be a function of the loss")
        found = 1.0
        # A figure may be undefined for this loss.
        with suppress(ArithmeticError, ValueError):
            found = figure(1.0)
        number(name, found)


def number(name: str, found: Any) -> float:
    """Returns the value of a figure; raises a ValueError if it is not a number."""
    if isinstance(found, str | bytes) or found is None or np.ndim(found):
        got = checks.shown(found)
        raise ValueError(f"figures[{name!r}] must return a number, got {got}")
    return float(found)


def _check_rates(lr: Any) -> None:
    """Raises a ValueError unless this maps optimizers to learning rates."""
    if not isinstance(lr, Mapping):
        raise ValueError(
            "lr must map optimizers to learning rates, such as {'sgd': 0.1, '': 0.01}, "
            f"got {checks.shown(lr)}"
        )
    for optimizer, rate in lr.items():
        checks.real(f"lr[{optimizer!r}]", rate, above=0)


def check_data(data: Any) -> None:
    """Raises a ValueError unless this is a Data with consistent parts."""
    if not isinstance(data, Data):
        raise ValueError(f"load must return a Data, got {checks.shown(data)}")
    check_arrays("test", data.test)
    if isinstance(data.train, dict):
        check_arrays("train", data.train)
        first = data.train
    elif not (hasattr(data.train, "__len__") and hasattr(data.train, "__getitem__")):
        raise ValueError(
            "train must be a dict of arrays, or a source with a length whose items are "
            f"examples, got {checks.shown(data.train)}"
        )
    else:
        first = data.train[0]
        if not isinstance(first, Mapping):
            raise ValueError(
                "train[0] must be an example, a dict of arrays, got "
                f"{checks.shown(first)}"
            )
    if set(first) != set(data.test):
        raise ValueError(f"train has arrays {[*first]}, but test has {[*data.test]}")
    if WEIGHT in data.test:
        raise ValueError(f"{WEIGHT!r} is a name that evaluation adds: use another name")
    for name, group in data.groups.items():
        found = np.asarray(group)
        if found.dtype.kind not in "iu" or found.shape != (data.examples,):
            raise ValueError(
                f"groups must hold whole numbers ({data.examples},), one for each "
                f"training example, got {name!r} of {found.dtype} {found.shape}"
            )
    checks.whole("overlapping", data.overlapping, least=0)
    checks.whole("covering", data.covering, least=1)


def check_arrays(name: str, part: Any) -> None:
    """Raises a ValueError unless this is a dict of arrays of one length."""
    if not isinstance(part, dict):
        raise ValueError(f"{name} must be a dict of arrays, got {checks.shown(part)}")
    for leaf, x in part.items():
        if not isinstance(x, np.ndarray | jax.Array) or not x.ndim:
            raise ValueError(
                f"{name}[{leaf!r}] must be an array, with examples as first axis, got "
                f"{checks.shown(x)}"
            )
    lengths = {leaf: len(x) for leaf, x in part.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise ValueError(f"{name} must have arrays of one length, above 0: {lengths}")


def check_model(task: Task, seed: int) -> tuple[PyTree, PyTree]:
    """Returns params and buffers of the task's init, or raises a ValueError."""
    made = task.init(jax.random.key(seed))
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ValueError(
            f"init must return (params, buffers), got {checks.shown(made)}"
        )
    params, buffers = made
    stacking.counts(task.stacked, params)
    return params, buffers


def check_axes(name: str, task: Task, mesh: Mapping[str, int]) -> None:
    """Raises a ValueError unless a task has shardings over the axes of a mesh.

    Args:
        name: the name of the task.
        task: the task; an attribute `axes` of its shardings may list supported axes.
        mesh: sizes of the axes within a worker.
    """
    if task.shardings is None:
        raise ValueError(
            f"--mesh: task {name} has no rules to shard this model. These tasks have: "
            "digits, table, spoken_digits, shakespeare, text, gpt2_synthetic, those "
            "with --model mlp, and your own with Task(shardings=…)"
        )
    known = getattr(task.shardings, "axes", tuple(mesh))
    for axis in mesh:
        if axis not in known:
            raise ValueError(
                f"--mesh: task {name} has rules for {' and '.join(known)}, not for "
                f"{axis}{checks.nearest(axis, known)}"
            )


def check_shardings(task: Task, params: PyTree, layout: Layout) -> None:
    """Raises a ValueError unless the task's shardings fit each leaf.

    Args:
        task: a task with shardings.
        params: one plain model.
        layout: a layout with a mesh within each worker.
    """
    rule = task.shardings
    assert rule is not None  # check_axes has checked this

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return rule(path, shape, layout.inner)

    shardings.resolved(spec, params, layout)


def check_apply(task: Task, params: PyTree, buffers: PyTree, test: Arrays) -> set[str]:
    """Traces apply on shapes; computes nothing.

    Returns:
        The names of its measures.

    Raises:
        ValueError: it returns no loss per example.
    """
    # Two examples: with one, a mean that keeps its axis would look like a value.
    batch = {
        name: jax.ShapeDtypeStruct((2, *x.shape[1:]), jax.typeof(x).dtype)
        for name, x in test.items()
    }

    def on_one_worker(lane):
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        key = jax.random.key(0)
        return [
            _values(task.apply(params, buffers, empty, key, train=train))
            for train in (True, False)
        ]

    # With both axes: a loss may use them, such as for global batch statistics.
    found = jax.eval_shape(over_workers(on_one_worker), jnp.zeros((1, 1)))
    for values in found:
        shapes = {name: x.shape[2:] for name, x in values.items()}
        if "loss" not in shapes or any(shape != (2,) for shape in shapes.values()):
            raise ValueError(
                "apply must give values per example, {'loss': (batch,), …}; for a "
                f"batch of 2 it gave shapes {shapes}"
            )
    # Training uses these names for decisions and for workers' losses.
    if ours := found[0].keys() & {METRIC, OF_WORKERS}:
        raise ValueError(f"apply gives {min(ours)!r}, a reserved name: use another")
    if twice := found[1].keys() & {*task.figures, *task.mean_figures}:
        raise ValueError(
            f"{min(twice)!r} is both a value of apply and a figure: rename one"
        )
    return set(found[1])


def convolves(task: Task, params: PyTree, buffers: PyTree, test: Arrays) -> bool:
    """Whether the model has a convolution of XLA, found by tracing on shapes."""

    def on_one_worker(lane):
        batch = {
            name: jnp.zeros((2, *x.shape[1:]), jax.typeof(x).dtype)
            for name, x in test.items()
        }
        return task.apply(params, buffers, batch, jax.random.key(0), train=True)

    traced = jax.make_jaxpr(over_workers(on_one_worker))(jnp.zeros((1, 1)))
    return "conv_general_dilated" in str(traced)


def _values(made: Any) -> dict[str, Any]:
    """Returns the values of a pair (values, buffers), or raises a ValueError."""
    is_pair = isinstance(made, tuple | list) and len(made) == 2
    if is_pair and isinstance(made[0], Mapping):
        return dict(made[0])
    raise ValueError(
        "apply must return (values, buffers), with values such as {'loss': (batch,)}, "
        f"got {checks.shown(made)}"
    )


def over_workers(program: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Maps a worker's program over the engine's axes, (devices, lanes)."""
    for axis in (LANES, DEVICES):
        program = jax.vmap(program, in_axes=in_axes, axis_name=axis)
    return program
