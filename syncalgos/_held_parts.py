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
        return cls(x.shape, x.dtype, read_pieces(x)).joined

    def read(self, bounds: Bounds) -> np.ndarray:
        """Returns a copy of the array within bounds.

        Raises:
            ValueError: this process does not hold all of it.
        """
        array = np.empty([end - start for start, end in bounds], self.dtype)
        num_missing = array.size
        for piece_bounds, piece in self.pieces.items():
            common_bounds = _intersect(bounds, piece_bounds)
            if any(start >= end for start, end in common_bounds):
                continue
            array_slices = _make_slices(common_bounds, bounds)
            piece_slices = _make_slices(common_bounds, piece_bounds)
            array[array_slices] = piece[piece_slices]
            num_missing -= array[array_slices].size  # pieces do not overlap
        if num_missing:
            raise ValueError(f"this process lacks {num_missing} entries of the array")
        return array

    @property
    def joined(self) -> "np.ndarray | HeldPart":
        """Returns the array if this process holds all of it; else this part."""
        # Pieces do not overlap.
        num_held = sum(piece.size for piece in self.pieces.values())
        if num_held < math.prod(self.shape):
            return self
        return self.read(tuple((0, size) for size in self.shape))


def _intersect(bounds: Bounds, other_bounds: Bounds) -> Bounds:
    """Returns the bounds of what two parts have in common; it may be empty."""
    common_bounds = []
    for (start, end), (other_start, other_end) in zip(
        bounds, other_bounds, strict=True
    ):
        common_bounds.append((max(start, other_start), min(end, other_end)))
    return tuple(common_bounds)


def _make_slices(part_bounds: Bounds, array_bounds: Bounds) -> tuple[slice, ...]:
    """Returns where a part lies in an array that begins at the bounds of a whole."""
    slices = []
    for (start, end), (offset, _) in zip(part_bounds, array_bounds, strict=True):
        slices.append(slice(start - offset, end - offset))
    return tuple(slices)


def index_to_bounds(index: Iterable[slice], shape: Iterable[int]) -> Bounds:
    """Returns the bounds that a shard's index describes."""
    pairs = zip(index, shape, strict=True)
    return tuple(x.indices(size)[:2] for x, size in pairs)


def read_pieces(x: jax.Array) -> dict[Bounds, np.ndarray]:
    """Returns the pieces of an array that this process holds, without a copy on CPU."""
    pieces = {}
    for shard in x.addressable_shards:
        bounds = index_to_bounds(shard.index, x.shape)
        if bounds not in pieces:  # several devices may hold the same piece
            pieces[bounds] = np.asarray(shard.data)
    return pieces
