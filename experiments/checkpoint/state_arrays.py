"""The engine's state as named arrays, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.checkpoint.shards import name_pieces
from syncalgos import DataParallel, HeldPart, Replica, TrainState, reset
from syncalgos.collectives import PyTree

NamedArrays = dict[str, np.ndarray]


class Misfit(ValueError):
    """Arrays do not fit this run; the message is one line."""


def copy_view(x: Any) -> Any:
    """Returns a copy of a NumPy view; anything else unchanged."""
    is_view = isinstance(x, np.ndarray) and not x.flags.owndata
    return x.copy() if is_view else x


def name_own_arrays(host_state: TrainState) -> NamedArrays:
    """Returns the arrays of a process's workers, of shape (workers here, ...)."""
    return _name_leaves((host_state.replica, host_state.sync))


def name_shared_arrays(host_state: TrainState, center: Replica) -> NamedArrays:
    """Returns the arrays that all workers share: the step, the key, and the center."""
    # The center is for --resume-center, and for readers who want only the model.
    return _name_leaves(
        {"step": host_state.step, "key": host_state.key, "center": center}
    )


def restore_state(
    trainer: DataParallel, like: TrainState, own: NamedArrays, shared: NamedArrays
) -> TrainState:
    """Restores the state on the devices.

    Args:
        trainer: a trainer of the same number of workers.
        like: any state of the trainer, for its structure.
        own: the arrays of this process's workers.
        shared: the arrays that all workers share.

    Raises:
        Misfit: the arrays are not those of this run.
    """
    workers = len(trainer.layout.own_workers)
    replica, sync = _fill((like.replica, like.sync), own, workers)
    shared_values = _fill({"step": like.step, "key": like.key}, shared)
    state = TrainState(
        replica, sync, shared_values["step"], shared_values["key"], like.hyperparams
    )
    try:
        return trainer.from_host(state)
    except ValueError as error:  # for example, state whose shape depends on the mesh
        raise Misfit(str(error)) from error


def restart_from_center(
    trainer: DataParallel,
    seed: int,
    like: TrainState,
    own: NamedArrays,
    shared: NamedArrays,
) -> TrainState:
    """Starts new replicas from the center; only the step and schedules continue.

    Args:
        trainer: a trainer of any number of workers.
        seed: the seed of the new state's key.
        like: any state of the trainer.
        own: one worker's arrays, (1, ...).
        shared: the arrays that all workers shared.

    Raises:
        Misfit: the arrays are not those of this run.
    """
    shared_values = _fill({"center": trainer.center(like), "step": like.step}, shared)
    center = shared_values["center"]
    new_state = trainer.to_host(trainer.init(center.params, center.buffers, seed))
    stored_replica, _ = _fill((Replica((), like.replica.opt_state), ()), own, 1)
    workers = len(trainer.layout.own_workers)
    stored_opt_state = jax.tree.map(
        lambda x: jnp.repeat(x, workers, axis=0), stored_replica.opt_state
    )
    # Moments start anew, but a schedule's count must continue with the step.
    first_opt_state = new_state.replica.opt_state
    optimizer = optax.GradientTransformation(
        init=lambda params: first_opt_state, update=optax.identity().update
    )
    reset_replica, _ = reset(optimizer).sync(Replica((), stored_opt_state), (), 0)
    opt_state = jax.tree.map(np.asarray, reset_replica.opt_state)
    replica = new_state.replica._replace(opt_state=opt_state)
    return trainer.from_host(
        new_state._replace(replica=replica, step=shared_values["step"])
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _name_leaves(tree: PyTree) -> NamedArrays:
    """Names leaves by their paths; typed keys become their data."""
    arrays: NamedArrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        own_data = HeldPart.of(data) if isinstance(data, jax.Array) else data
        arrays |= name_pieces(jax.tree_util.keystr(path), own_data)
    return arrays


def _fill(tree: PyTree, arrays: NamedArrays, workers: int | None = None) -> Any:
    """Returns the arrays of the same paths in place of a tree's leaves.

    Args:
        tree: arrays of the same dtypes and shapes, typed keys among them.
        arrays: the arrays by path; keys are their data.
        workers: the number of workers in them, whose axis takes the place of the tree's
            (devices, lanes); None if the tree has none.
    """

    def find_leaf(path: tuple[Any, ...], like: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name not in arrays:
            raise Misfit(f"the checkpoint has no {name}")
        array = arrays[name]
        is_key = _is_key(like)
        expected = jax.eval_shape(jax.random.key_data, like) if is_key else like
        shape = expected.shape if workers is None else (workers, *expected.shape[2:])
        if array.shape != shape or array.dtype != expected.dtype:
            raise Misfit(
                f"the checkpoint's {name} is {array.dtype}{list(array.shape)}, not "
                f"{expected.dtype}{list(shape)}"
            )
        if not is_key:
            return array
        impl = jax.random.key_impl(like)
        return jax.random.wrap_key_data(jnp.asarray(array), impl=impl)

    return jax.tree_util.tree_map_with_path(find_leaf, tree)
