"""The engine's state as named arrays, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.checkpoint.shards import named_pieces
from syncalgos import DataParallel, HeldPart, Replica, TrainState, reset
from syncalgos.collectives import PyTree

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
    workers = len(trainer.layout.own_workers)
    replica, sync = _filled((like.replica, like.sync), own, workers)
    rest = _filled({"step": like.step, "key": like.key}, shared)
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
    found = _filled({"center": trainer.center(like), "step": like.step}, shared)
    model = found["center"]
    fresh = trainer.to_host(trainer.init(model.params, model.buffers, seed))
    before = _filled((Replica((), like.replica.opt_state), ()), own, 1)[0].opt_state
    workers = len(trainer.layout.own_workers)
    before = jax.tree.map(lambda x: jnp.repeat(x, workers, axis=0), before)
    # Moments start anew, but a schedule's count must continue with the step.
    first_state = fresh.replica.opt_state
    optimizer = optax.GradientTransformation(
        init=lambda params: first_state, update=optax.identity().update
    )
    after, _ = reset(optimizer).sync(Replica((), before), (), 0)
    opt_state = jax.tree.map(np.asarray, after.opt_state)
    replica = fresh.replica._replace(opt_state=opt_state)
    return trainer.from_host(fresh._replace(replica=replica, step=found["step"]))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(tree: PyTree) -> Named:
    """Names leaves by their paths; typed keys become their data."""
    found: Named = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        raw = jax.random.key_data(x) if _is_key(x) else x
        here = HeldPart.of(raw) if isinstance(raw, jax.Array) else raw
        found |= named_pieces(jax.tree_util.keystr(path), here)
    return found


def _filled(tree: PyTree, named: Named, workers: int | None = None) -> Any:
    """Returns the arrays of the same paths in place of a tree's leaves.

    Args:
        tree: arrays of the same dtypes and shapes, typed keys among them.
        named: the arrays by path; keys are their data.
        workers: the number of workers in them, whose axis takes the place of the tree's
            (devices, lanes); None if the tree has none.
    """

    def leaf(path, like):
        name, is_key = jax.tree_util.keystr(path), _is_key(like)
        if name not in named:
            raise Misfit(f"the checkpoint has no {name}")
        found = named[name]
        raw = jax.eval_shape(jax.random.key_data, like) if is_key else like
        shape = raw.shape if workers is None else (workers, *raw.shape[2:])
        if found.shape != shape or found.dtype != raw.dtype:
            raise Misfit(
                f"the checkpoint's {name} is {found.dtype}{list(found.shape)}, not "
                f"{raw.dtype}{list(shape)}"
            )
        if not is_key:
            return found
        impl = jax.random.key_impl(like)
        return jax.random.wrap_key_data(jnp.asarray(found), impl=impl)

    return jax.tree_util.tree_map_with_path(leaf, tree)
