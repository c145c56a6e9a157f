"""Reducers that send chosen entries or rows, with their indices where they differ."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import wide_dtype, widen
from syncalgos.keys import common_key, own_key
from syncalgos.reducers import dense, hops, stacking
from syncalgos.reducers.reducer import (
    Reducer,
    draw_entries,
    drawing,
    leafwise,
    share_of,
)
from syncalgos.reducers.stacking import Stacked


def top_k(
    density: float = 0.01,
    bits: Literal[8, 4, 2] | None = None,
    seed: int = 0,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of each worker's entries of largest magnitude; its others count as 0.

    Each worker gathers the others' values and indices, of 16 bits in leaves of at most
    65,536 entries, else of 32: (N-1) · 6 or 8 bytes per chosen float32 entry.

    Args:
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1.
        bits: 8, 4 or 2 to round the values at random, as `quantized` does.
        seed: of that rounding, which differs between workers.
        stacked: which leaves hold several layers, of each of which the largest are sent
            as of a leaf (see `Stacked`).
        axis: the mapped axis or axes over which the workers lie.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent",
    EMNLP 2017.
    """
    density = checks.share("top_k: density", density)
    stacked = stacking.check("top_k: stacked", stacked)
    seed = checks.whole("seed", seed, least=0)
    encode, decode = (lambda values, draws: values), (lambda code, count: code)
    if bits is not None:
        dense.check_bits("top_k", bits)
        encode, decode = partial(dense.encode, bits), partial(dense.decode, bits)

    def count(x):
        return share_of(density, x.size)

    def combine(x, draws: Any = None):
        values, chosen = largest(x, density)
        code = encode(values if bits is None else widen(values), draws)
        codes, indices = collectives.gather((code, chosen), axis)
        none = jnp.zeros(x.size, wide_dtype(x.dtype))

        def read(code):
            return widen(decode(code, count(x)))

        # (workers, chosen) each
        total = none.at[indices.astype(jnp.int32)].add(jax.vmap(read)(codes))
        mean = (total / len(indices)).reshape(x.shape)
        return mean, placed(read(code), chosen, x)

    if bits is None:
        return leafwise(combine, stacked)
    return drawing(combine, count, lambda step: own_key(seed, step, axis), stacked)


def largest(x: jax.Array, density: float) -> tuple[jax.Array, jax.Array]:
    """A leaf's entries of largest magnitude, a share of them; and their indices."""
    flat = x.reshape(-1)
    _, chosen = jax.lax.top_k(jnp.abs(flat), share_of(density, x.size))
    return flat[chosen], chosen.astype(hops.index_dtype(x.size))


def placed(values: jax.Array, indices: jax.Array, like: jax.Array) -> jax.Array:
    """A leaf of these values at these indices, and zeros."""
    none = jnp.zeros(like.size, values.dtype)
    return none.at[indices].set(values).reshape(like.shape)


def random_k(density: float = 0.01, seed: int = 0, axis: Axis = WORKERS) -> Reducer:
    """The mean of entries that all workers draw alike; the others count as 0.

    As all know the indices, the values alone are sent, by one all-reduce.

    Args:
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1.
        seed: of the draws, the same on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """
    density = checks.share("random_k: density", density)
    seed = checks.whole("seed", seed, least=0)

    def combine(x, draws):
        flat, chosen = x.reshape(-1), draw_entries(draws, density)
        means = collectives.mean(flat[chosen], axis)
        return placed(means, chosen, x), placed(flat[chosen], chosen, x)

    return drawing(combine, jnp.size, lambda step: common_key(seed, step))


