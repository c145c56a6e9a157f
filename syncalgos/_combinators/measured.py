"""Measures how far workers go between two syncs, and how far a sync takes them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos import checks, collectives
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import decided, introspection, participation, rules
from syncalgos._dtypes import widen
from syncalgos.collectives import Axis, PyTree
from syncalgos.reducers import _stacking
from syncalgos.reducers._stacking import Layered
from syncalgos.steps import as_steps
from syncalgos.strategy import Strategy, apply_sync, check_strategy, factory

# Stands for NaN, which jax_debug_nans refuses; no norm or cosine has this value.
NONE = -2.0


class Figures(NamedTuple):
    """The moves of the workers in a round; each field is an array (parts,).

    The first part is the whole model. The others are its leaves, in the order of
    `jax.tree.leaves`, or the layers of those that are layered: see `parts_of`.

    Attributes:
        mean_move: the 2-norm of the mean of the workers' moves, which go from right
            after one sync to right before the next.
        spread: the root mean square over workers of a replica's distance to their mean,
            right before the sync.
        cosine: the mean over pairs of workers of the cosine between their moves; -2 for
            one worker, or if one did not move.
        outer_step: the 2-norm of the mean of the workers' changes from right after one
            sync to right after the next.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import Figures
        >>> Figures(*jnp.zeros((4, 3))).mean_move.shape
        (3,)
    """

    mean_move: jax.Array
    spread: jax.Array
    cosine: jax.Array
    outer_step: jax.Array


class Noted(NamedTuple):
    """The figures of the last measured round.

    Attributes:
        at: the local step at which it ended; -1 before the first one.
        values: its figures, (4, parts) float32; all are -2 before the first one.
    """

    at: jax.Array
    values: jax.Array


class MeasuredState(NamedTuple):
    """State of `measured`.

    Attributes:
        strategy: the state of the measured strategy.
        start: this worker's params right after the last sync.
        noted: the figures of the last measured round.
    """

    strategy: PyTree
    start: PyTree
    noted: Noted

    @property
    def figures(self) -> Figures:
        """The figures of the last measured round; all are -2 before the first one."""
        return Figures(*jnp.moveaxis(self.noted.values, -2, 0))


@factory
def measured(
    strategy: Strategy,
    *,
    by_leaf: bool = True,
    layered: Layered = 0,
    ends: Callable[[Any], Any] | None = None,
    only: Callable[[Any], Any] | None = None,
) -> Strategy:
    """Measures the workers' moves at each sync, and trains as the strategy does.

    In `DataParallel`, the figures of a round are in `metrics["measured"]`, in the row
    of the step that ends it, and other rows are 0: there may be one `measured`. In
    `stacked` and in your own loop, the state's `figures` are those of the last round,
    the same for all workers.

    Args:
        strategy: the strategy.
        by_leaf: whether to measure each leaf, too.
        layered: which leaves hold several layers, each measured by itself (see
            `syncalgos.reducers.Layered`).
        ends: local step -> whether a round ends; by default where the strategy may act.
        only: local step -> whether a round that ends there is measured; None: each is.

    Returns:
        A Strategy. State: the strategy's, a copy of the params, and the figures (a
        `MeasuredState`). Measuring sends params four times in a round, and once more by
        leaf, which `communication` counts. The last bits of params may differ where
        measuring makes XLA fuse a step differently.

    Raises:
        ValueError: the argument is not a Strategy, has `paced` or `palsgd` as a member,
            or holds workers back itself, like `async_diloco`; or `layered` does not
            fit.

    Under `participating`, means are weighted as its sync weighs the workers, and a pair
    counts for the cosine if both take part.

    Changes that a delayed strategy makes within a round count as moves. `paced` and
    `palsgd` change the local step itself: the measurement is put inside, with its ends.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, measured, model_averaging
        >>> def loss(params, batch):
        ...     return (params["w"] * batch).sum(-1).mean()
        >>> strategy = measured(model_averaging(period=2))
        >>> trainer = DataParallel(loss, optax.sgd(1.0), strategy, workers=2)
        >>> state = trainer.init({"w": jnp.zeros(2)})
        >>> batches = jnp.array([[[3.0, 0.0], [0.0, 4.0]]] * 2)  # each worker has one
        >>> state, metrics = trainer.run(state, batches)
        >>> [float(figure[1, 0]) for figure in metrics["measured"]]
        [5.0, 5.0, 0.0, 5.0]
    """
    check_strategy("measured", strategy)
    layered = _stacking.check_layered("measured: layered", layered)
    again = partial(measured, by_leaf=by_leaf, layered=layered, ends=ends, only=only)
    is_moved = rules.KINDS["paced"](strategy) or rules.KINDS["pulled"](strategy)
    if is_moved and introspection.combination(strategy).clock:
        return introspection.rebuilt(strategy, again)  # moves are what it makes of them
    rules.check("measured", strategy)
    axis, acting = introspection.axis_of(strategy), introspection.acting_steps(strategy)
    weights = introspection.rounds(strategy, of_syncs=True)
    # None stands for every step.
    steps = ends or (None if introspection.reduces(strategy) else acting)

    def init(params):
        parts = len(parts_of(params, layered)) if by_leaf else 1
        none = Noted(jnp.int32(-1), jnp.full((len(Figures._fields), parts), NONE, "f"))
        return MeasuredState(strategy.init(params), params, none)

    def sync(replica, state, step):
        # Otherwise XLA might fuse the local step differently, and round differently.
        before, own = lax.optimization_barrier((replica, state.strategy))
        replica, own = lax.optimization_barrier(apply_sync(strategy, before, own, step))
        is_end = jnp.asarray(steps is None or steps(step), bool)
        now = jnp.logical_and(is_end, only is None or only(step))

        def noted():
            moves = before.params, state.start, replica.params
            workers, me = collectives.size(axis), collectives.index(axis)
            share = participation.share_in(weights, step, workers, me)
            figures = compare(*moves, layered, by_leaf, axis, share)
            return Noted(jnp.int32(step), figures)

        note = lax.cond(now, noted, lambda: state.noted)
        start = lax.cond(is_end, lambda: replica.params, lambda: state.start)
        return replica, MeasuredState(own, start, note)

    # The engine runs the strategy in the same form as without the measurement.
    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=introspection.Combination(sync, (strategy,), again),
        center=introspection.inner_center(strategy),
        acts=acting | as_steps(steps),
    )


@suggest_arguments
def parts_of(params: PyTree, layered: Layered = 0) -> list[str]:
    """Names the parts of `Figures`: "all", then leaves by path, and layers by number.

    Args:
        params: the params of one worker, arrays or their shapes.
        layered: as for `measured`.

    Example:
        >>> import numpy as np
        >>> from syncalgos import parts_of
        >>> parts_of({"blocks": np.ones((2, 9))}, {"blocks": 1})
        ['all', 'blocks[0]', 'blocks[1]']
    """
    names = ["all"]
    leaves = jax.tree.leaves_with_path(params)
    for count, (path, x) in zip(_stacking.counts(layered, params), leaves, strict=True):
        layers = np.ndindex(*np.shape(x)[:count]) if count else [()]
        name = checks.leaf_name(path)
        names += [name + "".join(f"[{i}]" for i in at) for at in layers]
    return names


@suggest_arguments
def sync_metrics(state: PyTree, step: Any) -> dict[str, Any]:
    """Returns what a strategy has noted of a step, as `DataParallel.run` reports it.

    Use it in your own loop, right after the sync of a step.

    Args:
        state: the strategy's state; leaves may have leading axes of workers, of which
            the first is taken: all note the same.
        step: the local step, which counts from 0.

    Returns:
        {"decided": whether each `decided` inside decided to sync at this step,
        (decisions,) booleans; "measured": the `Figures` of the round that ended with
        this step, zeros if none did}; {} if nothing inside is decided or measured.

    Raises:
        ValueError: several strategies inside are `measured`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from syncalgos import Replica, average, decided, sync_metrics
        >>> far = lambda replica, state, step: abs(replica.params) > 1
        >>> strategy = decided(average(axis="workers"), far)
        >>> def sync(params):
        ...     state = strategy.init(params)
        ...     _, state = strategy.sync(Replica(params), state, 0)
        ...     return sync_metrics(state, 0)["decided"]
        >>> jax.vmap(sync, axis_name="workers")(jnp.array([0.0, 3.0])).tolist()
        [[True], [True]]
    """
    metrics: dict[str, Any] = decided.noted(state, step)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Noted))
    for at, values in (x for x in nodes if isinstance(x, Noted)):
        if "measured" in metrics:
            raise ValueError(
                "measured: metrics hold one strategy's figures, not two: put measured "
                "around one of them only"
            )
        one = values.reshape(-1, *values.shape[-2:])[0]
        metrics["measured"] = Figures(*jnp.where(jnp.ravel(at)[0] == step, one, 0))
    return metrics


def compare(
    params: PyTree,
    start: PyTree,
    after: PyTree,
    layered: Layered,
    by_leaf: bool,
    axis: Axis,
    share: jax.Array | None = None,
) -> jax.Array:
    """Returns the figures of a round, (4, parts) float32, of the workers that count.

    Args:
        params: this worker's params right before the sync.
        start: its params right after the sync before.
        after: its params right after the sync.
        layered, by_leaf: as for `measured`.
        axis: the mapped axis or axes over which the workers lie.
        share: this worker's share in the means; None: all count alike.
    """
    workers, counts = collectives.size(axis), _stacking.counts(layered, params)
    params, start, after = widen(params), widen(start), widen(after)

    def mean(tree):
        return collectives.mean(tree, axis, share)

    def minus(x, y):
        return jax.tree.map(jnp.subtract, x, y)

    def sums(x, y):
        """Sums products in all, then by leaf or layer."""
        parts = [jnp.ravel(s) for s in _sums(counts, x, y)]
        total = jnp.sum(jnp.array([s.sum() for s in parts]), keepdims=True)
        return jnp.concatenate([total, *parts[: by_leaf * len(parts)]])

    def norm(tree):
        return jnp.sqrt(sums(tree, tree))

    takes = True if share is None else share > 0
    counted = workers if takes is True else _count(takes, axis)

    def cosine(lengths):
        """The cosines of moves that are divided by a length for each leaf."""
        unit = jax.tree.map(jnp.divide, moved, lengths)
        if takes is not True:  # each pair counts alike, whatever the weights
            unit = jax.tree.map(lambda x: jnp.where(takes, x, 0), unit)
        # Each worker's direction times the sum of the others: unlike |Σu|² - N, this
        # loses no digits if directions are orthogonal.
        directions = collectives.mean(unit, axis)
        others = jax.tree.map(lambda m, x: workers * m - x, directions, unit)
        total = collectives.mean(sums(unit, others), axis)
        if takes is True:
            return total / (workers - 1)
        return workers * total / jnp.maximum(counted * (counted - 1), 1)

    moved, apart = minus(params, start), minus(params, mean(params))
    length = norm(moved)
    stays = jnp.logical_and(length == 0, takes)
    found = jnp.full_like(length, NONE)
    if workers > 1:
        safe = jnp.where(length == 0, 1, length)
        found = cosine(jax.tree.map(lambda x: safe[0], moved))
        if by_leaf:
            own = cosine(_by_leaf(safe[1:], counts, moved))
            found = jnp.append(found[0], own[1:])
        is_defined = collectives.mean(stays.astype(jnp.float32), axis) == 0
        is_defined &= counted > 1
        found = jnp.where(is_defined, jnp.clip(found, -1, 1), NONE)
    spread = jnp.sqrt(mean(sums(apart, apart)))
    rows = norm(mean(moved)), spread, found, norm(mean(minus(after, start)))
    return jnp.stack(rows).astype(jnp.float32)


def _count(takes: jax.Array | bool, axis: Axis) -> jax.Array:
    """The number of workers that take part."""
    total = collectives.mean(jnp.asarray(takes, jnp.float32), axis)
    return jnp.round(total * collectives.size(axis))


def _sums(counts: list[int], x: PyTree, y: PyTree) -> list[jax.Array]:
    """Sums products over each leaf but its axes of layers."""
    leaves = counts, jax.tree.leaves(x), jax.tree.leaves(y)
    return [
        jnp.sum(a * b, axis=tuple(range(n, jnp.ndim(a))))
        for n, a, b in zip(*leaves, strict=True)
    ]


def _by_leaf(numbers: jax.Array, counts: list[int], tree: PyTree) -> PyTree:
    """Gives each leaf its numbers, one for each layer, in a shape that fits it."""
    leaves, form = jax.tree.flatten(tree)
    found, at = [], 0
    for count, x in zip(counts, leaves, strict=True):
        size = int(np.prod(x.shape[:count]))
        shape = *x.shape[:count], *[1] * (x.ndim - count)
        found.append(numbers[at : at + size].reshape(shape))
        at += size
    return form.unflatten(found)
