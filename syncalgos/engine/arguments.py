"""Checks of the engine's arguments; an error names the argument that does not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.engine.placement.layout import Layout


@contextmanager
def explained_axis() -> Iterator[None]:
    """Turns jax's error of an unknown axis into one that names the right one."""
    try:
        yield
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise ValueError(
            f"{error}; inside DataParallel a strategy's axis is syncalgos.WORKERS"
        ) from None


def leading_shape(what: str, tree: PyTree, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the leading axes of all leaves; raises a ValueError if they disagree."""
    named = [
        (what + jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not named:
        raise ValueError(f"{what} hold no arrays")
    first, shape = named[0][0], named[0][1][: len(axes)]
    for name, other in named:
        if len(other) < len(axes):
            raise ValueError(f"{name} must lead with ({', '.join(axes)}), got {other}")
        if other[: len(axes)] != shape:
            raise ValueError(
                f"{name} leads with {other[: len(axes)]}, but {first} with {shape}: "
                f"they must agree on ({', '.join(axes)})"
            )
    return shape


def check_kind(what: str, value: Any, kind: type) -> None:
    """Raises a ValueError unless the value is of the kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} must be a {kind.__name__}, got {checks.shown(value)}")


_SEARCH = "a line search asks for the loss at other params, which a local step lacks"
# Optimizers that cannot be an inner one, by the class of a state in theirs, and why.
_REFUSED = {
    "LookaheadState": "optax.lookahead trains a pair of models: take its fast one, and "
    "syncalgos.lookahead() as the strategy",
    "ScheduleFreeState": "schedule_free evaluates another model than it trains; a "
    "center is of the trained one: take its base optimizer, or see docs/own-loop.md",
    "ScaleByZoomLinesearchState": _SEARCH,
    "ScaleByBacktrackingLinesearchState": _SEARCH,
}


def check_opt_state(opt_state: PyTree) -> None:
    """Raises a ValueError for the state of an optimizer that the engine cannot run."""

    def is_refused(node: Any) -> bool:
        return type(node).__name__ in _REFUSED

    for node in filter(is_refused, jax.tree.leaves(opt_state, is_leaf=is_refused)):
        raise ValueError(f"optimizer: {_REFUSED[type(node).__name__]}")


def check_plateau(opt_state: PyTree) -> None:
    """Raises a ValueError for a rate that each worker would lower by its own loss."""

    def is_plateau(node: Any) -> bool:
        return type(node).__name__ == "ReduceLROnPlateauState"

    # Such rates drift apart, and none rises again: a worker whose loss rises because
    # the others differ from it would soon no longer train.
    if any(map(is_plateau, jax.tree.leaves(opt_state, is_leaf=is_plateau))):
        raise ValueError(
            "optimizer: reduce_on_plateau follows the loss, which is each worker's own "
            "where the strategy does not reduce gradients, so that workers would train "
            "at different rates: take a schedule of the step, or a strategy such as "
            "sync_sgd"
        )


def check_loss(loss: Any) -> None:
    """Raises a ValueError unless it can be called in the engine's form."""
    if checks.misfit(loss, ["params", "buffers", "batch", "key"]):
        raise ValueError(
            "loss must be a function of (params, buffers, batch, key); "
            "syncalgos.stateless lifts a loss(params, batch)"
        )


def check_batches(
    batches: PyTree, data: PyTree | None, layout: Layout, accumulate: int
) -> None:
    """Raises the ValueErrors of `DataParallel.run`."""
    steps, batch = leading_shape("batches", batches, ("steps", "global_batch"))
    if data is not None:
        check_rows(batches, *leading_shape("data", data, ("examples",)))
    if steps == 0:
        raise ValueError("batches hold no steps")
    check_parts(batch * layout.feeders, layout, accumulate)


def check_parts(batch: int, layout: Layout, accumulate: int) -> None:
    """Raises a ValueError unless workers and their devices divide a global batch."""
    checks.global_batch(batch, layout.workers, accumulate)
    each, parts = batch // layout.workers // accumulate, layout.inner
    if each % layout.batch_parts:
        over = " × ".join(f"{name} = {parts[name]}" for name in layout.batch_axes)
        what = "microbatch" if accumulate > 1 else "part of the batch"
        raise ValueError(
            f"a worker's {what}, {each}, does not divide over {over}: take a global "
            "batch that does, or other batch_axes"
        )


def check_rows(rows: Any, examples: int) -> None:
    """Raises a ValueError unless rows are numbers of examples."""
    dtype = getattr(rows, "dtype", None)
    if dtype is None or not np.issubdtype(dtype, np.integer) or rows.ndim != 2:
        raise ValueError(
            "with data, batches must be integer rows (steps, global_batch)"
        )
    if rows.size:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= examples:
            raise ValueError(f"rows must be 0 to {examples - 1}, got {low} to {high}")


def check_step(done: int) -> None:
    """Raises a ValueError unless so many local steps can be counted on the devices."""
    if not 0 <= done < 2**31:
        raise ValueError(
            f"local steps are counted from 0 to 2**31 - 1, not to {done}: start a new "
            "state with init from the center"
        )


def check_own(leaf: Any, shape: tuple[int, int]) -> None:
    """Raises a ValueError unless a leaf of a state can be used by this layout."""
    # Before anything runs: jax 0.10.2 ends the interpreter with SIGSEGV when a donated
    # array enters a pmap over two CPU devices.
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            "this state was given up to an earlier run; use the state it returned"
        )
    if np.shape(leaf)[:2] != shape:
        raise ValueError(
            f"this state leads with {np.shape(leaf)[:2]}, but the trainer lays its "
            f"workers over (devices, lanes) = {shape}"
        )


def check_workers(held: Any, workers: int) -> None:
    """Raises a ValueError unless replica and sync lead with so many workers."""
    of_workers = held._replace(step=(), key=())
    for path, leaf in jax.tree_util.tree_leaves_with_path(of_workers):
        if np.shape(leaf)[:1] != (workers,):
            name = "held" + jax.tree_util.keystr(path)
            raise ValueError(
                f"{name} leads with {np.shape(leaf)[:1]}, but there are {workers} "
                "workers here"
            )
