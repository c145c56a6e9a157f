"""A small linear regression, for tests of the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos
from support.placements import placed
from syncalgos import DataParallel, stateless

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 6)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))
DATA = {"x": X, "y": Y}
ROWS = RNG.integers(0, 200, size=(12, 24))
BATCHES = {"x": X[ROWS], "y": Y[ROWS]}


def to_float64(tree):
    """The tree in float64."""
    return jax.tree.map(lambda x: np.asarray(x, float), tree)


def make_params():
    rng = np.random.default_rng(1)
    return {
        "w": rng.normal(size=(6, 1)).astype(np.float32),
        "b": np.zeros(1, np.float32),
    }


def plain_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def make_trainer(strategy=None, workers=4, backend="auto", loss=None, **options):
    strategy = syncalgos.bmuf(3) if strategy is None else strategy
    optimizer = optax.sgd(0.05, momentum=0.9)
    return DataParallel(
        loss or stateless(plain_loss),
        optimizer,
        strategy,
        workers=workers,
        backend=backend,
        **placed(options),
    )


@functools.cache
def plain_trainer():
    """The same one for all tests, for which its programs compile once."""
    return make_trainer()
