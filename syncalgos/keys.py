"""Random keys that follow from the seed, the step and the worker."""

from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree


def common_key(seed: int, step: Any) -> jax.Array:
    """Returns the key of a step's draws on which all workers agree.

    Args:
        seed: at least 0.
        step: the local step.
    """
    return jax.random.fold_in(jax.random.key(seed), step)


def own_key(seed: int, step: Any, axis: Axis) -> jax.Array:
    """Returns the key of a step's draws of this worker alone.

    Args:
        seed: at least 0.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.
    """
    return jax.random.fold_in(common_key(seed, step), collectives.index(axis))


def own_keys(tree: PyTree, worker: Any) -> PyTree:
    """Folds the worker's number into a tree's typed keys; worker 0 keeps them.

    Args:
        tree: arrays, some of which may be keys.
        worker: the worker's number, from 0.
    """
    # A module that holds its random state, as those of flax.nnx do, would else give all
    # workers the same dropout masks.

    def leaf(x):
        if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return x
        fold = jax.vmap(lambda key: jax.random.fold_in(key, worker))
        return jnp.where(worker == 0, x, fold(x.reshape(x.size)).reshape(x.shape))

    return jax.tree.map(leaf, tree)
