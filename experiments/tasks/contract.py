"""Checks of a user's task; errors name the field that is wrong."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from experiments.data.feeding import Arrays, Data, gather
from experiments.tasks import Schedule
from experiments.tasks.task import Kept, Tables, Task
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
_OUT_OF_BOUNDS = re.compile(
    r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)"
)


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


def check_indices(task: Task, params: PyTree, buffers: PyTree, data: Data) -> None:
    """Raises a ValueError for a label beyond the logits, or a token beyond a table.

    Such an index reads NaN, so that the loss is NaN. Only the smallest and the largest
    whole numbers of the data are tried, and only their results are computed.
    """
    for part, rows in _extremes(data).items():
        batch = gather(getattr(data, part), rows)

        def on_one_worker(lane, params, batch=batch):
            key = jax.random.key(0)
            return task.apply(params, buffers, batch, key, train=False)[0]["loss"]

        mapped = over_workers(on_one_worker, (0, None))
        checked = checkify.checkify(mapped, errors=checkify.index_checks)
        try:
            # The values are dropped here, so that XLA leaves out the model.
            told = jax.jit(lambda x, checked=checked: checked(jnp.zeros((1, 1)), x)[0])(
                params
            ).get()
        except Exception:  # code that checkify does not support is not checked
            return
        found = _OUT_OF_BOUNDS.search(told or "")
        # A task may allow reads and writes beyond an end on purpose.
        if found and not np.isfinite(jax.jit(mapped)(jnp.zeros((1, 1)), params)).all():
            index, size = map(int, found.groups())
            raise ValueError(_misfit(part, batch, rows, index, size))


def _extremes(data: Data) -> dict[str, np.ndarray]:
    """Returns the rows of the smallest and the largest whole numbers, by part."""
    leaves = {"train": data.train, "test": data.test}
    if not isinstance(data.train, dict):  # it may be large: check only its groups
        leaves["train"] = dict(data.groups)
    found = {}
    for part, each in leaves.items():
        whole = [np.asarray(x) for x in each.values()]
        whole = [
            x.reshape(len(x), -1) for x in whole if x.size and x.dtype.kind in "iu"
        ]
        at = [find(x) // x.shape[1] for x in whole for find in (np.argmin, np.argmax)]
        found[part] = np.unique(np.array([0, *at]))
    return found


def _misfit(part: str, batch: Arrays, rows: np.ndarray, index: int, size: int) -> str:
    """Returns an error that names the example with a number out of range."""
    why = f"but the array that it indexes has size {size}: use 0 to {size - 1}"
    for name, x in batch.items():
        # jax adds the size to a negative index.
        at = np.argwhere((x == index) | ((x < 0) & (x + size == index)))
        if x.dtype.kind in "iu" and len(at):
            return f"{part}[{name!r}][{rows[at[0][0]]}] holds {x[tuple(at[0])]}, {why}"
    return f"{part} holds an index of {index}, {why}"


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
