"""Arrays of the host that a caller gives, and may change afterwards."""

from typing import Any

import jax
import numpy as np

from syncalgos._held_parts import HeldPart
from syncalgos.collectives import PyTree


def copy_host_arrays(tree_name: str, tree: PyTree) -> PyTree:
    """Returns a tree with copies of its NumPy arrays, as they are at this call.

    Raises:
        ValueError: a leaf is an array of another library, or a whole number does not
            fit into the 32 bits that jax gives it. The message names the leaf.
    """

    def copy_leaf(path: Any, x: Any) -> Any:
        name = tree_name + jax.tree_util.keystr(path)
        check_ours(name, x)
        if not isinstance(x, np.ndarray | np.generic):
            return x
        if x.dtype.kind in "iu" and x.dtype.itemsize == 8 and x.size:
            for number in (x.min(), x.max()):
                check_fits(name, int(number), x.dtype)
        # jax may keep the array's memory and read it after the call has returned, when
        # its owner has written the next batch into it.
        return np.array(x)

    return jax.tree_util.tree_map_with_path(copy_leaf, tree)


def check_ours(name: str, x: Any) -> None:
    """Raises a ValueError for an array of another library, such as a torch.Tensor."""
    ours = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | HeldPart
    if hasattr(x, "shape") and not isinstance(x, ours):
        raise ValueError(
            f"{name} is a {type(x).__module__}.{type(x).__name__}, not an array of "
            "NumPy or jax: use np.asarray(…)"
        )


def check_fits(name: str, number: int, dtype: Any) -> None:
    """Raises a ValueError if jax would cut a whole number of this dtype."""
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    if not limits.min <= number <= limits.max:
        raise ValueError(
            f"{name} holds {number}, which {limits.dtype} cannot hold: use smaller "
            "numbers, or set jax_enable_x64"
        )
