"""The part of an array that one of several processes holds on its host."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Bounds = tuple[tuple[int, int], ...]  # for each axis, the first index and the end


@dataclass(frozen=True)
class HeldPart:
    """The pieces of an array in this process; jax.tree.map treats it as a leaf.

    `DataParallel.to_host` returns it for an array of a worker that spans processes.

    Attributes:
        shape: the shape of the whole array.
        dtype: the dtype of the array.
        pieces: the pieces by their bounds: for each axis, the first index and the end.

    Example:
        >>> import numpy as np
        >>> from syncalgos import HeldPart
        >>> half = np.ones((2, 3), np.float32)
        >>> part = HeldPart((4, 3), half.dtype, {((2, 4), (0, 3)): half})
        >>> part.read(((3, 4), (0, 2)))
        array([[1., 1.]], dtype=float32)
    """

    shape: tuple[int, ...]
    dtype: Any
    pieces: Mapping[Bounds, np.ndarray]

    @classmethod
    def of(cls, x: jax.Array) -> "np.ndarray | HeldPart":
        """Returns the whole array if this process holds it, otherwise its part."""
        if x.is_fully_addressable:
            return np.asarray(x)
        return cls(x.shape, x.dtype, pieces_of(x)).joined

    def read(self, bounds: Bounds) -> np.ndarray:
        """Returns a copy of the array within bounds.

        Raises:
            ValueError: this process does not hold all of it.
        """
        found = np.empty([stop - start for start, stop in bounds], self.dtype)
        missing = found.size
        for where, piece in self.pieces.items():
            pairs = zip(bounds, where, strict=True)
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]
            if any(start >= stop for start, stop in common):
                continue
            into, out = _slices(common, bounds), _slices(common, where)
            found[into] = piece[out]
            missing -= found[into].size  # pieces do not overlap
        if missing:
            raise ValueError(f"this process lacks {missing} entries of the array")
        return found

    @property
    def joined(self) -> "np.ndarray | HeldPart":
        """Returns the array if this process holds all of it; else this part."""
        # Pieces do not overlap.
        whole = sum(x.size for x in self.pieces.values()) == math.prod(self.shape)
        return self.read(tuple((0, size) for size in self.shape)) if whole else self


def _slices(part: Iterable[tuple[int, int]], whole: Bounds) -> tuple[slice, ...]:
    """Returns where a part lies in an array that begins at the bounds of a whole."""
    pairs = zip(part, whole, strict=True)
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in pairs)


def bounds_of(index: Iterable[slice], shape: Iterable[int]) -> Bounds:
    """Returns the bounds that a shard's index describes."""
    pairs = zip(index, shape, strict=True)
    return tuple(x.indices(size)[:2] for x, size in pairs)


def pieces_of(x: jax.Array) -> dict[Bounds, np.ndarray]:
    """Returns the pieces of an array that this process holds, without a copy on CPU."""
    pieces = {}
    for shard in x.addressable_shards:
        bounds = bounds_of(shard.index, x.shape)
        if bounds not in pieces:  # several devices may hold the same piece
            pieces[bounds] = np.asarray(shard.data)
    return pieces
