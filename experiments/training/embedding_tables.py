"""What a task's embedding tables ask of a strategy and of the engine."""

from collections.abc import Mapping
from typing import Any

import jax

from experiments.tasks.task import Tables, Task
from experiments.training.config import RunConfig
from syncalgos import Strategy, chain, masked, reduce_with
from syncalgos.collectives import PyTree
from syncalgos.reducers import row_sparse
from syncalgos.reducers.reducer import Reducer

ROW_SPARSE = "row_sparse"


def with_row_sparse(config: RunConfig, task: Task) -> Mapping[str, Any]:
    """The algorithm's arguments; `--reduce row_sparse` becomes the task's reducer.

    Raises:
        ValueError: a task without tables, or an algorithm that does not average the
            gradients of one step.
    """
    arguments = config.arguments
    if arguments.get("reduce") != ROW_SPARSE:
        return arguments
    if config.algo != "sync_sgd":
        raise ValueError(
            f"--reduce {ROW_SPARSE} sends the rows that one step's gradient touches: "
            f"use it with --algo sync_sgd, not {config.algo}"
        )
    if task.tables is None:
        raise ValueError(
            f"--reduce {ROW_SPARSE}: {config.task} has no tables (embeddings has)"
        )
    if task.kept != "replicated":
        raise ValueError(
            f"--reduce {ROW_SPARSE} is for replicated tables: {task.kept} ones are "
            "sent by rows already"
        )
    return {**arguments, "reduce": _reducer(task.tables, config)}


def dense(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with the mean in place of row_sparse, which computes the same."""
    row_sparse = arguments.get("reduce") == ROW_SPARSE
    return {**arguments, "reduce": "mean"} if row_sparse else arguments


def of_rest(strategy: Strategy, task: Task) -> Strategy:
    """The strategy for all but shared tables."""
    if task.tables is None or task.kept != "shared":
        return strategy
    return masked(strategy, jax.tree.map(lambda name: not name, task.tables.names))


def beside_shared(rest: Strategy, config: RunConfig, task: Task) -> Strategy:
    """What `of_rest` made, and shared tables beside it, updated at every step."""
    if task.tables is None or task.kept != "shared":
        return rest
    at_every_step = reduce_with(_reducer(task.tables, config))
    return chain(masked(at_every_step, _is_table(task.tables)), rest)


def sharded(task: Task) -> PyTree | None:
    """Which leaves of params lie in parts; None where all are whole."""
    if task.tables is None or task.kept != "sharded":
        return None
    return _is_table(task.tables)


def _is_table(tables: Tables) -> PyTree:
    return jax.tree.map(bool, tables.names)


def _reducer(tables: Tables, config: RunConfig) -> Reducer:
    examples = config.batch_size // config.workers // config.accumulate
    rows = {
        name: config.accumulate * count for name, count in tables.rows(examples).items()
    }
    return row_sparse(rows, tables.names)
