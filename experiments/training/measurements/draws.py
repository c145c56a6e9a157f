"""Whether a run draws from its seed while it trains."""

from dataclasses import replace

import jax
import numpy as np

from experiments.cli.factories import TASK
from experiments.tasks.contract import over_workers
from experiments.training import optimizers
from experiments.training.defaults import takes
from experiments.training.run import Run
from experiments.training.strategies import make_strategies
from syncalgos import Replica, Strategy
from syncalgos.engine.state import of_one
from syncalgos.strategy import seeing


def draws_from_seed(run: Run, seed: int) -> bool:
    """Whether the seed is in the program of a run, so that another has its own."""
    c = run.config
    if not takes(c, "seed"):
        return False
    # Parameters alone do not say it: `--reduce int8` draws, `--reduce mean` does
    # not. A task may make other data of another seed.
    if takes(c, "seed", [TASK]):
        return True
    other = replace(c, seed=seed)
    schedule, optimizer = optimizers.inner(other, run.task.muon)
    made, _ = make_strategies(other, schedule, optimizer, run.group.hosts, run.task)
    replica = of_one(run.state.replica)
    return _text(run.strategy, replica, c.workers) != _text(made, replica, c.workers)


def _text(strategy: Strategy, replica: Replica, workers: int) -> str:
    """Returns a local step of a strategy as lowered, with all its constants."""

    def local_step(replica, step):
        replica = seeing(strategy, replica)
        state = strategy.init(replica.params)
        grads, state = strategy.reduce(replica.params, replica, state, step)
        replica, state = strategy.sync(replica._replace(params=grads), state, step)
        return strategy.center(replica.params, state)

    mapped = over_workers(local_step, (0, None))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, workers, *x.shape), x.dtype), replica
    )
    return jax.jit(mapped).lower(shapes, np.int32(0)).as_text()
