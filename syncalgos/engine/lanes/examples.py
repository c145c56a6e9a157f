"""Finds out from two traces whether a program computes each example separately.

The two traces are of one program, for a small and a large batch. The examples lie along
the dimensions that differ between the traces. Each equation is checked by itself. It
may compute entry by entry and sum along other dimensions. It may not combine several
examples or put one example in the place of another.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from jax.extend import core

# Primitives whose results have their inputs' shapes but mix entries along a dimension.
_RUNNING = "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"
_ALONG = {"sort": "dimension", "rev": "dimensions", **dict.fromkeys(_RUNNING, "axis")}
_ALONG |= {"split": "axis", "top_k": "axis"}
_UNKNOWN = ("callback", "ffi_call", "custom_vjp", "linear_call", "pallas", "fft", "pad")
_UNKNOWN += ("dynamic_slice", "dynamic_update_slice")
# Primitives that run the jaxprs they hold. Others, such as scatter-add, only carry one.
_CALLS = ("jit", "call", "checkpoint", "remat2", "scan", "while", "cond")
_Pair = tuple[Any, Any]
_Merge = tuple[int, int]


def are_apart(equations: Iterable[_Pair], times: int) -> bool:
    """Whether equations, and those inside them, provably keep examples apart.

    They do if each result made from examples has `times` as many entries for the large
    batch. (A sum over a batch has equally many for any batch; a product of two batches
    has more.) No equation may move entries along the examples or have unknown effects.

    A result that does not depend on the batch may grow with it only by repetition:
    arange(n) depends on an example's position. The check misses many losses that keep
    examples apart, such as x[arange(n), labels]; these only train more slowly.

    Args:
        equations: pairs of each equation for the small and the large batch, in the
            order of the program.
        times: the size of the large batch divided by that of the small one.
    """
    # A program may merge (frames, batch) to (frames * batch) for a while and split it
    # again. Nothing else may be split: n as (2, n / 2) pairs distant examples.
    merged: set[_Merge | None] = {None}
    for few, many in _with_inner(equations):
        if not _is_apart(few, many, times, merged):
            return False
        if few.primitive.name == "reshape":
            merged.add(_merge(few, many))
    return True


def _with_inner(pairs: Iterable[_Pair]) -> Iterator[_Pair]:
    """Yields the equations and, after each, those of the jaxprs that it holds."""
    for few, many in pairs:
        yield few, many
        inner = (core.jaxprs_in_params(x.params) for x in (few, many))
        for small, large in zip(*inner, strict=True):
            yield from _with_inner(zip(small.eqns, large.eqns, strict=True))


def _is_apart(few: Any, many: Any, times: int, merged: set[_Merge | None]) -> bool:
    """Whether one equation keeps examples apart.

    Args:
        few: the equation for the small batch.
        many: the equation for the large batch.
        times: as in `are_apart`.
        merged: descriptions of the merges so far, which may be split again; and None.
    """
    # A batch of one example may lose its dimension and need fewer equations.
    if _structure(few) != _structure(many):
        return False
    name = few.primitive.name
    if name.endswith(_CALLS) and not any(x in name for x in _UNKNOWN):
        # A loop over the examples has another length for another batch.
        return few.params.get("length") == many.params.get("length")
    shapes = [*zip(_shapes(few.invars), _shapes(many.invars), strict=True)]
    grown = [(i, _grown(*pair)) for i, pair in enumerate(shapes) if pair[0] != pair[1]]
    made = [*zip(_shapes(few.outvars), _shapes(many.outvars), strict=True)]
    if not grown:
        return _repeats(many, set().union(*(_grown(*pair) for pair in made)))
    if any(isinstance(many.invars[i], core.Literal) for i, _ in grown):
        return False
    if not all(prod(large) == times * prod(small) for small, large in made):
        return False
    if any(x in name for x in _UNKNOWN):
        return False
    if name == "reshape":
        return _merge(few, many, inverse=True) in merged
    return all(_stays(few, many, i, dims) for i, dims in grown)


def _repeats(equation: Any, grown: set[int]) -> bool:
    """Whether a result without the batch is constant along its growing dimensions."""
    if equation.primitive.name == "iota":
        return equation.params["dimension"] not in grown
    return not grown or equation.primitive.name == "broadcast_in_dim"


def _stays(few: Any, many: Any, operand: int, grown: set[int]) -> bool:
    """Whether an equation moves nothing along the growing dimensions of an input.

    Args:
        few: the equation for the small batch.
        many: the equation for the large batch.
        operand: the index of the input.
        grown: the input's dimensions that grow with the batch.

    Returns:
        True also for equations that need no check: those that compute entry by entry,
        and sums, whose results do not grow along summed dimensions.
    """
    name, params = few.primitive.name, few.params
    if name in _ALONG:
        along = params[_ALONG[name]]
        return not grown & ({*along} if isinstance(along, Sequence) else {along})
    if name == "slice":
        starts, limits = many.params["start_indices"], many.params["limit_indices"]
        shape, strides = many.invars[0].aval.shape, many.params["strides"]
        whole = (starts[d] == 0 and limits[d] == shape[d] for d in grown)
        return all(whole) and (strides is None or all(strides[d] == 1 for d in grown))
    if name == "dot_general":
        return not grown & {*params["dimension_numbers"][0][operand]}
    if name.startswith("scatter") and operand == 0:
        return not grown & {*params["dimension_numbers"].scatter_dims_to_operand_dims}
    if name == "gather" and operand == 0:  # x[order] reorders examples
        return not grown & {*params["dimension_numbers"].start_index_map}
    if name == "conv_general_dilated":
        return operand == 0 and grown == {params["dimension_numbers"].lhs_spec[0]}
    if name.startswith("reduce_window"):
        return all(params["window_dimensions"][d] == 1 for d in grown)
    return True


def _merge(few: Any, many: Any, inverse: bool = False) -> _Merge | None:
    """Describes a reshape that merges the growing dimension with others before it.

    Returns:
        The size of the merged dimension and the number of entries before the examples
        in it; None if nothing is merged. With `inverse`, describes the reshape back.
    """
    sides = [(few.invars[0], many.invars[0]), (few.outvars[0], many.outvars[0])]
    shapes = [(x.aval.shape, y.aval.shape) for x, y in sides]
    apart, together = reversed(shapes) if inverse else shapes
    dims = [min(_grown(*x), default=None) for x in (apart, together)]
    if None in dims:
        return None
    before = prod(apart[0][: dims[0]]) // max(1, prod(together[0][: dims[1]]))
    return (together[0][dims[1]], before) if before > 1 else None


def _structure(equation: Any) -> tuple[list[int], list[int], list[Any]]:
    """Returns the ranks of an equation's inputs and results, and other structure."""
    inner = core.jaxprs_in_params(equation.params)
    held = [(len(x.eqns), _shapes(x.constvars)) for x in inner]
    inputs, results = _shapes(equation.invars), _shapes(equation.outvars)
    return [*map(len, inputs)], [*map(len, results)], held


def _grown(small: Sequence[int], large: Sequence[int]) -> set[int]:
    """The dimensions in which two shapes differ."""
    return {d for d, (n, m) in enumerate(zip(small, large, strict=True)) if n != m}


def _shapes(values: Sequence[Any]) -> list[Sequence[int]]:
    """The shapes of an equation's inputs or results."""
    return [x.aval.shape for x in values]
