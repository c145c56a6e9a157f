"""Tables sharded by rows: each worker stores its own rows and can read all rows.

Caffe2 calls them non-parallel parameters: a large embedding has one copy overall, not
one copy for each worker. A loss reads it with `lookup`. `DataParallel(…, tables=…)`
holds the parts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from syncalgos import checks, collectives
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import introspection, rules
from syncalgos._combinators.masked import masked
from syncalgos._dtypes import wide_dtype, widen
from syncalgos.strategy import (
    WORKERS,
    Axis,
    PyTree,
    Replica,
    Strategy,
    apply_sync,
)

Mask = PyTree | checks.ByLeaf


@suggest_arguments
def lookup(part: jax.Array, ids: Any, *, axis: Axis = WORKERS) -> jax.Array:
    """Returns the rows `ids` of a sharded table, bit for bit equal to `table[ids]`.

    All workers must call it with the same number of ids. A worker gathers the others'
    ids, reads the rows that it owns, and sends them back. This costs
    (N-1) · (4 + bytes of a row) bytes for each id, and the same for the gradient.

    Args:
        part: this worker's rows of a table with V rows, floats of shape (V/N, …).
            Worker w of N holds the rows from w V/N to (w + 1) V/N - 1.
        ids: row numbers in the whole table, integers of any shape S. A number outside
            0 … V-1 gives a row of NaN.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The rows, (*S, …). The gradient with respect to `part` is that of the mean of
        all workers' losses. It needs no further reduction, and the inner optimizer
        takes the step of synchronous SGD. Only reverse-mode differentiation works.

    Raises:
        ValueError: part is not a float array with rows, or ids are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, lookup, sync_sgd
        >>> def loss(params, ids):
        ...     return lookup(params["table"], ids).mean()
        >>> tables = {"table": True}
        >>> sgd = optax.sgd(1.0)
        >>> trainer = DataParallel(loss, sgd, sync_sgd(), workers=2, tables=tables)
        >>> state = trainer.init({"table": jnp.zeros(4)})
        >>> state, _ = trainer.run(state, jnp.array([[0, 3]]))
        >>> trainer.center(state).params["table"]
        Array([-0.5,  0. ,  0. , -0.5], dtype=float32)
    """
    part = jnp.asarray(part)
    ids = ids if isinstance(ids, np.ndarray | np.generic) else jnp.asarray(ids)
    if not part.ndim or not jnp.issubdtype(part.dtype, np.floating):
        raise ValueError(
            f"lookup: part must be float rows of a table, got {jax.typeof(part)}"
        )
    if not jnp.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"lookup: ids must be integers, got {jax.typeof(ids)}")
    int_ids = ids.astype(np.int32)
    # -1: beyond 32 bits, so no row.
    row_ids = jnp.where(int_ids == ids, int_ids, -1).reshape(-1)  # (ids,)
    rows: Any = _lookup(axis, len(part), part, row_ids)
    return rows.reshape(*ids.shape, *part.shape[1:])


# A custom derivative: psum's transpose differs between pmap and shard_map, and
# psum_scatter fails over two axes.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(axis: Axis, size: int, part: jax.Array, ids: jax.Array) -> jax.Array:
    return _forward(axis, size, part, ids)[0]


# A look-up is part of the loss. The ledger traces only strategies, so it does not count
# these bytes.
def _forward(
    axis: Axis, size: int, part: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    local = collectives.gather(ids, axis) - size * collectives.index(axis)
    # Indices in this worker's part, (workers, ids); `size` for rows outside it.
    local_rows = jnp.where((local >= 0) & (local < size), local, size)
    own_rows = part.at[local_rows].get(mode="fill", fill_value=jnp.nan)
    # As integers: a sum with 0 would lose the sign of -0, and XLA on CPU would widen
    # short floats on the way.
    bits = jnp.dtype(f"uint{8 * part.dtype.itemsize}")
    sent_bits = collectives.all_to_all(lax.bitcast_convert_type(own_rows, bits), axis)
    received_rows = lax.bitcast_convert_type(sent_bits, part.dtype)  # (owners, ids, …)
    owner = jnp.clip(ids // max(size, 1), 0, len(received_rows) - 1)
    return received_rows[owner, jnp.arange(len(ids))], local_rows


def _backward(
    axis: Axis, num_own_rows: int, row_positions: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    """Returns the mean of all workers' gradients for the rows that this worker owns.

    Args:
        axis: the mapped axis or axes over which the workers lie.
        num_own_rows: the rows of this worker's part of the table.
        row_positions: the place in that part of each id of all workers, (workers, ids);
            ids of another worker's rows lie outside, and are dropped.
        cotangent: the gradient of the rows that were looked up, (ids, …).
    """
    all_cotangents = collectives.gather(cotangent, axis)  # (workers, ids, …)
    zero_grads = jnp.zeros(
        (num_own_rows, *cotangent.shape[1:]), wide_dtype(cotangent.dtype)
    )
    total = zero_grads.at[row_positions].add(widen(all_cotangents), mode="drop")
    return (total / len(all_cotangents)).astype(cotangent.dtype), None


_lookup.defvjp(_forward, _backward)


def mark_tables(sharded: Mask | None, params: PyTree) -> list[bool]:
    """Marks the leaves of params that are sharded; None means none.

    Raises:
        ValueError: the mask is not a tree of booleans for these params.
    """
    if sharded is None:
        return [False] * len(jax.tree.leaves(params))
    labels = checks.labels("tables", sharded, params)
    for label in labels:
        if not isinstance(label, bool | np.bool_):
            raise ValueError(f"tables must hold booleans, got {checks.shown(label)}")
    return [bool(label) for label in labels]


def check_table_rows(sharded: Mask | None, params: PyTree, workers: int) -> None:
    """Raises a ValueError if a sharded leaf does not divide over the workers."""
    if sharded is None:
        return
    table_marks = mark_tables(sharded, params)
    leaves = checks.named_leaves("tables: params", params)
    for (name, leaf), is_sharded in zip(leaves, table_marks, strict=True):
        if is_sharded and not np.ndim(leaf):
            raise ValueError(f"{name} is a scalar: it has no rows to shard")
        if is_sharded and np.shape(leaf)[0] % workers:
            rows = np.shape(leaf)[0]
            raise ValueError(
                f"{name} has {rows} rows, which do not divide over {workers} workers: "
                f"pad it to {rows + -rows % workers} rows"
            )
    own_rows = jax.eval_shape(
        lambda x: _take_worker_rows(sharded, x, workers, 0), params
    )
    if mark_tables(sharded, own_rows) != table_marks:
        raise ValueError(
            "tables must not depend on the number of rows: each worker holds only some"
        )


def check_row_by_row(sharded: Mask | None, optimizer: Any, params: PyTree) -> None:
    """Refuses an optimizer in which a row's step depends on the table's other rows.

    Args:
        sharded: a mask of the leaves of params that are sharded by rows.
        optimizer: the inner optimizer, which is tried on at most 256 rows.
        params: the model, arrays or their shapes.

    Raises:
        ValueError: it is such an optimizer.
    """
    if sharded is None:
        return

    @jax.jit
    def take_second_step(other_gradient: jax.Array) -> PyTree:
        """A second step along ones, but for the second half of each table."""

        def make_ones(x: Any) -> jax.Array:
            shape = x.shape and (min(len(x), 256), *x.shape[1:])
            return jnp.ones(shape, jax.dtypes.canonicalize_dtype(x.dtype))

        def change_second_half(x: jax.Array) -> jax.Array:
            return x.at[len(x) // 2 :].set(other_gradient.astype(x.dtype))

        ones = jax.tree.map(make_ones, params)
        grads = _change_tables(sharded, change_second_half, ones)
        update = optax.with_extra_args_support(optimizer).update
        _, state = update(grads, optimizer.init(grads), grads, value=jnp.ones(()))
        return update(grads, state, grads, value=jnp.ones(()))[0]

    table_marks = mark_tables(sharded, params)
    with jax.debug_nans(False):
        usual_steps = take_second_step(jnp.array(1.0))
        nan_steps = take_second_step(jnp.array(jnp.nan))
        triples = zip(
            table_marks,
            jax.tree.leaves_with_path(usual_steps),
            jax.tree.leaves(nan_steps),
            strict=True,
        )
        for is_sharded, (path, x), y in triples:
            if is_sharded and not np.array_equal(x[: len(x) // 2], y[: len(y) // 2]):
                raise ValueError(
                    f"tables: the step of a row of params{jax.tree_util.keystr(path)} "
                    "depends on other rows, as in lamb and adafactor: use adam or sgd"
                )


def take_own_rows(sharded: Mask | None, params: PyTree) -> PyTree:
    """Returns this worker's rows of each sharded leaf, and the other leaves whole."""
    return _take_worker_rows(sharded, params, collectives.size(), collectives.index())


def _take_worker_rows(
    sharded: Mask | None, params: PyTree, workers: int, index: Any
) -> PyTree:
    """Returns the rows of each sharded leaf that the worker with this index owns."""

    def take(x: jax.Array) -> jax.Array:
        rows_per_worker = len(x) // workers
        return lax.dynamic_slice_in_dim(x, index * rows_per_worker, rows_per_worker)

    return _change_tables(sharded, take, params)


def join_rows(sharded: Mask | None, params: PyTree) -> PyTree:
    """Joins the parts of each sharded leaf to the whole table, on all workers."""

    def join(rows: jax.Array) -> jax.Array:
        return jnp.concatenate(collectives.gather(rows))

    return _change_tables(sharded, join, params)


def merge(sharded: Mask | None, params: PyTree, own_rows: PyTree) -> PyTree:
    """Takes the sharded leaves from `own_rows` and the other leaves from `params`."""
    return _change_tables(sharded, lambda _, rows: rows, params, own_rows)


def _change_tables(sharded: Mask | None, change: Callable, *trees: PyTree) -> PyTree:
    """Changes the sharded leaves of the first tree, given those of all trees."""
    structure = jax.tree.structure(trees[0])
    leaf_tuples = zip(*map(jax.tree.leaves, trees), strict=True)
    new_leaves = []
    table_marks = mark_tables(sharded, trees[0])
    for is_sharded, leaves in zip(table_marks, leaf_tuples, strict=True):
        new_leaves.append(change(*leaves) if is_sharded else leaves[0])
    return structure.unflatten(new_leaves)


