"""Fragments of a model, which are sent one after the other."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.reducers import _stacking
from syncalgos.reducers._stacking import Layered, shards

CUTS = ("leaves", "bytes", "layers")

CutRule = str | checks.ByLeaf
"""One of CUTS, or a function that gives the number of each leaf's fragment, from 0:
(the leaf's path, its shape) -> number, or params -> a tree of numbers."""

Owners = list[np.ndarray]
"""For each leaf the fragments of its rows along the first axis, or its one fragment."""


def check_cut(cut: CutRule) -> CutRule:
    """Returns a known way to cut.

    Raises:
        ValueError: an unknown name.
    """
    return cut if callable(cut) else checks.one_of("cut", cut, CUTS)


def steps_between(period: int, fragments: int, delay: int) -> int:
    """Returns the local steps between two fragments' syncs.

    Args:
        period: local steps between two syncs of a fragment.
        fragments: the number of fragments.
        delay: local steps from sending to arrival.

    Raises:
        ValueError: the period does not divide into the fragments, or the delay reaches
            the next fragment's sync.
    """
    if period % fragments:
        raise ValueError(
            f"fragments must divide the period of {period}, got {fragments}"
        )
    gap = period // fragments
    if delay >= gap:
        raise ValueError(f"delay must be below period / fragments = {gap}, got {delay}")
    return gap


def mask(
    number: int, fragments: int, cut: CutRule, layered: Layered, params: PyTree
) -> PyTree:
    """Returns the mask of a fragment, for `masked`.

    Args:
        number: the fragment's number, from 0.
        fragments: the number of fragments.
        cut: how to cut. leaves: consecutive leaves, about as many in each fragment.
            bytes: consecutive bytes, about as many in each; a leaf may be cut between
            rows of its first axis. layers: layer l of stacked leaves goes to fragment l
            modulo `fragments`; the other leaves, largest first, each go to the fragment
            that is smallest so far.
        layered: which leaves hold several layers.
        params: the model.

    Returns:
        A tree like params: for each leaf True, False, or the slice of its rows.

    Raises:
        ValueError: a function returns anything but numbers of fragments.
    """
    params = shards.whole_shapes(params)
    leaves, form = jax.tree.flatten(params)
    if callable(cut):
        owners = _by_function(cut, fragments, params)
    elif cut == "leaves":
        owners = _in_order(fragments, len(leaves))
    elif cut == "bytes":
        owners = _by_bytes(fragments, leaves)
    else:
        owners = _by_layers(fragments, leaves, _stacking.counts(layered, params))
    return form.unflatten([_select_rows(owner == number) for owner in owners])


def _select_rows(is_own: np.ndarray) -> bool | slice:
    """The fragment's rows of a leaf."""
    if is_own.all() or not is_own.any():
        return bool(is_own.all())
    # All three cuts choose evenly spaced rows, which a slice can express.
    rows = np.flatnonzero(is_own)
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    return slice(int(rows[0]), int(rows[-1]) + 1, int(step))


def _in_order(fragments: int, count: int) -> Owners:
    """Consecutive leaves, about as many in each fragment."""
    parts = np.array_split(np.arange(count), fragments)
    owners: Owners = []
    for number, part in enumerate(parts):
        owners += [np.array([number])] * len(part)
    return owners


def _by_function(cut: checks.ByLeaf, fragments: int, params: PyTree) -> Owners:
    """The fragments that a user's function gives."""
    numbers = checks.labels("cut", cut, params)
    for number in numbers:
        if checks.whole("cut: a fragment", number, least=0) >= fragments:
            raise ValueError(
                f"cut: a fragment must be below fragments = {fragments}, got {number}"
            )
    return [np.array([number]) for number in numbers]


def _by_bytes(fragments: int, leaves: list[Any]) -> Owners:
    """Consecutive bytes, about as many in each fragment."""
    total = max(1, sum(map(_count_bytes, leaves)))
    leaf_start = 0  # in bytes
    owners: Owners = []
    for x in leaves:
        rows = max(1, len(x)) if jnp.ndim(x) else 1
        # A row goes where its middle lies, so a cut is off by half a row at most.
        row_bytes = _count_bytes(x) / rows
        middles = leaf_start + (np.arange(rows) + 0.5) * row_bytes  # (rows,)
        owners.append(np.minimum(middles * fragments // total, fragments - 1))
        leaf_start += _count_bytes(x)
    return owners


def _by_layers(fragments: int, leaves: list[Any], counts: list[int]) -> Owners:
    """Layers of stacks in turn; each other leaf goes where the fewest bytes are."""
    owners: Owners = [np.array([])] * len(leaves)
    fragment_bytes = np.zeros(fragments)
    stacks = [i for i, count in enumerate(counts) if count and len(leaves[i])]
    for i in stacks:
        owners[i] = np.arange(len(leaves[i])) % fragments
        layer_bytes = _count_bytes(leaves[i]) / len(leaves[i])
        np.add.at(fragment_bytes, owners[i], layer_bytes)
    other_leaves = [i for i in range(len(leaves)) if i not in stacks]
    for i in sorted(other_leaves, key=lambda i: -_count_bytes(leaves[i])):
        owners[i] = np.argmin(fragment_bytes, keepdims=True)
        fragment_bytes[owners[i]] += _count_bytes(leaves[i])
    return owners


def _count_bytes(x: Any) -> int:
    """The bytes of an array, also if only its shape is given."""
    return math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize
