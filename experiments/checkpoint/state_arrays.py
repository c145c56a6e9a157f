"""The engine's state as named arrays, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import DataParallel, Replica, TrainState
from syncalgos.collectives import PyTree
from syncalgos.combinators.primitives import restart

Named = dict[str, np.ndarray]


class Misfit(ValueError):
    """Arrays are not those of this run; the message is one line."""


def own(held: TrainState) -> Named:
    """A process's workers: leaves of replica and sync, (workers here, ...)."""
    return _named((held.replica, held.sync))


def shared(held: TrainState, center: Replica) -> Named:
    """What all workers share: the step, the key, and the center."""
    return _named({"step": held.step, "key": held.key, "center": center})


def state(
    trainer: DataParallel, like: TrainState, own: Named, shared: Named
) -> TrainState:
    """The state on the devices again.

    Args:
        trainer: of as many workers.
        like: any state of it, whose structure is filled in.
        own: this process's workers.
        shared: what all share.

    Raises:
        Misfit: other arrays than this run has.
    """
    shapes = jax.tree.map(lambda x: _Like(x, 2), (like.replica, like.sync))
    replica, sync = _filled(shapes, own, len(trainer.layout.own_workers))
    rest = _filled({"step": _Like(like.step), "key": _Like(like.key)}, shared)
    return trainer.from_host(TrainState(replica, sync, rest["step"], rest["key"]))


def restarted(
    trainer: DataParallel, seed: int, like: TrainState, own: Named, shared: Named
) -> TrainState:
    """New replicas from the center; only the step, and schedules, go on.

    Args:
        trainer: of any number of workers.
        seed: of the new state's key.
        like: any state of the trainer.
        own: one worker's arrays, (1, ...).
        shared: what all workers shared.

    Raises:
        Misfit: other arrays than this run has.
    """
    center = jax.tree.map(_Like, trainer.center(like))
    found = _filled({"center": center, "step": _Like(like.step)}, shared)
    model = found["center"]
    fresh = trainer.to_host(trainer.init(model.params, model.buffers, seed))
    opt_state = jax.tree.map(lambda x: _Like(x, 2), like.replica.opt_state)
    before = _filled((Replica((), opt_state), ()), own, 1)[0].opt_state
    workers = len(trainer.layout.own_workers)
    before = jax.tree.map(lambda x: jnp.repeat(x, workers, axis=0), before)
    after = restart(fresh.replica.opt_state, before)
    replica = fresh.replica._replace(opt_state=jax.tree.map(np.asarray, after))
    return trainer.from_host(fresh._replace(replica=replica, step=found["step"]))


class _Like:
    """The shape, without so many leading axes, and the dtype of an array.

    Of typed keys those of their data, and what makes keys of it again.
    """

    def __init__(self, x: Any, leading: int = 0):
        self.impl = jax.random.key_impl(x) if _is_key(x) else None
        raw = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        self.shape, self.dtype = tuple(raw.shape[leading:]), raw.dtype


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(tree: PyTree) -> Named:
    """The leaves by their paths; typed keys by their data."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    raw = [jax.random.key_data(x) if _is_key(x) else x for _, x in leaves]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    return dict(zip(names, map(np.asarray, raw), strict=True))


def _filled(likes: PyTree, named: Named, *leading: int) -> Any:
    """A tree like that of `_Like`s, its leaves taken by their paths."""

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
