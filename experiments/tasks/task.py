"""What a task is."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, per_example
from syncalgos.collectives import PyTree
from syncalgos.reducers.stacking import Stacked

Arrays = dict[str, np.ndarray]
Kept = Literal["replicated", "shared", "sharded"]
Schedule = Literal["constant", "cosine", "step", "plateau"]
WEIGHT = "weight"  # of an example that is evaluated


class Source(Protocol):
    """Examples that are made or read one by one, as grain's data sources are."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int, /) -> Mapping[str, np.ndarray]:
        """One example, without a leading axis."""
        ...


class Data(NamedTuple):
    """A task's examples.

    Attributes:
        train: to train on; leaves (examples, ...), or a source of them.
        test: held out; leaves (examples, ...), with the same names.
        groups: by name, the number of each training example's group, (examples,):
            "label", a class, or who made it, such as "speaker". Workers can be given
            groups of their own (`experiments.pipeline.partition`).
        overlapping: with how many of the training examples right after it one shares
            content, as windows of a text do; 0 if they can be held out one by one.
        covering: of overlapping examples, every how manyth are enough to show all
            that they do, so that what is held out is not shown several times.
    """

    train: Arrays | Source
    test: Arrays
    groups: Mapping[str, np.ndarray] = {}
    overlapping: int = 0
    covering: int = 1

    @property
    def examples(self) -> int:
        """How many there are to train on."""
        if isinstance(self.train, dict):
            return len(next(iter(self.train.values())))
        return len(self.train)


class Tables(NamedTuple):
    """Tables of which a step touches few rows: embeddings.

    Attributes:
        names: a tree like params, or for whole subtrees: what a table is called, False
            for all that is none. Tables of one name are read at the same rows.
        rows: examples of a batch -> the most rows that they touch, by name.
        kept: replicated: like all other params. shared: one table, updated with the
            mean gradient at every step, whatever the algorithm does with the rest.
            sharded: in parts, each worker holding its rows (`syncalgos.lookup`).
    """

    names: PyTree
    rows: Callable[[int], dict[str, int]]
    kept: Kept = "replicated"


class Task(NamedTuple):
    """A model, its data and what is measured.

    Attributes:
        init: key -> (params, buffers).
        apply: (params, buffers, batch, key, train) -> (values, buffers); values are
            per example: {"loss": (batch,), "accuracy": (batch,)}, and what else its
            users look at. Without buffers they must not depend on other examples:
            workers' batches may be joined.
        load: reads the data, when all else of a request has been checked.
        batch_size: the default global batch.
        steps: the default number of local steps.
        lr: the default learning rates by optimizer; "" stands for all others.
        dispatch_steps: the default number of local steps in a dispatch.
        optimizer: the default inner optimizer.
        momentum: its default, where the optimizer is the task's.
        weight_decay: as momentum.
        clip_norm: the default global norm to which gradients are clipped.
        schedule: the default schedule of the learning rate.
        warmup: the share of the steps over which the learning rate rises, by default.
        eval_batch: about how many examples are evaluated at once, by all workers.
        figures: more to report of a held-out evaluation: name -> a function of the
            loss, such as a perplexity.
        tables: embeddings, where it has some.
        muon: params -> which Muon takes, as `optax.contrib.muon` has it in
            muon_weight_dimension_numbers; None: all leaves of two axes.
        sends: what the loss itself sends at every step, in words, if anything.
        stacked: which leaves of params hold several layers, how many leading axes count
            them (see `syncalgos.reducers.stacking`); algorithms that ask for it get it.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[dict[str, jax.Array], PyTree]]
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
    tables: Tables | None = None
    muon: Callable[[PyTree], PyTree] | None = None
    sends: str = ""
    stacked: Stacked = 0

    @property
    def kept(self) -> str:
        """How tables are kept (see `Tables`); what has none is replicated."""
        return "replicated" if self.tables is None else self.tables.kept


def losses(task: Task) -> tuple[Any, Any]:
    """The task's training loss and evaluation loss, in the engine's form."""

    def eval_loss(params, buffers, batch, key):
        weight = batch[WEIGHT]
        values, buffers = task.apply(params, buffers, batch, key, train=False)
        means = {name: jnp.mean(weight * value) for name, value in values.items()}
        return means.pop("loss"), (buffers, means)

    return per_example(functools.partial(task.apply, train=True)), eval_loss


def held_out(
    test: Arrays, workers: int, batch: int = 1024
) -> tuple[Arrays, np.ndarray]:
    """Held-out data cut into batches that the workers divide, every example once.

    Args:
        test: leaves (examples, ...).
        workers: their number.
        batch: about how many examples a batch holds.

    Returns:
        The data with one more example, of weight 0, that fills the last batch, and
        rows of it, (batches, examples). The mean of weighted values over all rows is
        the mean over the held-out examples.
    """
    examples = len(next(iter(test.values())))
    batches = -(-examples // batch)
    size = -(-examples // (batches * workers)) * workers
    rows = np.full(batches * size, examples)
    rows[:examples] = np.arange(examples)
    data = {k: np.concatenate([x, x[:1]]) for k, x in test.items()}
    weight = np.full(examples + 1, rows.size / examples, np.float32)
    weight[-1] = 0
    return {**data, WEIGHT: weight}, rows.reshape(batches, size)


def fitting(task: str, model: str, models: Sequence[str]) -> None:
    """Raises a ValueError unless the model is one of those that fit the task."""
    if model not in models:
        hint = checks.nearest(model, models)
        raise ValueError(
            f"model {model!r} does not fit {task}{hint}: use {' or '.join(models)}"
        )
