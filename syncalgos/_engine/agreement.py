"""Processes that begin alike: what each gives is compared before anything runs.

Workers that began apart would stay apart, as anchors and moments are never sent, and
means over the workers would hide it.
"""

import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos._engine.placement.layout import Layout
from syncalgos._keys import is_key
from syncalgos.collectives import PyTree

BYTES = 16
"""The length of a leaf's checksum."""


def check_agreement(caller_name: str, trees: dict[str, PyTree], layout: Layout) -> None:
    """Refuses trees that differ between the processes; each process calls this.

    Args:
        caller_name: the function that was called, for the message.
        trees: arrays, numbers, shapes or texts, by name. Of an array that spans the
            processes, and of shapes, only the shape and the dtype are compared.
        layout: the place of each worker.

    Raises:
        ValueError: a leaf differs, in all processes; the first one is named.
    """
    if layout.processes == 1:
        return
    leaves = []
    for name, tree in trees.items():
        leaves += checks.named_leaves(name, tree)
    checksums = [_checksum(name, leaf) for name, leaf in leaves]
    # Their numbers first: trees of other forms have other numbers of leaves.
    count_rows = _gather_rows(np.array([len(leaves)], np.uint32), layout)
    max_leaves = int(count_rows.max())
    table = np.zeros((max_leaves, BYTES), np.uint8)
    for row, checksum in enumerate(checksums):  # (leaves, bytes)
        table[row] = np.frombuffer(checksum, np.uint8)
    tables = _gather_rows(table.reshape(-1).view(np.uint32), layout)
    tables = tables.reshape(len(tables), max_leaves, -1)
    differing = np.argwhere((tables != tables[0]).any(-1))
    if not len(differing):
        return
    row = int(differing[:, 1].min())
    if row < len(leaves):
        name, leaf = leaves[row]
        description = f"{name}, here {_describe_array(leaf)},"
    else:
        description = f"the number of leaves, here {len(leaves)},"
    raise ValueError(
        f"{caller_name}: {description} is not the same in all processes: give each "
        "process the same strategy, model, seed and numbers, such as those drawn from "
        "one seed or read from one file"
    )


def as_text(value: Any) -> str:
    """The repr of a value, without addresses, which differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def _describe_array(leaf: Any) -> str:
    """The dtype and the shape of an array; a text as it is."""
    if isinstance(leaf, str):
        return leaf
    shape = ",".join(map(str, np.shape(leaf)))
    return f"{_dtype(leaf)}[{shape}]"


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _checksum(name: str, leaf: Any) -> bytes:
    """The checksum of a leaf: its name, its form, and its bytes if these are here."""
    text = f"{name} {_describe_array(leaf)}"
    checksum = hashlib.blake2b(text.encode(), digest_size=BYTES)
    if isinstance(leaf, str):
        return checksum.digest()
    is_spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if not is_spread and not isinstance(leaf, jax.ShapeDtypeStruct):
        has_keys = isinstance(leaf, jax.Array) and is_key(leaf)
        numbers = jax.random.key_data(leaf) if has_keys else leaf
        checksum.update(np.ascontiguousarray(np.asarray(numbers)).tobytes())
    return checksum.digest()


def _gather_rows(row: np.ndarray, layout: Layout) -> np.ndarray:
    """Gathers a row of as many numbers from each device: (devices, numbers)."""
    mesh = Mesh(np.array(layout.devices), ("all",))
    row_sharding = NamedSharding(mesh, PartitionSpec("all"))
    copy_sharding = NamedSharding(mesh, PartitionSpec())
    copies = [jax.device_put(row[None], device) for device in layout.own_devices]
    shape = (len(layout.devices), len(row))
    rows = jax.make_array_from_single_device_arrays(shape, row_sharding, copies)
    gathered = jax.jit(lambda x: x, out_shardings=copy_sharding)(rows)
    return np.asarray(gathered.addressable_data(0))
