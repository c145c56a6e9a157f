"""Reducers that send chosen entries or rows, with indices where choices differ."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos._dtypes import wide_dtype, widen
from syncalgos._keys import common_key, own_key
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.collectives._axes import same_on_all
from syncalgos.reducers import _dense, _hops, _stacking
from syncalgos.reducers._reducer import Draws, Reducer, count_share, leafwise
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import factory


@factory
def top_k(
    density: float = 0.01,
    *,
    bits: Literal[8, 4, 2] | None = None,
    seed: int = 0,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of each worker's entries of largest magnitude; all others count as 0.

    Args:
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1.
        bits: 8, 4 or 2 bits per value, rounded at random as by `quantized`; None sends
            values whole.
        seed: seeds that rounding, which differs between workers.
        layered: which leaves hold several layers, each compressed as a leaf (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker gathers the others' values and indices, of 16
        bits in leaves of at most 65,536 entries, else of 32: (N-1) · 6 or 8 bytes per
        sent float32 entry.

    Raises:
        ValueError: a parameter outside its range.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent",
    EMNLP 2017.
    """
    density = checks.density("top_k", density)
    layered = _stacking.check_layered("top_k: layered", layered)
    seed = checks.seed(seed)
    code = _hops.Code(lambda values, draws: values, lambda values, length: values)
    if bits is not None:
        _dense.check_bits("top_k", bits)
        code = _hops.Code(
            partial(_dense.encode_levels, bits), partial(_dense.decode, bits)
        )

    def combine(x: jax.Array, draws: Any = None) -> tuple[jax.Array, jax.Array]:
        values, chosen = choose_largest(x, density)
        own_code = code.encode(values if bits is None else widen(values), draws)
        # (workers, chosen) each
        codes, indices = collectives.gather((own_code, chosen), axis)
        zeros = jnp.zeros(x.size, wide_dtype(x.dtype))

        def decode(message: Any) -> jax.Array:
            return widen(code.decode(message, len(values)))

        total = zeros.at[indices.astype(jnp.int32)].add(jax.vmap(decode)(codes))
        mean = (total / len(indices)).reshape(x.shape)
        return mean, place_values(decode(own_code), chosen, x)

    key = partial(own_key, seed, axis=axis)
    draws = Draws(lambda x: count_share(density, x.size), key)
    return leafwise(combine, layered, draws if bits else None)


def choose_largest(x: jax.Array, density: float) -> tuple[jax.Array, jax.Array]:
    """Chooses a share of a leaf's entries, the largest; returns them and their indices.

    They are (share of entries,); indices are as short as the leaf's size allows.
    """
    flat = x.reshape(-1)
    _, chosen = jax.lax.top_k(jnp.abs(flat), count_share(density, x.size))
    return flat[chosen], chosen.astype(_hops.index_dtype(x.size))


def place_values(values: jax.Array, indices: jax.Array, like: jax.Array) -> jax.Array:
    """A leaf in the shape of another: values at their indices, zeros elsewhere."""
    zeros = jnp.zeros(like.size, values.dtype)
    return zeros.at[indices].set(values).reshape(like.shape)


@factory
def random_k(density: float = 0.01, *, seed: int = 0, axis: Axis = WORKERS) -> Reducer:
    """The mean of random entries, drawn alike on all workers; all others count as 0.

    Args:
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1.
        seed: seeds the draws, identical on all workers.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. An all-reduce sends only the values, because all workers
        know their indices.

    Raises:
        ValueError: a parameter outside its range.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """
    density = checks.density("random_k", density)
    seed = checks.seed(seed)

    def combine(x: jax.Array, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = x.reshape(-1)
        # The largest of uniform numbers, one for each entry: no entry is drawn twice.
        _, chosen = jax.lax.top_k(draws, count_share(density, x.size))
        means = collectives.mean(flat[chosen], axis)
        return place_values(means, chosen, x), place_values(flat[chosen], chosen, x)

    def make_key(step: Any) -> jax.Array:
        return common_key(seed, same_on_all(step, axis))

    return leafwise(combine, draws=Draws(lambda x: x.size, make_key))


@factory
def row_sparse(
    rows: int | Mapping[str, int],
    *,
    tables: PyTree | checks.ByLeaf,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of gradients of tables in which each worker touches a few rows.

    Args:
        rows: the most rows that a worker touches in one table, examples times lookups;
            or such a number by the tables' names. If a worker touches more, the result
            is NaN.
        tables: which leaves are tables: a tree like params of booleans or names, or a
            function as in `masked`. Tables of one name are read at the same rows, such
            as an embedding and its per-row scale, and send their row numbers once.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker gathers the others' rows and int32 row numbers:
        (N-1) · (4 + bytes of a row) per row, whatever the size of the table. All other
        leaves are averaged.

    Raises:
        ValueError: rows are below 1. At the first update: tables are neither booleans
            nor names, or their names differ from those of rows.

    Source: Caffe2's data_parallel_model, which gathers indices and values of sparse
    gradients.
    """
    max_rows: int | dict[str, int]
    if isinstance(rows, Mapping):
        max_rows = {
            name: checks.whole(f"row_sparse: rows[{name!r}]", count, least=1)
            for name, count in rows.items()
        }
    else:
        max_rows = checks.whole("row_sparse: rows", rows, least=1)

    def combine(
        updates: PyTree, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        labels = checks.labels("row_sparse: tables", tables, updates)
        leaves, form = jax.tree.flatten(updates)
        combined = list(leaves)
        groups = _group_by_name(labels)
        if isinstance(max_rows, dict):
            _check_names(max_rows, [name for name in groups if name is not None])
        # One group at a time: its tables share row numbers, all other leaves a mean.
        for name, members in groups.items():
            group_leaves = [leaves[i] for i in members]
            if name is None:
                means = collectives.mean(group_leaves, axis)
            elif isinstance(max_rows, dict):
                means = _average_rows(group_leaves, max_rows[name], axis)
            else:
                means = _average_rows(group_leaves, max_rows, axis)
            for i, mean in zip(members, means, strict=True):
                combined[i] = mean
        return form.unflatten(combined), updates, state

    return Reducer(combine)


def _group_by_name(labels: list[Any]) -> dict[Any, list[int]]:
    """Groups the leaves' numbers by table name; None stands for no table."""
    groups: dict[Any, list[int]] = {}
    for i, label in enumerate(labels):
        if not isinstance(label, bool | np.bool_ | str):
            raise ValueError(f"row_sparse: tables need booleans or names, got {label}")
        name = None
        if label:
            # A table without a name is alone.
            name = label if isinstance(label, str) else i
        groups.setdefault(name, []).append(i)
    return groups


def _check_names(max_rows_by_table: Mapping[str, int], table_names: list[Any]) -> None:
    """Raises a ValueError unless rows and tables have the same names."""
    for name in table_names:
        if not isinstance(name, str):
            raise ValueError("row_sparse: rows by name need names in tables, got True")
        if name not in max_rows_by_table:
            known_names = ", ".join(map(str, max_rows_by_table))
            raise ValueError(
                f"row_sparse: rows lack {name!r} (they have: {known_names})"
            )
    for name in max_rows_by_table:
        checks.one_of("table in row_sparse's rows,", name, table_names)


def _average_rows(
    tables: list[jax.Array], max_rows: int, axis: Axis
) -> list[jax.Array]:
    """The means of tables (rows, …), of which `max_rows` common rows may not be 0."""
    shapes = [jnp.shape(x) for x in tables]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "row_sparse: tables must have rows, and tables of one name equally many, "
            f"got shapes {shapes}"
        )
    size = shapes[0][0]
    count = min(max_rows, size)
    is_touched = jnp.zeros(size, bool)
    for x in tables:
        is_touched |= jnp.any(x != 0, axis=tuple(range(1, x.ndim)))
    [own_numbers] = jnp.nonzero(is_touched, size=count, fill_value=size)
    # A worker with more rows than it can send sends NaN: without the other rows the
    # mean would be silently wrong.
    spoiler = jnp.where(jnp.sum(is_touched) > count, jnp.nan, 1.0)
    own_rows = []
    for x in tables:
        rows = x.at[own_numbers].get(mode="fill", fill_value=0)
        own_rows.append(rows * spoiler.astype(x.dtype))
    # (workers, count) and (workers, count, …)
    numbers, values = collectives.gather(
        (own_numbers.astype(jnp.int32), own_rows), axis
    )
    means = []
    for x, rows in zip(tables, values, strict=True):
        zeros = jnp.zeros(x.shape, wide_dtype(x.dtype))
        total = zeros.at[numbers].add(widen(rows), mode="drop")
        means.append((total / len(numbers)).astype(x.dtype))
    return means
