"""The worker's share in means when `participating` weighs the workers.

It is noted while a strategy is traced. `participating` weighs gradients and params
itself; code that averages anything else asks for the share here.
"""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos._dtypes import PyTree, narrow, on_floats, widen
from syncalgos.collectives._axes import Setting

_OWN: Setting[jax.Array | None] = Setting("share", None)

_WEIGHS: Setting[bool] = Setting("weighs", False)
"""Whether each reducer multiplies what it gets by the worker's share."""

_LEFT_OUT: Setting[list[Any] | None] = Setting("left_out", None)
"""The updates of reducers that return zeros in place of a mean; None: they combine."""


def counting(share: jax.Array | None) -> AbstractContextManager[None]:
    """Notes this worker's share while the block is traced.

    Args:
        share: N w / Σw for weights w, 0 for a worker that skips; None: no weights.
    """
    return _OWN.set_to(share)


def noted_share() -> jax.Array | None:
    """The share that was noted for the code that is traced; None: no weights."""
    return _OWN.get()


def takes_part() -> jax.Array | bool:
    """Whether this worker takes part; True if workers are not weighted."""
    share = noted_share()
    return True if share is None else share > 0


def unweighted(tree: PyTree) -> PyTree:
    """Divides floats by the worker's share, for questions about its own values alone.

    Args:
        tree: arrays, returned unchanged if workers are not weighted; zeros on a worker
            that skips.
    """
    share = noted_share()
    if share is None:
        return tree
    takes = share > 0
    divisor = jnp.where(takes, share, 1)

    def leaves(xs):
        return narrow([jnp.where(takes, x / divisor, 0) for x in widen(xs)], xs)

    return on_floats(leaves, tree)


def weighted(tree: PyTree) -> PyTree:
    """Multiplies floats by the worker's share, so that their mean is the weighted one.

    Args:
        tree: arrays; returned unchanged if workers are not weighted.
    """
    return times_share(tree, noted_share())


def weighing_in_reducers(weighs: bool) -> AbstractContextManager[None]:
    """Sets whether reducers weigh what they get, while the block is traced."""
    return _WEIGHS.set_to(weighs)


def leaving_out_reducers(reducer_inputs: list[Any]) -> AbstractContextManager[None]:
    """Lets reducers send nothing and return zeros, while the block is traced.

    What is still sent is not sent by a reducer.

    Args:
        reducer_inputs: a list, to which each reducer appends what it was called with.
    """
    return _LEFT_OUT.set_to(reducer_inputs)


def is_left_out(updates: PyTree) -> bool:
    """Whether a reducer is to combine nothing; notes what it was called with."""
    reducer_inputs = _LEFT_OUT.get()
    if reducer_inputs is None:
        return False
    reducer_inputs.append(updates)
    return True


def weigh_in_reducer(updates: PyTree) -> PyTree:
    """Returns a reducer's updates, times the worker's share if it is to weigh them."""
    return weighted(updates) if _WEIGHS.get() else updates


def times_share(tree: PyTree, share: jax.Array | None) -> PyTree:
    """Multiplies floats by a share, in at least float32; None returns the tree."""
    if share is None:
        return tree

    def leaves(xs):
        # 0 times NaN would be NaN, and reach the workers that take part.
        return narrow([jnp.where(share > 0, share * x, 0) for x in widen(xs)], xs)

    return on_floats(leaves, tree)


def no_mean(what: str) -> None:
    """Declares that the calling code takes no mean, and so allows no weights.

    Args:
        what: the name of what it computes, for the message.

    Raises:
        ValueError: the workers are weighted.
    """
    if noted_share() is not None:
        raise ValueError(
            f"participating: {what} is not a mean over the workers, so workers that "
            "skip cannot be left out of it"
        )
