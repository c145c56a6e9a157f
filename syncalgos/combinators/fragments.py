"""Cuts a model into fragments, which are sent one after the other."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.reducers import stacking
from syncalgos.reducers.stacking import Stacked

CUTS = ("leaves", "bytes", "layers")

Cut = str | Callable[[PyTree], PyTree]
"""One of CUTS, or params -> the number of each leaf's fragment, from 0: a tree like
params, or one for whole subtrees."""

Owners = list[np.ndarray]
"""For each leaf the fragments of its rows along the first axis; one alone: its own."""


def check(cut: Cut) -> Cut:
    """Returns what says how to cut, or raises a ValueError."""
    return cut if callable(cut) else checks.one_of("cut", cut, CUTS)


def mask(
    number: int, fragments: int, cut: Cut, stacked: Stacked, params: PyTree
) -> PyTree:
    """Returns a tree of what a fragment has of each leaf: True, False, or a slice.

    Args:
        number: of the fragment, from 0.
        fragments: how many there are.
        cut: leaves: as many consecutive leaves in each as can be. bytes: as many
            consecutive bytes, for which a leaf may be cut between rows of its first
            axis. layers: layer l of leaves that are stacked is of fragment l modulo
            `fragments`, and other leaves, the largest first, go where least is.
        stacked: which leaves hold several layers.
        params: the model.

    Raises:
        ValueError: a function that returns no numbers of fragments.
    """
    leaves, form = jax.tree.flatten(params)
    if callable(cut):
        owners = _by_function(cut, fragments, params)
    elif cut == "leaves":
        owners = _in_order(fragments, len(leaves))
    elif cut == "bytes":
        owners = _by_bytes(fragments, leaves)
    else:
        owners = _by_layers(fragments, leaves, stacking.counts(stacked, params))
    return form.unflatten([_part(rows == number) for rows in owners])


def _part(mine: np.ndarray) -> bool | slice:
    """The rows that are a fragment's, which are evenly apart."""
    if mine.all() or not mine.any():
        return bool(mine.all())
    rows = np.flatnonzero(mine)
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    return slice(int(rows[0]), int(rows[-1]) + 1, int(step))


def _in_order(fragments: int, count: int) -> Owners:
    parts = np.array_split(np.arange(count), fragments)
    return [np.array([f]) for f, part in enumerate(parts) for _ in part]


def _by_function(
    cut: Callable[[PyTree], PyTree], fragments: int, params: PyTree
) -> Owners:
    numbers = checks.labels("cut", cut, params)
    for number in numbers:
        if checks.whole("cut: a fragment", number, least=0) >= fragments:
            raise ValueError(
                f"cut: a fragment must be below fragments = {fragments}, got {number}"
            )
    return [np.array([number]) for number in numbers]


def _by_bytes(fragments: int, leaves: list[Any]) -> Owners:
    total, before, owners = max(1, sum(map(_bytes, leaves))), 0, []
    for x in leaves:
        rows = max(1, len(x)) if jnp.ndim(x) else 1
        middles = before + (np.arange(rows) + 0.5) * (_bytes(x) / rows)
        owners.append(np.minimum(middles * fragments // total, fragments - 1))
        before += _bytes(x)
    return owners


def _by_layers(fragments: int, leaves: list[Any], counts: list[int]) -> Owners:
    owners: Owners = [np.array([])] * len(leaves)
    load = np.zeros(fragments)
    cut = [i for i, count in enumerate(counts) if count and len(leaves[i])]
    for i in cut:
        owners[i] = np.arange(len(leaves[i])) % fragments
        np.add.at(load, owners[i], _bytes(leaves[i]) / len(leaves[i]))
    rest = [i for i in range(len(leaves)) if i not in cut]
    for i in sorted(rest, key=lambda i: -_bytes(leaves[i])):
        owners[i] = np.argmin(load, keepdims=True)
        load[owners[i]] += _bytes(leaves[i])
    return owners


def _bytes(x: Any) -> int:
    return math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize
