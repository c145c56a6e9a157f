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
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_sync,
    check_strategy,
    factory,
)

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
    measure = partial(measured, by_leaf=by_leaf, layered=layered, ends=ends, only=only)
    is_moved = rules.KINDS["paced"](strategy) or rules.KINDS["pulled"](strategy)
    if is_moved and introspection.combination(strategy).clock:
        # Moves are what it makes of them.
        return introspection.rebuild_members(strategy, measure)
    rules.check_combination("measured", strategy)
    axis = introspection.find_axis(strategy)
    acting_steps = introspection.acting_steps(strategy)
    weightings = introspection.find_weightings(strategy, of_syncs=True)
    # None stands for every step.
    end_steps = ends
    if ends is None and not introspection.reduces(strategy):
        end_steps = acting_steps

    def init(params: PyTree) -> MeasuredState:
        num_parts = len(parts_of(params, layered)) if by_leaf else 1
        no_figures = jnp.full((len(Figures._fields), num_parts), NONE, "f")
        no_note = Noted(jnp.int32(-1), no_figures)
        return MeasuredState(strategy.init(params), params, no_note)

    def sync(
        replica: Replica, state: MeasuredState, step: Any
    ) -> tuple[Replica, MeasuredState]:
        # Otherwise XLA might fuse the local step differently, and round differently.
        moved_replica, inner_state = lax.optimization_barrier((replica, state.strategy))
        results = apply_sync(strategy, moved_replica, inner_state, step)
        new_replica, inner_state = lax.optimization_barrier(results)
        is_end = jnp.asarray(end_steps is None or end_steps(step), bool)
        is_measured = jnp.logical_and(is_end, only is None or only(step))

        def compute_note() -> Noted:
            workers = collectives.size(axis)
            worker_index = collectives.index(axis)
            relative_weight = participation.compute_relative_weight(
                weightings, step, workers, worker_index
            )
            figures = compute_figures(
                moved_replica.params,
                state.start,
                new_replica.params,
                layered,
                by_leaf,
                axis,
                relative_weight,
            )
            return Noted(jnp.int32(step), figures)

        note = lax.cond(is_measured, compute_note, lambda: state.noted)
        start = lax.cond(is_end, lambda: new_replica.params, lambda: state.start)
        return new_replica, MeasuredState(inner_state, start, note)

    # The engine runs the strategy in the same form as without the measurement.
    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=introspection.Combination(sync, (strategy,), measure),
        center=introspection.inner_center(strategy),
        acts=acting_steps | as_steps(end_steps),
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
        name = checks.leaf_name(path)
        layer_indices = np.ndindex(*np.shape(x)[:count]) if count else [()]
        for index in layer_indices:
            names.append(name + "".join(f"[{i}]" for i in index))
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
    metrics: dict[str, Any] = decided.report_decisions(state, step)
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Noted)):
        if not isinstance(node, Noted):
            continue
        if "measured" in metrics:
            raise ValueError(
                "measured: metrics hold one strategy's figures, not two: put measured "
                "around one of them only"
            )
        figures = node.values.reshape(-1, *node.values.shape[-2:])[0]  # (4, parts)
        noted_step = jnp.ravel(node.at)[0]
        figures = jnp.where(noted_step == step, figures, 0)
        metrics["measured"] = Figures(*figures)
    return metrics


