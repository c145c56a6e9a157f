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
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, apply_sync

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
    cut = ids.astype(np.int32)
    wanted = jnp.where(cut == ids, cut, -1).reshape(-1)  # -1: beyond 32 bits, so no row
    rows: Any = _lookup(axis, len(part), part, wanted)
    return rows.reshape(*ids.shape, *part.shape[1:])


# A custom derivative: psum's transpose differs between pmap and shard_map, and
# psum_scatter fails over two axes.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(axis: Axis, size: int, part: jax.Array, ids: jax.Array) -> jax.Array:
    return _forward(axis, size, part, ids)[0]


# A look-up is part of the loss. The ledger traces only strategies, so it does not count
# these bytes.
def _forward(axis, size, part, ids):
    local = collectives.gather(ids, axis) - size * collectives.index(axis)
    # Indices in this worker's part, (workers, ids); `size` for rows outside it.
    wanted = jnp.where((local >= 0) & (local < size), local, size)
    found = part.at[wanted].get(mode="fill", fill_value=jnp.nan)
    # As integers: a sum with 0 would lose the sign of -0, and XLA on CPU would widen
    # short floats on the way.
    bits = jnp.dtype(f"uint{8 * part.dtype.itemsize}")
    sent = collectives.all_to_all(lax.bitcast_convert_type(found, bits), axis)
    arrived = lax.bitcast_convert_type(sent, part.dtype)  # (owners, ids, …)
    owner = jnp.clip(ids // max(size, 1), 0, len(arrived) - 1)
    return arrived[owner, jnp.arange(len(ids))], wanted


def _backward(axis, size, wanted, cotangent):
    """Returns the mean of all workers' gradients for the rows that this worker owns."""
    of_all = collectives.gather(cotangent, axis)  # (workers, ids, …)
    none = jnp.zeros((size, *cotangent.shape[1:]), wide_dtype(cotangent.dtype))
    total = none.at[wanted].add(widen(of_all), mode="drop")
    return (total / len(of_all)).astype(cotangent.dtype), None


_lookup.defvjp(_forward, _backward)


def flags(sharded: Mask | None, params: PyTree) -> list[bool]:
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


def check_rows(sharded: Mask | None, params: PyTree, workers: int) -> None:
    """Raises a ValueError if a sharded leaf does not divide over the workers."""
    if sharded is None:
        return
    which = flags(sharded, params)
    leaves = checks.named_leaves("tables: params", params)
    for (name, leaf), own in zip(leaves, which, strict=True):
        if own and not np.ndim(leaf):
            raise ValueError(f"{name} is a scalar: it has no rows to shard")
        if own and np.shape(leaf)[0] % workers:
            rows = np.shape(leaf)[0]
            raise ValueError(
                f"{name} has {rows} rows, which do not divide over {workers} workers: "
                f"pad it to {rows + -rows % workers} rows"
            )
    parts = jax.eval_shape(lambda x: _cut(sharded, x, workers, 0), params)
    if flags(sharded, parts) != which:
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
    def steps(rest):
        """A second step along ones, but `rest` in the second half of each table."""

        def ones(x):
            shape = x.shape and (min(len(x), 256), *x.shape[1:])
            return jnp.ones(shape, jax.dtypes.canonicalize_dtype(x.dtype))

        def halved(x):
            return x.at[len(x) // 2 :].set(rest.astype(x.dtype))

        tree = _changed(sharded, halved, jax.tree.map(ones, params))
        update = optax.with_extra_args_support(optimizer).update
        _, state = update(tree, optimizer.init(tree), tree, value=jnp.ones(()))
        return update(tree, state, tree, value=jnp.ones(()))[0]

    with jax.debug_nans(False):
        found = map(jax.tree.leaves_with_path, map(steps, jnp.array([1.0, jnp.nan])))
        for own, (path, x), (_, y) in zip(flags(sharded, params), *found, strict=True):
            if own and not np.array_equal(x[: len(x) // 2], y[: len(y) // 2]):
                raise ValueError(
                    f"tables: the step of a row of params{jax.tree_util.keystr(path)} "
                    "depends on other rows, as in lamb and adafactor: use adam or sgd"
                )


def parts_of(sharded: Mask | None, params: PyTree) -> PyTree:
    """Returns this worker's rows of each sharded leaf, and the other leaves whole."""
    return _cut(sharded, params, collectives.size(), collectives.index())


def _cut(sharded: Mask | None, params: PyTree, workers: int, index: Any) -> PyTree:
    """Returns the rows of each sharded leaf that the worker with this index owns."""

    def rows(x):
        each = len(x) // workers
        return lax.dynamic_slice_in_dim(x, index * each, each)

    return _changed(sharded, rows, params)


def whole(sharded: Mask | None, params: PyTree) -> PyTree:
    """Joins the parts of each sharded leaf to the whole table, on all workers."""
    return _changed(sharded, lambda x: jnp.concatenate(collectives.gather(x)), params)


def merge(sharded: Mask | None, rest: PyTree, parts: PyTree) -> PyTree:
    """Takes the sharded leaves from `parts` and the other leaves from `rest`."""
    return _changed(sharded, lambda _, part: part, rest, parts)


def _changed(sharded: Mask | None, change: Callable, *trees: PyTree) -> PyTree:
    """Changes the sharded leaves of the first tree, given those of all trees."""
    form = jax.tree.structure(trees[0])
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    pairs = zip(flags(sharded, trees[0]), leaves, strict=True)
    return form.unflatten([change(*x) if own else x[0] for own, x in pairs])


def replicated(sharded: Mask | None, params: PyTree) -> list[Any]:
    """Returns the leaves that are not sharded; each worker holds a replica of them."""
    pairs = zip(flags(sharded, params), jax.tree.leaves(params), strict=True)
    return [x for own, x in pairs if not own]


def beside(
    strategy: Strategy, sharded: Mask, optimizer: optax.GradientTransformation
) -> Strategy:
    """Makes a strategy that does not see sharded params.

    It does not see their rows in the inner optimizer's state either.

    Raises:
        ValueError: some workers skip rounds or rest.
    """
    rules.check("tables", strategy)

    # An average over the workers would mix moments of different rows. And `reset`
    # expects the optimizer state of the params that it sees.

    def mask(params):
        form = jax.tree.structure(params)
        return form.unflatten([not own for own in flags(sharded, params)])

    rest = masked(strategy, mask)

    def see(replica):
        of_rows = _of_rows(optimizer, flags(sharded, replica.params), replica.params)
        leaves, form = jax.tree.flatten(replica.opt_state)
        pairs = zip(of_rows, leaves, strict=True)
        seen = [optax.MaskedNode() if own else x for own, x in pairs]
        return of_rows, replica._replace(opt_state=form.unflatten(seen))

    def reduce(grads, replica, state, step):
        return rest.reduce(grads, see(replica)[1], state, step)

    def sync(replica, state, step):
        of_rows, seen = see(replica)
        synced, state = apply_sync(rest, seen, state, step)
        kept, form = jax.tree.flatten(replica.opt_state)
        new = iter(jax.tree.leaves(synced.opt_state))
        pairs = zip(of_rows, kept, strict=True)
        merged = form.unflatten([x if own else next(new) for own, x in pairs])
        return synced._replace(opt_state=merged), state

    described = replace(introspection.combination(rest), call=sync)
    return rest._replace(reduce=introspection.reduce_like(reduce, rest), sync=described)


def _of_rows(
    optimizer: optax.GradientTransformation, which: list[bool], params: PyTree
) -> list[bool]:
    """Marks the leaves of opt_state that have rows: they grow with the tables."""

    def shapes(more: int) -> list[tuple[int, ...]]:
        def grown(own: bool, x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (len(x) + more, *x.shape[1:]) if own else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        leaves, form = jax.tree.flatten(params)
        larger = form.unflatten(map(grown, which, leaves))
        state = jax.eval_shape(optimizer.init, larger)
        return [x.shape for x in jax.tree.leaves(state)]

    return [a != b for a, b in zip(shapes(0), shapes(1), strict=True)]