def list_replicated(sharded: Mask | None, params: PyTree) -> list[Any]:
    """Returns the leaves that are not sharded; each worker holds a replica of them."""
    pairs = zip(mark_tables(sharded, params), jax.tree.leaves(params), strict=True)
    return [x for is_sharded, x in pairs if not is_sharded]


def hide_tables(
    strategy: Strategy, sharded: Mask, optimizer: optax.GradientTransformation
) -> Strategy:
    """Makes a strategy that does not see sharded params.

    It does not see their rows in the inner optimizer's state either.

    Raises:
        ValueError: some workers skip rounds or rest.
    """
    rules.check_combination("tables", strategy)

    # An average over the workers would mix moments of different rows. And `reset`
    # expects the optimizer state of the params that it sees.

    def mask(params: PyTree) -> PyTree:
        structure = jax.tree.structure(params)
        table_marks = mark_tables(sharded, params)
        return structure.unflatten([not is_sharded for is_sharded in table_marks])

    masked_strategy = masked(strategy, mask)

    def mark_rows(replica: Replica) -> list[bool]:
        table_marks = mark_tables(sharded, replica.params)
        return _mark_row_leaves(optimizer, table_marks, replica.params)

    def hide_rows(replica: Replica, row_marks: list[bool]) -> Replica:
        leaves, structure = jax.tree.flatten(replica.opt_state)
        pairs = zip(row_marks, leaves, strict=True)
        leaves = [optax.MaskedNode() if has_rows else x for has_rows, x in pairs]
        return replica._replace(opt_state=structure.unflatten(leaves))

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        hidden_replica = hide_rows(replica, mark_rows(replica))
        return masked_strategy.reduce(grads, hidden_replica, state, step)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        row_marks = mark_rows(replica)
        hidden_replica = hide_rows(replica, row_marks)
        new_replica, state = apply_sync(masked_strategy, hidden_replica, state, step)
        old_leaves, structure = jax.tree.flatten(replica.opt_state)
        new_leaves = iter(jax.tree.leaves(new_replica.opt_state))
        leaves = []
        for has_rows, leaf in zip(row_marks, old_leaves, strict=True):
            leaves.append(leaf if has_rows else next(new_leaves))
        return new_replica._replace(opt_state=structure.unflatten(leaves)), state

    combination = replace(introspection.combination(masked_strategy), call=sync)
    return masked_strategy._replace(
        reduce=introspection.reduce_like(reduce, masked_strategy), sync=combination
    )


def _mark_row_leaves(
    optimizer: optax.GradientTransformation, table_marks: list[bool], params: PyTree
) -> list[bool]:
    """Marks the leaves of opt_state that have rows: they grow with the tables."""

    def list_shapes(extra_rows: int) -> list[tuple[int, ...]]:
        def add_rows(is_sharded: bool, x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (len(x) + extra_rows, *x.shape[1:]) if is_sharded else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        leaves, form = jax.tree.flatten(params)
        larger_params = form.unflatten(map(add_rows, table_marks, leaves))
        state = jax.eval_shape(optimizer.init, larger_params)
        return [x.shape for x in jax.tree.leaves(state)]

    pairs = zip(list_shapes(0), list_shapes(1), strict=True)
    return [shape != larger_shape for shape, larger_shape in pairs]
