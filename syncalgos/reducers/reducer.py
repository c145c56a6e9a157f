"""What a reducer is: an optax GradientTransformation over the workers."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos.collectives import Axis, PyTree
from syncalgos.reducers import stacking
from syncalgos.reducers.stacking import Stacked

Transformation = optax.GradientTransformation


class Reducer(optax.GradientTransformationExtraArgs):
    """An optax transformation that combines the workers' trees into one.

    Its update takes a keyword `step`, the local step, which those that draw need.

    Attributes:
        combine: (updates, state, step) -> (combined, sent, state). `combined` is the
            same on all workers; `sent` is this worker's own updates as the others
            decode them, so that updates - sent is what was lost. `combined` is the
            mean of all `sent`; that rounded once more of `cast`, `quantized` and
            `low_bit`; of votes, the majority; and what the robust ones say.
        mean_over: the axis over which it is the plain mean; None for any other.
        takes_feedback: whether `error_feedback` may be around it. What a robust reducer
            leaves out of its result is no loss to make up for; others have their own.
    """

    combine: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]]
    mean_over: Axis | None = None
    takes_feedback: bool = True

    def __new__(
        cls,
        combine: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]],
        init: optax.TransformInitFn = lambda params: optax.EmptyState(),
    ) -> "Reducer":
        def update(updates, state, params=None, *, step=None, **_):
            combined, _, state = combine(updates, state, step)
            return combined, state

        self = super().__new__(cls, init, update)
        self.combine = combine
        return self


def leafwise(
    combine: Callable[[jax.Array], tuple[Any, Any]], stacked: Stacked = 0
) -> Reducer:
    """A reducer without state or draws that combines leaf by leaf.

    Args:
        combine: leaf -> (combined, sent), in any dtype. Leaves that are empty or no
            floats are kept.
        stacked: which leaves hold several layers (see `Stacked`), each of which is
            combined as a leaf is.
    """

    def tree(updates, state, step):
        counts = stacking.counts_like(stacked, updates)
        return *_each_leaf(updates, counts, combine, lambda x: (x,)), state

    return Reducer(tree)


def drawing(
    combine: Callable[[jax.Array, jax.Array], tuple[Any, Any]],
    draws: Callable[[jax.Array], int],
    key: Callable[[Any], jax.Array],
    stacked: Stacked = 0,
) -> Reducer:
    """`leafwise`, with numbers drawn for each leaf.

    Args:
        combine: (leaf, its draws) -> (combined, sent).
        draws: how many uniform numbers a leaf needs.
        key: step -> the key that they are drawn with.
        stacked: as in `leafwise`.
    """

    def needed(x, count):
        return (*x.shape[:count], draws(x[(0,) * count]))

    def tree(updates, state, step):
        check_step(step)
        counts = stacking.counts_like(stacked, updates)
        pairs = zip(*map(jax.tree.leaves, (updates, counts)), strict=True)
        leaves = [(jnp.asarray(x), count) for x, count in pairs]
        shapes = [needed(x, count) for x, count in leaves if is_sent(x)]
        # Drawn in one: every call of the generator takes long to compile.
        drawn = jax.random.uniform(key(step), (sum(map(math.prod, shapes)),))
        parts = jnp.split(drawn, np.cumsum([*map(math.prod, shapes)])[:-1])
        of_leaf = iter([x.reshape(s) for x, s in zip(parts, shapes, strict=True)])
        with_draws = _each_leaf(updates, counts, combine, lambda x: (x, next(of_leaf)))
        return *with_draws, state

    return Reducer(tree)


def check_step(step: Any) -> None:
    """Raises a ValueError where a reducer that needs the step is not told it."""
    if step is None:
        raise ValueError(
            "this reducer goes by the local step: update it with step=…, as "
            "reduce_with, average and outer_step do"
        )


def is_sent(x: jax.Array) -> bool:
    """Whether a leaf has anything to combine: entries, and of floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 0


def _each_leaf(
    updates: PyTree,
    counts: PyTree,
    combine: Callable[..., tuple[Any, Any]],
    inputs: Callable[[jax.Array], tuple[jax.Array, ...]],
) -> tuple[PyTree, PyTree]:
    def leaf(x, count):
        x, of_layers = jnp.asarray(x), stacking.layerwise(combine, count)
        pair = of_layers(*inputs(x)) if is_sent(x) else (x, x)
        return [y.astype(x.dtype) for y in pair]

    combined, sent = over_leaves(leaf, 2, updates, counts)
    return combined, sent


def over_leaves(function: Callable, count: int, *trees: PyTree) -> tuple[PyTree, ...]:
    """Maps a function of leaves that returns so many: a tree of each of them."""
    leaves, form = jax.tree.flatten(trees[0])
    rest = (form.flatten_up_to(tree) for tree in trees[1:])
    results = [function(*each) for each in zip(leaves, *rest, strict=True)]
    return tuple(form.unflatten([r[i] for r in results]) for i in range(count))


def share_of(density: float, size: int) -> int:
    """How many of so many entries that is, rounded up: 7 of 100 at 0.07."""
    return math.ceil(density * size * (1 - 1e-12))  # 0.07 · 100 is above 7 in floats


def draw_entries(draws: jax.Array, density: float) -> jax.Array:
    """Indices into a leaf: a share of them, rounded up, none twice."""
    _, drawn = jax.lax.top_k(draws, share_of(density, draws.size))
    return drawn


def check_optimizer(where: str, optimizer: Any) -> None:
    """Raises a ValueError unless it is given an optax optimizer."""
    if not isinstance(optimizer, Transformation):
        named = getattr(optimizer, "__name__", None)
        hint = f" (call it: {named}(…))" if callable(optimizer) and named else ""
        if hasattr(optimizer, "gradient_transformation"):
            hint = " (pass its .gradient_transformation())"
        raise ValueError(f"{where} must be an optax optimizer, got {optimizer!r}{hint}")
