"""The strategy of a run: its algorithm, and what common flags add to it."""

from typing import Any

import jax
import optax

from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM
from experiments.tasks.task import Tables, Task
from experiments.training import optimizers
from experiments.training.config import RunConfig, Settings
from experiments.training.optimizers import Schedule
from syncalgos import (
    WORKERS,
    Strategy,
    after,
    at_end,
    at_syncs,
    chain,
    checks,
    ema,
    masked,
    reduce_with,
    sync_sgd,
    until,
)
from syncalgos.combinators import introspection
from syncalgos.reducers import row_sparse
from syncalgos.reducers.reducer import Reducer

ROW_SPARSE = "row_sparse"


def make_strategies(
    config: Settings,
    schedule: Schedule,
    optimizer: optax.GradientTransformation,
    hosts: int,
    task: Task,
    algorithm: Strategy | None = None,
) -> tuple[Strategy, Strategy]:
    """Makes the strategy of a run, and its part that is the algorithm's alone.

    Args:
        config: the settings.
        schedule: the learning rate.
        optimizer: the inner one.
        hosts: on how many machines the workers are.
        task: that is trained.
        algorithm: in place of the config's.

    Raises:
        BadRequest: what a strategy cannot be; a ValueError if it is one of ours.
    """
    if algorithm is None:
        own = schedule, optimizer, hosts, task
        algorithm = make_algorithm(config, *own)
        if config.arguments.get("reduce") == ROW_SPARSE:
            rows = _rows_of_a_step(config, algorithm, task)
            algorithm = make_algorithm(config, *own, reduce=rows)
    if config.sync_at_end:
        algorithm = _synced_at_end(config, algorithm)
    strategy = algorithm
    if task.tables is not None and task.kept == "shared":
        # Shared tables lie beside the algorithm, and are updated at every step.
        names, each = task.tables.names, _row_sparse(config, task.tables)
        algorithm = masked(algorithm, jax.tree.map(lambda name: not name, names))
        tables = masked(reduce_with(each), jax.tree.map(bool, names))
        strategy = chain(tables, algorithm)
    # Added from the inside out: what happens at syncs is part of the algorithm, a
    # synchronous start precedes all of it, and the average follows all params.
    if config.opt_state_at_sync != "keep":
        at_sync = optimizers.AT_SYNC[config.opt_state_at_sync](optimizer)
        strategy = at_syncs(strategy, at_sync)
    if n := config.sync_until:
        strategy = chain(until(sync_sgd(), n), after(strategy, n))
    return strategy if config.ema is None else ema(strategy, config.ema), algorithm


def _synced_at_end(config: Settings, algorithm: Strategy) -> Strategy:
    try:
        return at_end(algorithm, config.steps)
    except ValueError as error:
        raise BadRequest(
            f"--sync-at-end with --algo {config.algo}: {error}".replace(" at_end:", "")
        ) from error


def declaring(config: RunConfig, task: Task) -> Strategy:
    """Makes a config's algorithm for what it declares, before its rate is known."""
    return make_algorithm(config, lambda step: 1.0, optax.sgd(1.0), 1, task)


def make_algorithm(
    config: RunConfig,
    learning_rate: Schedule,
    optimizer: optax.GradientTransformation,
    hosts: int,
    task: Task,
    reduce: Reducer | str = "mean",
) -> Strategy:
    """Calls the algorithm's factory with its flags and what the harness passes.

    Args:
        config: the settings.
        learning_rate: as for `make_strategies`, and all that follow.
        reduce: in place of `--reduce row_sparse`. A mean computes the same, for params
            of any shape.
    """
    arguments = {**config.arguments}
    if arguments.get("reduce") == ROW_SPARSE:
        arguments["reduce"] = reduce
    # Few leaves hold most of a model with stacked layers: fragments of whole leaves
    # would be of very different sizes.
    if "cut" in arguments and arguments["cut"] is None and task.stacked:
        arguments["cut"] = "bytes"
    offered = {
        "seed": config.seed,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "axis": WORKERS,
        "hosts": hosts,
        "stacked": task.stacked,
    }
    return factories.call(ALGORITHM, config.algo, arguments, offered, _check_strategy)


def _check_strategy(made: Any) -> None:
    """Raises a ValueError unless a factory has made a strategy."""
    if not isinstance(made, Strategy):
        raise ValueError(
            f"the factory must return a syncalgos.Strategy, got {checks.shown(made)}"
        )


def _rows_of_a_step(config: Settings, plain: Strategy, task: Task) -> Reducer:
    """Returns the reducer that takes the place of `--reduce row_sparse`.

    Args:
        config: the settings.
        plain: the algorithm with a mean in its place.
        task: that is trained.

    Raises:
        ValueError: a task without tables, or an algorithm that does not average the
            gradients of one step.
    """
    if not introspection.takes_mean(plain):
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
    return _row_sparse(config, task.tables)


def _row_sparse(config: Settings, tables: Tables) -> Reducer:
    """Makes the reducer of the rows that a step of all its microbatches touches."""
    examples = config.batch_size // config.workers // config.accumulate
    rows = {
        name: config.accumulate * count for name, count in tables.rows(examples).items()
    }
    return row_sparse(rows, tables.names)
