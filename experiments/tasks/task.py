"""A task: a model, its data and its measures; checks of a user's own."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from experiments.data.feeding import WEIGHT, Arrays, Data, gather, must
from experiments.tasks import Schedule
from syncalgos import WORKERS, checks, parts_of, per_example
from syncalgos.collectives import PyTree
from syncalgos.reducers import Layered

OPTIONAL = ("muon", "shardings", "blank")
BOUNDS = {
    "momentum": {"least": 0, "below": 1},
    "weight_decay": {"least": 0},
    "clip_norm": {"above": 0},
}
_OUT_OF_BOUNDS = re.compile(
    r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)"
)

TablePlacement = Literal["replicated", "shared", "sharded"]
Shardings = Callable[[str, tuple[int, ...], Mapping[str, int]], PartitionSpec]


# Names of the engine's own metrics: see `DataParallel.run` and its `each_worker`.
DECISIONS = "decided"
WORKER_LOSSES = "worker_loss"


class Tables(NamedTuple):
    """Embedding tables, of which a step touches few rows.

    Attributes:
        names: a tree like params, or a prefix of it: the name of a table, or False for
            all other leaves. Tables with the same name are read at the same rows.
        rows: maps a number of examples to the most rows that they touch, by name.
        kept: replicated, like all other params; shared, one table that is updated with
            the mean gradient at every step, for any algorithm; or sharded, with some
            rows on each worker (`syncalgos.lookup`).
    """

    names: PyTree
    rows: Callable[[int], dict[str, int]]
    kept: TablePlacement = "replicated"


class Task(NamedTuple):
    """A model, its data, its measures and its default settings.

    Attributes:
        init: key -> (params, buffers).
        apply: (params, buffers, batch, key, train) -> (values, buffers); values are
            per example: {"loss": (batch,), "accuracy": (batch,)} and other measures.
            Without buffers, a value must not depend on other examples, because workers'
            batches may be merged.
        load: reads the data; called after all checks.
        batch_size: the default global batch.
        steps: the default number of local steps.
        lr: the default learning rates by optimizer; "" is any other optimizer.
        dispatch_steps: the default number of local steps in a dispatch.
        optimizer: the default inner optimizer.
        momentum: the default momentum, for the default optimizer.
        weight_decay: the default weight decay, for the default optimizer.
        clip_norm: the default global norm to which gradients are clipped.
        schedule: the default schedule of the learning rate.
        warmup: the default share of the steps over which the learning rate rises.
        eval_batch: approximate number of examples that all workers evaluate at once.
        figures: further measures of an evaluation by name, each a function of the loss,
            such as a perplexity.
        mean_figures: further measures by name, each a function of the means of all
            values of apply, by name; such as bits per byte.
        tables: the embedding tables, if any.
        muon: maps params to muon_weight_dimension_numbers of `optax.contrib.muon`; None
            means all leaves with two axes.
        sends: a description of the data that the loss itself sends at every step.
        layered: the number of leading axes that count layers, for each leaf (see
            `syncalgos.reducers.Layered`); passed to algorithms that take it.
        shardings: maps the path of a leaf, such as "blocks/up/w", its shape and the
            sizes of the axes within a worker (--mesh) to its PartitionSpec. An
            attribute `axes` may name all axes that it supports (`models.sharding`).
        blank: makes data with the shapes of `load` without reading any, for
            `experiments.aim`, which needs only shapes. None means that aim calls load.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[dict[str, jax.Array], PyTree]]
    # A function, so that errors are reported before gigabytes are read.
    load: Callable[[], Data]
    batch_size: int
    steps: int
    lr: dict[str, float]
    dispatch_steps: int
    optimizer: str = "sgd"
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    schedule: Schedule = "constant"
    warmup: float = 0.0
    eval_batch: int = 1024
    figures: Mapping[str, Callable[[float], float]] = {}
    mean_figures: Mapping[str, Callable[[Mapping[str, float]], float]] = {}
    tables: Tables | None = None
    muon: Callable[[PyTree], PyTree] | None = None
    sends: str = ""
    layered: Layered = 0
    shardings: Shardings | None = None
    blank: Callable[[], Data] | None = None

    @property
    def kept(self) -> str:
        """The way of keeping tables (see `Tables`); replicated if there are none."""
        return "replicated" if self.tables is None else self.tables.kept


def losses(task: Task) -> tuple[Any, Any]:
    """Makes the training loss and the evaluation loss, in the form for the engine."""

    def eval_loss(params, buffers, batch, key):
        weight = batch[WEIGHT]
        values, buffers = task.apply(params, buffers, batch, key, train=False)
        means = {name: jnp.mean(weight * value) for name, value in values.items()}
        return means.pop("loss"), (buffers, means)

    return per_example(partial(task.apply, train=True)), eval_loss