def compute_figures(
    params: PyTree,
    start_params: PyTree,
    synced_params: PyTree,
    layered: Layered,
    by_leaf: bool,
    axis: Axis,
    relative_weight: jax.Array | None = None,
) -> jax.Array:
    """Returns the figures of a round, (4, parts) float32, of the workers that count.

    Args:
        params: this worker's params right before the sync.
        start_params: its params right after the sync before.
        synced_params: its params right after the sync.
        layered, by_leaf: as for `measured`.
        axis: the mapped axis or axes over which the workers lie.
        relative_weight: this worker's share in the means; None: all count alike.
    """
    workers = collectives.size(axis)
    counts = _stacking.counts(layered, params)
    params = widen(params)
    start_params = widen(start_params)
    synced_params = widen(synced_params)

    def weighted_mean(tree: PyTree) -> PyTree:
        return collectives.mean(tree, axis, relative_weight)

    def subtract(x: PyTree, y: PyTree) -> PyTree:
        return jax.tree.map(jnp.subtract, x, y)

    def sum_parts(x: PyTree, y: PyTree) -> jax.Array:
        """Sums products in all, then by leaf or layer."""
        sums = [jnp.ravel(s) for s in _sum_products(counts, x, y)]
        total = jnp.sum(jnp.array([s.sum() for s in sums]), keepdims=True)
        return jnp.concatenate([total, *sums] if by_leaf else [total])  # (parts,)

    def norm(tree: PyTree) -> jax.Array:
        return jnp.sqrt(sum_parts(tree, tree))

    takes_part = True
    num_participants = workers
    if relative_weight is not None:
        takes_part = relative_weight > 0
        num_participants = _count_participants(takes_part, axis)

    def compute_cosines(lengths: PyTree) -> jax.Array:
        """The cosines of moves that are divided by a length for each leaf."""
        directions = jax.tree.map(jnp.divide, moves, lengths)
        if takes_part is not True:  # each pair counts alike, whatever the weights
            directions = jax.tree.map(lambda x: jnp.where(takes_part, x, 0), directions)
        # Each worker's direction times the sum of the others: unlike |Σu|² - N, this
        # loses no digits if directions are orthogonal.
        mean_direction = collectives.mean(directions, axis)
        other_sums = jax.tree.map(
            lambda m, x: workers * m - x, mean_direction, directions
        )
        total = collectives.mean(sum_parts(directions, other_sums), axis)
        if takes_part is True:
            return total / (workers - 1)
        cosine_sum = workers * total
        num_pairs = num_participants * (num_participants - 1)
        return cosine_sum / jnp.maximum(num_pairs, 1)

    moves = subtract(params, start_params)
    distances = subtract(params, weighted_mean(params))
    lengths = norm(moves)  # (parts,)
    stays = jnp.logical_and(lengths == 0, takes_part)
    cosines = jnp.full_like(lengths, NONE)
    if workers > 1:
        safe_lengths = jnp.where(lengths == 0, 1, lengths)
        cosines = compute_cosines(jax.tree.map(lambda x: safe_lengths[0], moves))
        if by_leaf:
            leaf_lengths = _spread_over_leaves(safe_lengths[1:], counts, moves)
            leaf_cosines = compute_cosines(leaf_lengths)
            cosines = jnp.append(cosines[0], leaf_cosines[1:])
        is_defined = collectives.mean(stays.astype(jnp.float32), axis) == 0
        is_defined &= num_participants > 1
        cosines = jnp.where(is_defined, jnp.clip(cosines, -1, 1), NONE)
    spread = jnp.sqrt(weighted_mean(sum_parts(distances, distances)))
    mean_move = norm(weighted_mean(moves))
    outer_step = norm(weighted_mean(subtract(synced_params, start_params)))
    rows = [mean_move, spread, cosines, outer_step]
    return jnp.stack(rows).astype(jnp.float32)


def _count_participants(takes_part: jax.Array | bool, axis: Axis) -> jax.Array:
    """The number of workers that take part."""
    total = collectives.mean(jnp.asarray(takes_part, jnp.float32), axis)
    return jnp.round(total * collectives.size(axis))


def _sum_products(counts: list[int], x: PyTree, y: PyTree) -> list[jax.Array]:
    """Sums products over each leaf but its axes of layers."""
    triples = zip(counts, jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    sums = []
    for count, a, b in triples:
        axes = tuple(range(count, jnp.ndim(a)))
        sums.append(jnp.sum(a * b, axis=axes))  # (layers, …)
    return sums


def _spread_over_leaves(
    numbers: jax.Array, layer_axes_by_leaf: list[int], tree: PyTree
) -> PyTree:
    """Gives each leaf its numbers, one for each layer, in a shape that fits it.

    Args:
        numbers: those of all layers of all leaves, in their order.
        layer_axes_by_leaf: how many leading axes of a leaf count its layers.
        tree: the leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaf_numbers = []
    start = 0
    for num_layer_axes, x in zip(layer_axes_by_leaf, leaves, strict=True):
        end = start + int(np.prod(x.shape[:num_layer_axes]))
        shape = *x.shape[:num_layer_axes], *[1] * (x.ndim - num_layer_axes)
        leaf_numbers.append(numbers[start:end].reshape(shape))  # (layers, 1, …)
        start = end
    return structure.unflatten(leaf_numbers)
