"""The engine's state as named arrays, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.checkpoint.shards import (
    named_pieces,
)
from syncalgos import DataParallel, Replica, TrainState
from syncalgos.collectives import PyTree
from syncalgos.combinators.primitives import restart
from syncalgos.held_parts import part_of

Named = dict[str, np.ndarray]


class Misfit(ValueError):
    """Arrays do not fit this run; the message is one line."""


def owned(x: Any) -> Any:
    """Returns a copy of a NumPy view; anything else unchanged."""
    is_view = isinstance(x, np.ndarray) and not x.flags.owndata
    return x.copy() if is_view else x


def own(held: TrainState) -> Named:
    """Returns the arrays of a process's workers, of shape (workers here, ...)."""
    return _named((held.replica, held.sync))


def shared(held: TrainState, center: Replica) -> Named:
    """Returns the arrays that all workers share: the step, the key, and the center."""
    # The center is for --resume-center, and for readers who want only the model.
    return _named({"step": held.step, "key": held.key, "center": center})


def state(
    trainer: DataParallel, like: TrainState, own: Named, shared: Named
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
    shapes = jax.tree.map(lambda x: _Like(x, 2), (like.replica, like.sync))
    replica, sync = _filled(shapes, own, len(trainer.layout.own_workers))
    rest = _filled({"step": _Like(like.step), "key": _Like(like.key)}, shared)
    try:
        given = rest["step"], rest["key"], like.hyperparams
        return trainer.from_host(TrainState(replica, sync, *given))
    except ValueError as error:  # for example, state whose shape depends on the mesh
        raise Misfit(str(error)) from error


def restarted(
    trainer: DataParallel, seed: int, like: TrainState, own: Named, shared: Named
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
    center = jax.tree.map(_Like, trainer.center(like))
    found = _filled({"center": center, "step": _Like(like.step)}, shared)
    model = found["center"]
    fresh = trainer.to_host(trainer.init(model.params, model.buffers, seed))
    opt_state = jax.tree.map(lambda x: _Like(x, 2), like.replica.opt_state)
    before = _filled((Replica((), opt_state), ()), own, 1)[0].opt_state
    workers = len(trainer.layout.own_workers)
    before = jax.tree.map(lambda x: jnp.repeat(x, workers, axis=0), before)
    # Moments start anew, but a schedule's count must continue with the step.
    after = restart(fresh.replica.opt_state, before)
    replica = fresh.replica._replace(opt_state=jax.tree.map(np.asarray, after))
    return trainer.from_host(fresh._replace(replica=replica, step=found["step"]))


class _Like:
    """The shape, without leading axes, and the dtype of an array.

    For a typed key these describe its data; `impl` is the implementation of the key.
    """

    def __init__(self, x: Any, leading: int = 0):
        self.impl = jax.random.key_impl(x) if _is_key(x) else None
        raw = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        self.shape, self.dtype = tuple(raw.shape[leading:]), raw.dtype


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(tree: PyTree) -> Named:
    """Names leaves by their paths; typed keys become their data."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    raw = [jax.random.key_data(x) if _is_key(x) else x for _, x in leaves]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    found: Named = {}
    for name, x in zip(names, raw, strict=True):
        found |= named_pieces(name, part_of(x) if isinstance(x, jax.Array) else x)
    return found


def _filled(likes: PyTree, named: Named, *leading: int) -> Any:
    """Fills a tree of `_Like`s with the arrays of the same paths."""

    def leaf(path, like):
        name = jax.tree_util.keystr(path)
        if name not in named:
            raise Misfit(f"the checkpoint has no {name}")
        found = named[name]
        expected = (*leading, *like.shape)
        if found.shape != expected or found.dtype != like.dtype:
            raise Misfit(
                f"the checkpoint's {name} is {found.dtype}{list(found.shape)}, not "
                f"{like.dtype}{list(expected)}"
            )
        if like.impl is None:
            return found
        return jax.random.wrap_key_data(jnp.asarray(found), impl=like.impl)

    return jax.tree_util.tree_map_with_path(leaf, likes)
