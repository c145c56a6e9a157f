"""Random keys that follow from the seed, the step and the worker."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree


def common_key(seed: int, step: Any) -> jax.Array:
    """Returns the key for a step's draws that are the same on all workers.

    Args:
        seed: at least 0.
        step: the local step.
    """
    return jax.random.fold_in(jax.random.key(seed), step)


def own_key(seed: int, step: Any, axis: Axis) -> jax.Array:
    """Returns the key for a step's draws that differ between workers.

    Args:
        seed: at least 0.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.
    """
    return jax.random.fold_in(common_key(seed, step), collectives.index(axis))


def own_keys(tree_name: str, tree: PyTree, worker: Any) -> PyTree:
    """Folds the worker's number into a tree's typed keys; worker 0 keeps them.

    Args:
        tree_name: buffers, or opt_state, whose untyped keys (`is_untyped`) are folded,
            too.
        tree: arrays, some of which may be keys.
        worker: the worker's number, from 0.

    Raises:
        ValueError: a leaf looks like an untyped key; the message names it.
    """
    # Otherwise a module that holds its random state, as in flax.nnx, would give all
    # workers the same dropout masks.
    fold = jax.vmap(lambda key: jax.random.fold_in(key, worker))

    def fold_leaf(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if tree_name == "opt_state" and is_untyped(path, x):
            return jax.random.key_data(fold_leaf((), jax.random.wrap_key_data(x)))
        # Stacked modules of flax.nnx count their draws in arrays of this form.
        if _is_like_untyped(x) and "count" not in name:
            raise ValueError(
                f"{tree_name}{name} is {x.dtype}{[*x.shape]}, like jax.random.PRNGKey: "
                "all workers would draw the same numbers; convert it to a typed key by "
                "jax.random.wrap_key_data, or to int32 if it is not a key"
            )
        if not is_key(x):
            return x
        return jnp.where(worker == 0, x, fold(x.reshape(x.size)).reshape(x.shape))

    return jax.tree_util.tree_map_with_path(fold_leaf, tree)


def is_key(x: Any) -> bool:
    """Whether an array holds typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_untyped(path: Any, x: Any) -> bool:
    """Whether a leaf is a key of `jax.random.PRNGKey`: by its form and its name."""
    # As `rng_key` of optax.add_noise. Other whole numbers may have the same form.
    name = jax.tree_util.keystr(path[-1:]).lower()
    return _is_like_untyped(x) and ("key" in name or "rng" in name)


def _is_like_untyped(x: Any) -> bool:
    untyped = jax.eval_shape(jax.random.PRNGKey, 0)
    return x.dtype == untyped.dtype and x.shape == untyped.shape


def holds_keys(tree: PyTree) -> bool:
    """Whether an optimizer's state holds random keys, or what may be untyped ones."""
    return any(is_key(x) or _is_like_untyped(x) for x in jax.tree.leaves(tree))


def uniform(key: jax.Array, count: int) -> jax.Array:
    """Returns the bits of `jax.random.uniform(key, (count,))`, faster on CPUs.

    Args:
        key: a typed key.
        count: how many numbers, in [0, 1).
    """
    # On CPUs jax computes the rounds in a loop, and each pass reads and writes all
    # words: 1.2 million numbers take 3.5 ms. All rounds in one pass take 1.0 ms.
    is_usual = jax.random.key_impl(key) == "threefry2x32" and count < 2**32
    is_usual = is_usual and jax.config.jax_threefry_partitionable  # pyright: ignore
    is_usual = is_usual and jnp.zeros(()).dtype == jnp.float32
    if not is_usual or collectives.platform() != "cpu":
        return jax.random.uniform(key, (count,))
    mantissas = (_threefry(key, count) >> 9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(mantissas, jnp.float32) - 1


def _threefry(key: jax.Array, count: int) -> jax.Array:
    """Returns a key's random words: both words of Threefry-2x32 at 0, 1, … xor-ed.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key_0, key_1 = jax.random.key_data(key)
    keys = key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA)
    x = jnp.full(count, key_0)
    y = lax.iota(jnp.uint32, count) + key_1
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            rotated = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
            y = rotated ^ x
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x ^ y
