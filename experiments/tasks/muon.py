"""Which weights of the models here Muon orthogonalises, and along which axes."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from syncalgos.collectives import PyTree

MATRICES = {"w", "recurrent"}
HEADS = {"dense", "output"}

DENSE = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
CONVOLUTION = MuonDimensionNumbers(reduction_axis=(-4, -3, -2), output_axis=-1)


def dimension_numbers(params: PyTree) -> PyTree:
    """Muon's dimension numbers for params of a model in models/.

    Muon takes the hidden matrices, of which leading axes stack layers: each layer is
    orthogonalised by itself. By the number of its axes alone optax would take stacked
    biases for matrices, and stacked matrices for none.

    Returns:
        A tree like params: the axes of each hidden matrix; None for what Adam takes:
        biases, norms, embeddings, and the layer that gives the outputs.
    """
    last = len(params) - 1 if isinstance(params, list) else None

    def of(path, x):
        first, name = _name(path[0]), _name(path[-1])
        if name not in MATRICES or first in HEADS or first == last:
            return None
        return CONVOLUTION if x.ndim >= 4 else DENSE

    return jax.tree_util.tree_map_with_path(of, params)


def _name(key: Any) -> Any:
    """What a key of a path says: a name, or a number in a list."""
    return getattr(key, "key", getattr(key, "idx", None))
