"""Two tables sharded by rows, a small rest, and strategies that train them."""

import jax.numpy as jnp
import numpy as np
import optax
from placed import placed

import syncalgos
from syncalgos import bmuf, chain, every, lookup, model_averaging, reset

ROWS, BATCH, STEPS, PERIOD, LR, MOMENTUM = 12, 24, 6, 2, 0.2, 0.9
RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.integers(0, ROWS, size=(2, STEPS, BATCH))
SECOND[:, 0] = FIRST[:, 1] = FIRST[:, 0]  # rows that are asked for more than once
BATCHES = FIRST, SECOND, RNG.normal(size=(STEPS, BATCH))
START = {
    "rest": {"bias": np.zeros(()), "kernel": RNG.normal(size=3)},
    "scale": RNG.normal(size=ROWS),
    "words": RNG.normal(size=(ROWS, 3)),
}
TABLES = {"rest": False, "scale": True, "words": True}


def loss_with(look):
    """One table is looked up twice, and two tables by the same numbers."""

    def loss(params, batch):
        first, second, target = batch
        pair = look(params["words"], first) * look(params["words"], second)
        output = pair @ params["rest"]["kernel"] + params["rest"]["bias"]
        return jnp.mean((output + look(params["scale"], first) - target) ** 2) / 2

    return syncalgos.stateless(loss)


OPTIMIZER = optax.sgd(LR, momentum=MOMENTUM)
STRATEGIES = {
    "bmuf": bmuf(PERIOD, block_momentum=0.5),
    "reset": chain(model_averaging(PERIOD), every(reset(OPTIMIZER), PERIOD)),
}


def make(strategy, workers=4, backend="vmap", look=lookup, tables=TABLES, **rest):
    return syncalgos.DataParallel(
        *(loss_with(look), rest.pop("optimizer", OPTIMIZER), strategy),
        **placed({"workers": workers, "backend": backend, "tables": tables, **rest}),
    )
