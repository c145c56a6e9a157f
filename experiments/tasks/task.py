"""What a task is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos.collectives import PyTree

Arrays = dict[str, np.ndarray]


class Data(NamedTuple):
    """A task's examples; leaves (examples, ...).

    Attributes:
        train: to train on.
        test: held out, the same leaves.
    """

    train: Arrays
    test: Arrays


class Task(NamedTuple):
    """A model, its data and what is measured.

    Attributes:
        init: key -> (params, buffers).
        apply: (params, buffers, batch, key, train) -> (values, buffers); values are
            per example, {"loss": (batch,), "accuracy": (batch,)}.
        load: reads the data, when all else of a request has been checked.
        batch_size: the default global batch.
        steps: the default number of local steps.
        lr: the default learning rates by optimizer; "" stands for all others.
        dispatch_steps: the default number of local steps in a dispatch.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[dict[str, jax.Array], PyTree]]
    load: Callable[[], Data]
    batch_size: int
    steps: int
    lr: dict[str, float]
    dispatch_steps: int


def losses(task: Task) -> tuple[Any, Any]:
    """The task's training loss and evaluation loss, in the engine's form."""

    def train_loss(params, buffers, batch, key):
        values, buffers = task.apply(params, buffers, batch, key, train=True)
        means = {name: jnp.mean(value) for name, value in values.items()}
        return means.pop("loss"), (buffers, means)

    def eval_loss(params, buffers, batch, key):
        weight = batch["weight"]
        values, buffers = task.apply(params, buffers, batch, key, train=False)
        means = {name: jnp.mean(weight * value) for name, value in values.items()}
        return means.pop("loss"), (buffers, means)

    return train_loss, eval_loss


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
    return {**data, "weight": weight}, rows.reshape(batches, size)