def row_sparse(
    rows: int | Mapping[str, int],
    tables: PyTree | Callable[[PyTree], PyTree],
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of gradients of tables of which each worker touches a few rows.

    Each worker gathers the others' rows and int32 row numbers: (N-1) · (4 + bytes of a
    row) per row, however large the table is. All other leaves are averaged.

    Args:
        rows: at least as many as any worker touches in one table: examples times
            lookups; or such a number for each of the tables' names. Where a worker
            touches more, the result is NaN: a mean without them would be wrong without
            a word.
        tables: which leaves are tables: a tree like params, or params -> tree, of
            booleans; or of names, where tables of one name are read at the same rows,
            as an embedding and its per-row scale are, and send their numbers once.
        axis: the mapped axis or axes over which the workers lie.

    Raises:
        ValueError: rows below 1; at the first update, tables that are neither booleans
            nor names, or other names than those of rows.

    Source: Caffe2's data_parallel_model, which gathers indices and values of sparse
    gradients.
    """
    what = "row_sparse: rows"
    if isinstance(rows, Mapping):
        most = {n: checks.whole(f"{what}[{n!r}]", x, least=1) for n, x in rows.items()}
    else:
        most = checks.whole(what, rows, least=1)

    def combine(updates, state, step):
        labels = checks.labels("row_sparse: tables", tables, updates)
        leaves, form = jax.tree.flatten(updates)
        combined, groups = list(leaves), _grouped(labels)
        if isinstance(most, Mapping):
            _check_names(most, [label for label, _ in groups if label is not None])
        for label, members in groups:
            together = [leaves[i] for i in members]
            if label is None:
                means = collectives.mean(together, axis)
            else:
                own = most[label] if isinstance(most, Mapping) else most
                means = _mean_of_rows(together, own, axis)
            for i, mean in zip(members, means, strict=True):
                combined[i] = mean
        return form.unflatten(combined), updates, state

    return Reducer(combine)


def _grouped(labels: list[Any]) -> list[tuple[Any, list[int]]]:
    """The numbers of the leaves that go together, by name; None is no table."""
    groups: dict[Any, list[int]] = {}
    for i, label in enumerate(labels):
        if not isinstance(label, bool | np.bool_ | str):
            raise ValueError(f"row_sparse: tables must hold booleans or names: {label}")
        own = label if isinstance(label, str) else i  # a table without a name is alone
        groups.setdefault(own if label else None, []).append(i)
    return list(groups.items())


def _check_names(rows: Mapping[str, int], tables: list[Any]) -> None:
    """Raises a ValueError unless rows and tables have the same names."""
    for name in tables:
        if not isinstance(name, str):
            raise ValueError("row_sparse: rows by name need names in tables, got True")
        if name not in rows:
            given = ", ".join(map(str, rows))
            raise ValueError(f"row_sparse: rows lack {name!r} (they have: {given})")
    for name in rows:
        checks.one_of("table in row_sparse's rows,", name, tables)


def _mean_of_rows(tables: list[jax.Array], most: int, axis: Axis) -> list[jax.Array]:
    """The means of tables (rows, …), zero but for at most so many common rows."""
    shapes = [jnp.shape(x) for x in tables]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "row_sparse: a table has rows, and those of one name as many, got shapes "
            f"{shapes}"
        )
    size = shapes[0][0]
    count = min(most, size)
    touched = jnp.zeros(size, bool)
    for x in tables:
        touched |= jnp.any(x != 0, axis=tuple(range(1, x.ndim)))
    [mine] = jnp.nonzero(touched, size=count, fill_value=size)
    # Who has more rows than can be sent spoils those that it sends.
    spoil = jnp.where(jnp.sum(touched) > count, jnp.nan, 1.0)
    found = [x.at[mine].get(mode="fill", fill_value=0) for x in tables]
    found = [x * spoil.astype(x.dtype) for x in found]
    numbers, values = collectives.gather((mine.astype(jnp.int32), found), axis)
    means = []
    for x, rows in zip(tables, values, strict=True):
        none = jnp.zeros(x.shape, wide_dtype(x.dtype))
        total = none.at[numbers].add(widen(rows), mode="drop")
        means.append((total / len(numbers)).astype(x.dtype))
    return means
