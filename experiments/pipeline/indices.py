"""Checks that indices in the data, such as labels, fit the model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from experiments.pipeline.prefetch import gather
from experiments.tasks.contract import over_workers
from experiments.tasks.task import Arrays, Data, Task
from syncalgos.collectives import PyTree

_OUT_OF_BOUNDS = re.compile(
    r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)"
)


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
