"""Two tables sharded by rows, a small rest, and strategies that train them."""

import jax.numpy as jnp
import numpy as np
import optax

import syncalgos
from support.placements import placed
from syncalgos import bmuf, chain, every, lookup, model_averaging, reset

ROWS = 12
BATCH = 24
STEPS = 6
PERIOD = 2
LR = 0.2
MOMENTUM = 0.9
RNG = np.random.default_rng(0)
FIRST_ROWS, SECOND_ROWS = RNG.integers(0, ROWS, size=(2, STEPS, BATCH))
# Rows that are asked for more than once.
SECOND_ROWS[:, 0] = FIRST_ROWS[:, 1] = FIRST_ROWS[:, 0]
BATCHES = FIRST_ROWS, SECOND_ROWS, RNG.normal(size=(STEPS, BATCH))
START = {
    "rest": {"bias": np.zeros(()), "kernel": RNG.normal(size=3)},
    "scale": RNG.normal(size=ROWS),
    "words": RNG.normal(size=(ROWS, 3)),
}
TABLES = {"rest": False, "scale": True, "words": True}


def make_loss(look):
    """One table is looked up twice, and two tables by the same numbers."""

    def loss(params, batch):
        first_rows, second_rows, target = batch
        pair = look(params["words"], first_rows) * look(params["words"], second_rows)
        output = pair @ params["rest"]["kernel"] + params["rest"]["bias"]
        return jnp.mean((output + look(params["scale"], first_rows) - target) ** 2) / 2

    return syncalgos.stateless(loss)


OPTIMIZER = optax.sgd(LR, momentum=MOMENTUM)
STRATEGIES = {
    "bmuf": bmuf(PERIOD, block_momentum=0.5),
    "reset": chain(model_averaging(PERIOD), every(reset(OPTIMIZER), PERIOD)),
}


def make(strategy, workers=4, backend="vmap", look=lookup, tables=TABLES, **options):
    return syncalgos.DataParallel(
        *(make_loss(look), options.pop("optimizer", OPTIMIZER), strategy),
        **placed({"workers": workers, "backend": backend, "tables": tables, **options}),
    )
