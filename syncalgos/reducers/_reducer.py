"""The type of reducers, optax GradientTransformations, and how they map over leaves."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos._calls import Call, written
from syncalgos._keys import uniform
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._shares import (
    is_left_out,
    weigh_in_reducer,
    weighing_in_reducers,
)
from syncalgos.reducers import _stacking
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import require_same

Transformation = optax.GradientTransformation

# Optax tells the step only to transformations of its own type, a tuple of functions.
_OfOptax = optax.GradientTransformationExtraArgs
# optax does not say that it is typed (PEP 561). A checker that does not read its source
# then knows at least this of the class, and so all of a Reducer's own attributes.
assert issubclass(_OfOptax, tuple)


@dataclasses.dataclass(frozen=True, repr=False)
class Reducer(_OfOptax):
    """An optax transformation that combines the workers' trees into one.

    Its update takes a keyword `step`, the local step, which random reducers need.

    Attributes:
        combine: (updates, state, step) -> (combined, sent, state). `combined` is
            identical on all workers; `sent` is this worker's own updates as the others
            decode them, so that updates - sent is what is lost. `combined` is the mean
            of all `sent`, rounded once more for `cast`, `quantized` and `low_bit`; for
            votes it is the majority, for robust reducers their estimate.
        init: params -> state; default: an empty state.
        mean_over: the axis of a plain mean; None for any other reducer.
        takes_feedback: whether `error_feedback` may be around it. Values that a robust
            reducer leaves out are not a loss to make up for; `low_bit` and `ef21` have
            their own feedback.
        calls_late: the number of calls after which a result arrives; see `late`.
        origin: the factory's call and its result; None for a reducer made by hand.
    """

    combine: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]]
    # It hides the tuple's own.
    init: optax.TransformInitFn = optax.init_empty_state  # type: ignore[assignment]
    mean_over: Axis | None = None
    takes_feedback: bool = True
    calls_late: int = 0
    origin: "Origin | None" = None

    def __new__(
        cls,
        combine: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]],
        init: optax.TransformInitFn = optax.init_empty_state,
        *args: Any,
        **kwargs: Any,
    ) -> "Reducer":
        def update(
            updates: PyTree,
            state: PyTree,
            params: PyTree = None,
            *,
            step: Any = None,
            **_: Any,
        ) -> tuple[PyTree, PyTree]:
            if is_left_out(updates):
                return jax.tree.map(jnp.zeros_like, updates), state
            updates = weigh_in_reducer(updates)
            with weighing_in_reducers(False):  # those that it calls get weighted ones
                combined, _, state = call_combine(combine, updates, state, step)
            return combined, state

        return super().__new__(cls, init, update)

    _replace = dataclasses.replace  # type: ignore[assignment]  # of all fields

    def with_call(self, call: Call) -> "Reducer":
        """Returns the reducer with the call of its factory, as `factory` does.

        Raises:
            ValueError: the factory has no argument `axis`, by which a strategy binds
                the reducer to its own axis.
        """
        if "axis" not in inspect.signature(call.function).parameters:
            raise ValueError(
                f"{call.function.__name__}: a factory of reducers must have the "
                "argument axis, the axis of the strategy around the reducer: add "
                "axis=WORKERS, and pass it to the collectives"
            )
        return dataclasses.replace(self, origin=Origin(call, self))

    def over(self, axis: Axis) -> "Reducer":
        """Binds the reducer to the axis of a strategy, unless it was made with one.

        Args:
            axis: the mapped axis or axes over which the workers lie.
        """
        if self.origin is None or "axis" in self.origin.call.given_arguments:
            return self
        bound = self.origin.call.repeat(axis=axis)
        return dataclasses.replace(bound, **self._changes)

    def __repr__(self) -> str:
        if self.call is not None:
            return repr(self.call)
        return written("Reducer", (), vars(self))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is None:
            fields = self.combine, self.init, self.mean_over, self.takes_feedback
            return Reducer, fields
        # Functions inside a function have no name to be pickled by; the call has.
        return _repeat, (self.origin.call, self._changes)

    @property
    def call(self) -> Call | None:
        """The call that made the reducer; None if a field was changed since."""
        if self.origin is None or self._changes:
            return None
        return self.origin.call

    @property
    def _changes(self) -> dict[str, Any]:
        """The fields that were changed since a factory made the reducer."""
        if self.origin is None:
            return {}
        originals = vars(self.origin.reducer) | {"origin": self.origin}
        fields = vars(self).items()
        return {name: value for name, value in fields if value is not originals[name]}


class Origin(NamedTuple):
    """Where a reducer comes from.

    Attributes:
        call: the call of its factory.
        reducer: what the factory returned.
    """

    call: Call
    reducer: Reducer


def _repeat(call: Call, changes: dict[str, Any]) -> Reducer:
    """Makes a reducer again from its call and the fields that were changed since."""
    return dataclasses.replace(call.repeat(), **changes)


def call_combine(
    combine: Callable, updates: PyTree, state: PyTree, step: Any
) -> tuple[PyTree, PyTree, PyTree]:
    """Calls the `combine` of a Reducer, whose trees must have the form of updates.

    Raises:
        ValueError: a result has another form; the first differing leaf is named.
    """
    result = combine(updates, state, step)
    if type(result) is not tuple or len(result) != 3:
        raise ValueError(
            "combine of a Reducer must return (combined, sent, state), got "
            f"{_name_types(result)}"
        )
    combined, sent_updates, new_state = result
    combined = require_same("a reducer", "combined", updates, combined)
    sent_updates = require_same("a reducer", "sent", updates, sent_updates)
    return combined, sent_updates, new_state


def _name_types(result: Any) -> str:
    """The type of a result, with those of its parts if it is a tuple or a list."""
    if not isinstance(result, tuple | list):
        return type(result).__name__
    return f"({', '.join(type(x).__name__ for x in result)})"


class Draws(NamedTuple):
    """Uniform numbers that a reducer draws for each leaf.

    Attributes:
        size: the shape of a leaf -> how many it needs.
        key: step -> the key that all leaves' numbers are drawn with.
    """

    size: Callable[[jax.ShapeDtypeStruct], int]
    key: Callable[[Any], jax.Array]


def leafwise(
    combine: Callable[..., tuple[Any, Any]],
    layered: Layered = 0,
    draws: Draws | None = None,
    takes_feedback: bool = True,
) -> Reducer:
    """A reducer without state that combines leaf by leaf.

    Args:
        combine: leaf -> (combined, sent), or (leaf, its draws) -> the same, in any
            dtype. Leaves that are empty or not floats are kept.
        layered: which leaves hold several layers, each combined as a leaf (see
            `Layered`).
        draws: the numbers to draw; None means none.
        takes_feedback: whether `error_feedback` may be around it.
    """

    def combine_leaf(
        x: jax.Array, pieces: _stacking.Pieces, *leaf_draws: jax.Array
    ) -> Sequence[jax.Array]:
        if not is_sent(x):
            return x, x
        pair = pieces.map(combine)(pieces.split(x), *leaf_draws)
        check_count("leafwise: combine", 2, pair)
        return [pieces.join(y).astype(x.dtype) for y in pair]

    def combine_tree(
        updates: PyTree, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        updates = jax.tree.map(jnp.asarray, updates)
        pieces = _stacking.pieces_like(layered, updates)
        trees = [updates, pieces]
        if draws is not None:
            trees.append(_draw_numbers(draws, updates, pieces, step))
        combined, sent_updates = over_leaves(combine_leaf, 2, *trees)
        return combined, sent_updates, state

    return Reducer(combine_tree, takes_feedback=takes_feedback)


def _draw_numbers(draws: Draws, updates: PyTree, pieces: PyTree, step: Any) -> PyTree:
    """Draws each leaf's numbers; none for a leaf that is not sent."""
    check_step(step)
    leaves, form = jax.tree.flatten(updates)
    leaf_pieces = form.flatten_up_to(pieces)

    def find_shape(x: jax.Array, pieces: _stacking.Pieces) -> tuple[int, ...]:
        leading_axes, piece_shape = pieces.leading(x.shape)
        count = 0
        if is_sent(x):
            count = draws.size(jax.ShapeDtypeStruct(piece_shape, x.dtype))
        return (*leading_axes, count)

    shapes = [*map(find_shape, leaves, leaf_pieces)]
    numbers_by_leaf: list[Any] = [None] * len(leaves)
    leaves_by_axes: dict[Any, list[int]] = {}
    for i, pieces_of_leaf in enumerate(leaf_pieces):
        cut = pieces_of_leaf.cut
        leaves_by_axes.setdefault(cut and cut.axes, []).append(i)
    # In one call for all leaves that are cut alike: each takes 0.3 s to compile. Each
    # device draws the numbers of its shards, and sends none of them to another.
    for group_number, group in enumerate(leaves_by_axes.values()):
        cut = leaf_pieces[group[0]].cut
        shards = 1 if cut is None else cut.shards
        sizes = [math.prod(shapes[i]) // shards for i in group]
        key = draws.key(step)
        if group_number:
            key = jax.random.fold_in(key, group_number)
        if cut is None:
            numbers = uniform(key, sum(sizes))[None]
        else:
            numbers = cut.placed(jax.random.uniform(key, (shards, sum(sizes))))
        # (shards, numbers of the group) -> (shards, numbers of a leaf) each
        parts = jnp.split(numbers, np.cumsum(sizes)[:-1], axis=1)
        for i, part in zip(group, parts, strict=True):
            numbers_by_leaf[i] = part.reshape(shapes[i])
    return form.unflatten(numbers_by_leaf)


def check_step(step: Any) -> None:
    """Raises a ValueError if a reducer needs the step but does not get it."""
    if step is None:
        raise ValueError(
            "this reducer needs the local step: call its update with step=…, as "
            "reduce_with, average and outer_step do"
        )


def is_sent(x: jax.Array) -> bool:
    """Whether a leaf has anything to combine: it has entries, and they are floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 0


def over_leaves(function: Callable, count: int, *trees: PyTree) -> tuple[PyTree, ...]:
    """Maps a function of leaves that returns `count` values; returns as many trees.

    Args:
        function: one leaf of each tree -> values.
        count: how many values.
        trees: trees with the structure of the first. If a tree has a subtree, such as a
            tuple, in place of a leaf of the first, the subtree is passed whole.
    """
    leaves, form = jax.tree.flatten(trees[0])
    other_leaves = [form.flatten_up_to(tree) for tree in trees[1:]]
    results = [function(*xs) for xs in zip(leaves, *other_leaves, strict=True)]
    for result in results:
        check_count("over_leaves: function", count, result)
    new_trees = []
    for i in range(count):
        new_leaves = [result[i] for result in results]
        new_trees.append(form.unflatten(new_leaves))
    return tuple(new_trees)


def check_count(label: str, count: int, result: Any) -> None:
    """Refuses a result that is not a tuple or list of so many values.

    An array is refused, too: its rows would be taken for the values.
    """
    if not isinstance(result, tuple | list) or len(result) != count:
        raise ValueError(
            f"{label} must return {count} values for a leaf, got {_name_types(result)}"
        )


def count_share(density: float, size: int) -> int:
    """The number of entries in a share of `size`, rounded up: 7 of 100 at 0.07."""
    # In floats 0.07 · 100 is above 7.
    return math.ceil(density * size * (1 - 1e-12))


def check_optimizer(where: str, optimizer: Any) -> None:
    """Raises a ValueError unless the argument is an optax optimizer."""
    if not isinstance(optimizer, Transformation):
        name = getattr(optimizer, "__name__", None)
        hint = ""
        if callable(optimizer) and name:
            hint = f" (call it: {name}(…))"
        if name == "schedule":  # each schedule of optax has this name
            hint = " (a schedule is the learning rate of one: optax.sgd(schedule))"
        if isinstance(optimizer, str):
            hint = f" (an optimizer is an object: optax.{optimizer}(…))"
        if hasattr(optimizer, "gradient_transformation"):
            hint = " (pass its .gradient_transformation())"
        if isinstance(getattr(optimizer, "tx", None), Transformation):  # nnx.Optimizer
            hint = " (pass its .tx)"
        raise ValueError(
            f"{where} must be an optax optimizer, got {checks.shown(optimizer)}{hint}"
        )
