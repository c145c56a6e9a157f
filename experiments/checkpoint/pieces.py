"""Names for pieces of arrays, for workers that span processes.

Each process names its own pieces. NAME@8,6@0:4,0:6 holds rows 0 to 3, columns 0 to 5,
of an array of shape (8, 6).
"""

import re
from typing import Any

import numpy as np

from syncalgos.held_parts import Bounds, HeldPart

_PIECE = re.compile(r"(.*)@([\d,]+)@([\d:,]+)", re.DOTALL)


def array_name(name: str) -> str:
    """Returns the name of the whole array, given its name or that of a piece."""
    piece = _PIECE.fullmatch(name)
    return piece[1] if piece else name


def named(name: str, x: np.ndarray | HeldPart) -> dict[str, np.ndarray]:
    """Names an array, or its pieces."""
    if not isinstance(x, HeldPart):
        return {name: np.asarray(x)}
    shape = ",".join(map(str, x.shape))

    def text(bounds: Bounds) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in bounds)

    return {f"{name}@{shape}@{text(own)}": piece for own, piece in x.pieces.items()}


def joined(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Joins pieces by name; an array that lacks pieces becomes a `HeldPart`."""
    found: dict[str, Any] = {}
    parts: dict[str, tuple[tuple[int, ...], Any, dict[Bounds, np.ndarray]]] = {}
    for name, x in arrays.items():
        if (piece := _PIECE.fullmatch(name)) is None:
            found[name] = x
            continue
        shape = tuple(map(int, piece[2].split(",")))
        pairs = (pair.split(":") for pair in piece[3].split(","))
        bounds = tuple((int(start), int(stop)) for start, stop in pairs)
        parts.setdefault(piece[1], (shape, x.dtype, {}))[2][bounds] = x
    return {**found, **{name: HeldPart(*part).joined for name, part in parts.items()}}
