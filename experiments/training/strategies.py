"""The strategy of a run: its algorithm, and the additions by common flags."""

from typing import Any

import jax
import optax

from experiments.cli import factories
from experiments.cli.factories import ALGORITHM
from experiments.tasks.task import Tables, Task
from experiments.training import optimizers
from experiments.training.config import RunConfig, Settings
from experiments.training.optimizers import Schedule
from syncalgos import (
    WORKERS,
    Strategy,
    after,
    at_syncs,
    chain,
    checks,
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
    """Makes the strategy of a run, and the part of it that is the algorithm.

    Args:
        config: the settings.
        schedule: the learning rate.
        optimizer: the inner optimizer.
        hosts: the number of machines.
        task: the task to train.
        algorithm: the algorithm, in place of the config's.

    Raises:
        BadRequest: a custom algorithm cannot be used.
        ValueError: a registered algorithm refuses its arguments.
    """
    if algorithm is None:
        own = schedule, optimizer, hosts, task
        algorithm = make_algorithm(config, *own)
        if config.arguments.get("reduce") == ROW_SPARSE:
            rows = _rows_of_a_step(config, algorithm, task)
            algorithm = make_algorithm(config, *own, reduce=rows)
    strategy = algorithm
    if task.tables is not None and task.kept == "shared":
        # Shared tables lie beside the algorithm, and are updated at every step.
        names, each = task.tables.names, _row_sparse(config, task.tables)
        algorithm = masked(algorithm, jax.tree.map(lambda name: not name, names))
        tables = masked(reduce_with(each), jax.tree.map(bool, names))
        strategy = chain(tables, algorithm)
    # From the inside out: actions at syncs are part of the algorithm, and a synchronous
    # start precedes all of it.
    if config.opt_state_at_sync != "keep":
        at_sync = optimizers.AT_SYNC[config.opt_state_at_sync](optimizer)
        strategy = at_syncs(strategy, at_sync)
    if n := config.sync_until:
        strategy = chain(until(sync_sgd(), n), after(strategy, n))
    return strategy, algorithm


def declaring(config: RunConfig, task: Task) -> Strategy:
    """Makes a config's algorithm to read its declarations, before the rate is known."""
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
        learning_rate: the `schedule` of `make_strategies`.
        optimizer: as in `make_strategies`.
        hosts: as in `make_strategies`.
        task: as in `make_strategies`.
        reduce: the reducer for `--reduce row_sparse`. A mean gives the same result, for
            params of any shape.
    """
    arguments = {**config.arguments}
    if arguments.get("reduce") == ROW_SPARSE:
        arguments["reduce"] = reduce
    # In a model with stacked layers a few leaves hold most params: fragments of whole
    # leaves would have very different sizes.
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
        plain: the algorithm with a mean in place of that reducer.
        task: the task to train.

    Raises:
        ValueError: the task has no tables, or the algorithm does not average the
            gradients of one step.
    """
    if not introspection.takes_mean(plain):
        raise ValueError(
            f"--reduce {ROW_SPARSE} sends only the rows of one step's gradient: "
            f"use it with --algo sync_sgd, not {config.algo}"
        )
    if task.tables is None:
        raise ValueError(
            f"--reduce {ROW_SPARSE} needs a task with tables, such as embeddings"
        )
    if task.kept != "replicated":
        raise ValueError(
            f"--reduce {ROW_SPARSE} needs --tables replicated: {task.kept} tables send "
            "only rows anyway"
        )
    return _row_sparse(config, task.tables)


def _row_sparse(config: Settings, tables: Tables) -> Reducer:
    """Makes the reducer for the rows that all microbatches of a step touch."""
    examples = config.batch_size // config.workers // config.accumulate
    rows = {
        name: config.accumulate * count for name, count in tables.rows(examples).items()
    }
    return row_sparse(rows, tables=tables.names)