def held_out(
    test: Arrays, workers: int, batch: int = 1024, least: int = 0
) -> tuple[Arrays, np.ndarray]:
    """Cuts held-out data into batches that divide among the workers.

    Args:
        test: leaves (examples, ...).
        workers: the number of workers, or of the devices that share theirs.
        batch: approximate number of examples in a batch.
        least: the number of examples up to which the data are filled, if they have
            fewer.

    Returns:
        The data with added examples of weight 0, which also fill the last batch; and
        the rows of each batch, (batches, examples). The mean of weighted values over
        all rows is the mean over the held-out examples.
    """
    # Each example counts once for any number of workers, so that runs compare.
    examples = len(next(iter(test.values())))
    filled = max(examples, least)
    batches = -(-filled // batch)
    size = -(-filled // (batches * workers)) * workers
    rows = np.full(batches * size, examples)
    rows[:examples] = np.arange(examples)
    added = np.zeros(filled + 1 - examples, int)
    data = {name: np.concatenate([x, x[added]]) for name, x in test.items()}
    # Above 1, because the mean over a batch also divides by the added examples.
    weight = np.full(filled + 1, rows.size / examples, np.float32)
    weight[examples:] = 0
    return {**data, WEIGHT: weight}, rows.reshape(batches, size)


def check_task(task: Any) -> None:
    """Raises a ValueError unless this is a Task with usable fields."""
    rule = "the factory must return an experiments.tasks.task.Task"
    must(isinstance(task, Task), rule, task)
    for name in ("init", "apply", "load", *OPTIONAL):
        field_value = getattr(task, name)
        is_left_out = name in OPTIONAL and field_value is None
        must(
            callable(field_value) or is_left_out,
            f"{name} must be a function",
            field_value,
        )
    for name in ("batch_size", "steps", "dispatch_steps", "eval_batch"):
        checks.whole(name, getattr(task, name), least=1)
    for name, bounds in BOUNDS.items():
        value = getattr(task, name)
        if value is not None:
            checks.real(name, value, **bounds)
    checks.one_of("schedule", task.schedule, get_args(Schedule))
    if checks.real("warmup", task.warmup, least=0) > 1:
        raise ValueError(f"warmup must be at most 1, got {task.warmup!r}")
    must(isinstance(task.tables, Tables | None), "tables must be Tables", task.tables)
    checks.one_of("way of keeping tables", task.kept, get_args(TablePlacement))
    if not checks.is_function(task.layered):
        for layer_axes in jax.tree.leaves(task.layered):
            checks.whole("layered", layer_axes, least=0)
    rule = "lr must map optimizers to learning rates, such as {'sgd': 0.1, '': 0.01}"
    must(isinstance(task.lr, Mapping), rule, task.lr)
    for optimizer, rate in task.lr.items():
        checks.real(f"lr[{optimizer!r}]", rate, above=0)
    for name, figure in dict(task.figures).items():
        if not callable(figure):
            raise ValueError(f"figures[{name!r}] must be a function of the loss")
        figure_value = 1.0
        # A figure may be undefined for this loss.
        with suppress(ArithmeticError, ValueError):
            figure_value = figure(1.0)
        number(name, figure_value)


def number(name: str, value: Any) -> float:
    """Returns the value of a figure; raises a ValueError if it is not a number."""
    if isinstance(value, str | bytes) or value is None or np.ndim(value):
        shown_value = checks.shown(value)
        raise ValueError(f"figures[{name!r}] must return a number, got {shown_value}")
    return float(value)


def check_model(task: Task, seed: int) -> tuple[PyTree, PyTree]:
    """Returns params and buffers of the task's init, or raises a ValueError."""
    model = task.init(jax.random.key(seed))
    if not isinstance(model, tuple | list) or len(model) != 2:
        raise ValueError(
            f"init must return (params, buffers), got {checks.shown(model)}"
        )
    params, buffers = model
    parts_of(params, task.layered)  # refuses leaves with fewer axes
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
    mesh_axes = getattr(task.shardings, "axes", tuple(mesh))
    for axis in mesh:
        if axis not in mesh_axes:
            raise ValueError(
                f"--mesh: task {name} has rules for {' and '.join(mesh_axes)}, not for "
                f"{axis}{checks.nearest(axis, mesh_axes)}"
            )


def over_workers(program: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Maps a worker's program over the engine's axes, (devices, lanes)."""
    for axis in reversed(WORKERS):
        program = jax.vmap(program, in_axes=in_axes, axis_name=axis)
    return program


def make_value_function(task: Task, train: bool) -> Callable[..., dict[str, jax.Array]]:
    """Returns a function of (params, buffers, batch): the values of apply.

    They have the engine's axes: a loss may use them, as for global batch statistics.
    """

    def on_one_worker(lane, params, buffers, batch):
        outputs = task.apply(params, buffers, batch, jax.random.key(0), train=train)
        is_pair = isinstance(outputs, tuple | list) and len(outputs) == 2
        if is_pair and isinstance(outputs[0], Mapping):
            return dict(outputs[0])
        raise ValueError(
            "apply must return (values, buffers), with values such as {'loss': "
            f"(batch,)}}, got {checks.shown(outputs)}"
        )

    mapped = over_workers(on_one_worker, (0, None, None, None))
    return partial(mapped, jnp.zeros((1, 1)))


def _shape_two_examples(test: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of two examples.

    With one, a mean that keeps its axis would look like a value.
    """
    return {
        name: jax.ShapeDtypeStruct((2, *x.shape[1:]), jax.typeof(x).dtype)
        for name, x in test.items()
    }


def check_apply(task: Task, params: PyTree, buffers: PyTree, test: Arrays) -> set[str]:
    """Traces apply on shapes; computes nothing.

    Returns:
        The names of its measures.

    Raises:
        ValueError: it returns no loss per example.
    """
    arguments = params, buffers, _shape_two_examples(test)
    training = jax.eval_shape(make_value_function(task, True), *arguments)
    evaluation = jax.eval_shape(make_value_function(task, False), *arguments)
    for values in (training, evaluation):
        shapes = {name: x.shape[2:] for name, x in values.items()}
        if "loss" not in shapes or any(shape != (2,) for shape in shapes.values()):
            raise ValueError(
                "apply must give values per example, {'loss': (batch,), …}; for a "
                f"batch of 2 it gave {shapes}"
            )
    ours = training.keys() & {DECISIONS, WORKER_LOSSES}
    if ours:
        raise ValueError(f"apply gives {min(ours)!r}, a reserved name: use another")
    twice = evaluation.keys() & {*task.figures, *task.mean_figures}
    if twice:
        raise ValueError(
            f"{min(twice)!r} is both a value of apply and a figure: rename one"
        )
    return set(evaluation)


def convolves(task: Task, params: PyTree, buffers: PyTree, test: Arrays) -> bool:
    """Whether the model has a convolution of XLA, found by tracing on shapes."""
    traced = jax.make_jaxpr(make_value_function(task, train=True))(
        params, buffers, _shape_two_examples(test)
    )
    return "conv_general_dilated" in str(traced)


def check_indices(task: Task, params: PyTree, buffers: PyTree, data: Data) -> str:
    """Raises a ValueError for a label beyond the logits, or a token beyond a table.

    Such an index reads NaN, so that the loss is NaN. Only the smallest and the largest
    whole numbers of the data are tried, and only their results are computed.

    Returns:
        Why the model cannot be checked, as jax's checkify does not support some code;
        "" if it was.
    """
    values = make_value_function(task, train=False)

    def loss(*arguments):
        return values(*arguments)["loss"]

    checked = checkify.checkify(loss, errors=checkify.index_checks)
    # The losses are dropped here, so that XLA leaves out the model.
    errors = jax.jit(lambda *arguments: checked(*arguments)[0])
    # A source may be large: only its groups are looked at.
    of_train = data.train if isinstance(data.train, dict) else data.groups
    for part, arrays in {"train": of_train, "test": data.test}.items():
        rows = _extremes(arrays)
        batch = gather(getattr(data, part), rows)
        try:
            program = errors.lower(params, buffers, batch).compile()
        except Exception as error:  # checkify raises errors of many kinds
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        message = program(params, buffers, batch).get()
        out_of_bounds = _OUT_OF_BOUNDS.search(message or "")
        # A task may allow reads and writes beyond an end on purpose.
        if (
            out_of_bounds
            and not np.isfinite(jax.jit(loss)(params, buffers, batch)).all()
        ):
            index, size = map(int, out_of_bounds.groups())
            raise ValueError(_misfit(part, batch, rows, index, size))
    return ""


def _extremes(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the rows of the smallest and the largest whole numbers, and the first."""
    rows = {0}
    for x in map(np.asarray, arrays.values()):
        if x.size and x.dtype.kind in "iu":
            row_size = x.size // len(x)
            rows |= {int(x.argmin()) // row_size, int(x.argmax()) // row_size}
    return np.array(sorted(rows))


def _misfit(part: str, batch: Arrays, rows: np.ndarray, index: int, size: int) -> str:
    """Returns an error that names the example with a number out of range."""
    for name, x in batch.items():
        # jax adds the size to a negative index.
        places = np.argwhere((x == index) | ((x < 0) & (x + size == index)))
        if x.dtype.kind in "iu" and len(places):
            place = places[0]
            return (
                f"{part}[{name!r}][{rows[place[0]]}] holds {x[tuple(place)]}, but the "
                f"array that it indexes has size {size}: use 0 to {size - 1}"
            )
    return (
        f"{part} holds an index of {index}, but the array that it indexes has size "
        f"{size}: use 0 to {size - 1}"
    )
