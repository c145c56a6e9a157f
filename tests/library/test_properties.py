"""Properties of every algorithm on any model: trees, dtypes, numbers of workers.

Shapes come from a short list, as each is compiled anew.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owed import PERIOD, make, owed

import syncalgos

TREES = [
    (3,),  # a model may be one array
    {"matrix": (4, 3), "scalar": ()},
    {"empty": (0, 3), "vector": (2,)},
    {"deep": [(2, 2), {"leaf": (1,)}], "kernel": (2, 3, 2), "odd": (7,)},
]
DTYPES = ["float32", "bfloat16", "float64"]

# Replicas that agree differ by the rounding of one sum: 8 bits, 24 bits, 53 bits.
ROUNDING = {"bfloat16": 0.1, "float32": 1e-5, "float64": 1e-12}


def is_shape(node):
    return isinstance(node, tuple)


def loss(params, batch):
    """The squared distance to the mean of the worker's batch."""
    target = jnp.mean(batch)
    squares = [jnp.sum((x - target) ** 2) for x in jax.tree.leaves(params)]
    return jnp.sum(jnp.stack(squares))


def keeps_the_model(name, tree, dtype, workers, seed):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), tree, is_leaf=is_shape
    )
    batches = rng.normal(size=(2 * PERIOD, 2 * workers)).astype(np.float32)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss),
        owed(name).optimizer,
        make(name),
        workers=workers,
        backend="vmap",
    )
    state, metrics = trainer.run(trainer.init(params), batches)
    center = trainer.center(state).params
    for before, after in zip(*map(jax.tree.leaves, (params, center)), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert np.isfinite(np.asarray(after, np.float64)).all()
    assert np.isfinite(metrics["loss"]).all()
    if 2 * PERIOD - 1 in owed(name).agree_after or workers == 1:
        for x in jax.tree.leaves(state.replica.params):
            replicas = np.asarray(x, np.float64).reshape(workers, -1)
            assert np.ptp(replicas, axis=0).max(initial=0) <= ROUNDING[dtype]


def draws(test):
    test = given(
        tree=st.sampled_from(TREES),
        dtype=st.sampled_from(DTYPES),
        workers=st.integers(1, 9),
        seed=st.integers(0, 2**16),
    )(test)
    return pytest.mark.parametrize("name", syncalgos.ALGORITHMS)(test)


@pytest.mark.sample(5, slow=20)
@settings(max_examples=2, deadline=None, derandomize=True)
@draws
def test_any_model_keeps_its_form(name, tree, dtype, workers, seed):
    with jax.enable_x64(dtype == "float64"):
        keeps_the_model(name, tree, dtype, workers, seed)


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True)
@draws
def test_many_models_keep_their_form(name, tree, dtype, workers, seed):
    with jax.enable_x64(dtype == "float64"):
        keeps_the_model(name, tree, dtype, workers, seed)
