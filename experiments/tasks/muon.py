"""Muon's dimension numbers for the models in models/."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from syncalgos.collectives import PyTree

MATRICES = {"w", "recurrent"}
# Output layers, which Muon leaves to Adam, like embeddings and biases.
HEADS = {"dense", "output"}

DENSE = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
CONVOLUTION = MuonDimensionNumbers(reduction_axis=(-4, -3, -2), output_axis=-1)


def dimension_numbers(params: PyTree) -> PyTree:
    """Returns Muon's dimension numbers for params of a model in models/.

    Muon orthogonalises hidden matrices; in stacked ones, each layer separately.

    Returns:
        A tree like params: the axes of each hidden matrix; None for the leaves that
        Adam updates: biases, norms, embeddings and the output layer.
    """
    # optax only counts axes: it would treat stacked biases as matrices, and not treat
    # stacked matrices as matrices.
    last = len(params) - 1 if isinstance(params, list) else None

    def of(path, x):
        first, name = _name(path[0]), _name(path[-1])
        if name not in MATRICES or first in HEADS or first == last:
            return None
        return CONVOLUTION if x.ndim >= 4 else DENSE

    return jax.tree_util.tree_map_with_path(of, params)


def _name(key: Any) -> Any:
    """The name, or the number in a list, of a path's key."""
    return getattr(key, "key", getattr(key, "idx", None))
