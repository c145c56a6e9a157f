"""A task: a model, its data and its measures."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.data.feeding import WEIGHT, Arrays, Data
from experiments.tasks import Schedule
from syncalgos import per_example
from syncalgos.collectives import PyTree
from syncalgos.reducers.stacking import Stacked

Kept = Literal["replicated", "shared", "sharded"]
Shardings = Callable[[str, tuple[int, ...], Mapping[str, int]], PartitionSpec]


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
    kept: Kept = "replicated"


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
        stacked: the number of leading axes that count layers, for each leaf (see
            `syncalgos.reducers.stacking`); passed to algorithms that take it.
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
    stacked: Stacked = 0
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

    return per_example(functools.partial(task.apply, train=True)), eval_loss


def held_out(
    test: Arrays, workers: int, batch: int = 1024
) -> tuple[Arrays, np.ndarray]:
    """Cuts held-out data into batches that divide among the workers.

    Args:
        test: leaves (examples, ...).
        workers: the number of workers, or of the devices that share theirs.
        batch: approximate number of examples in a batch.

    Returns:
        The data with an added example of weight 0, which fills the last batch; and the
        rows of each batch, (batches, examples). The mean of weighted values over all
        rows is the mean over the held-out examples.
    """
    # Each example counts once for any number of workers, so that runs compare.
    examples = len(next(iter(test.values())))
    batches = -(-examples // batch)
    size = -(-examples // (batches * workers)) * workers
    rows = np.full(batches * size, examples)
    rows[:examples] = np.arange(examples)
    data = {k: np.concatenate([x, x[:1]]) for k, x in test.items()}
    # Above 1, because the mean over a batch also divides by the added examples.
    weight = np.full(examples + 1, rows.size / examples, np.float32)
    weight[-1] = 0
    return {**data, WEIGHT: weight}, rows.reshape(batches, size)
