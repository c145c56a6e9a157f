"""CIFAR-10, distributed as pickles in a tar archive."""

import hashlib
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks.data import archives
from experiments.tasks.data.files import PINS, find

FOLDER = "cifar-10-batches-py/"
ARCHIVE = PINS["cifar-10/cifar-10-python.tar.gz"]
MOST_BYTES = 1 << 28  # the archive unpacks to 186 MB

# The functions that a pickled array calls: any other could run a program.
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.ndarray(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}

Arrays = dict[str, np.ndarray]


def images(data_dir: Path | None = None) -> tuple[Arrays, Arrays]:
    """Loads CIFAR-10: small colour images in 10 classes.

    Args:
        data_dir: the data folder (see `files.folder`).

    Returns:
        The 50,000 training and the 10,000 held-out examples, each {"x": images
        (n, 32, 32, 3) uint8, "y": labels (n,) int32}.

    Raises:
        ValueError: the file is missing, altered or malformed.

    Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    return read(find(ARCHIVE, data_dir), ARCHIVE.members)


def read(path: Path, members: Mapping[str, str]) -> tuple[Arrays, Arrays]:
    """Reads an archive of batches, in memory.

    Args:
        path: the archive, with a verified checksum.
        members: the batches' SHA-256 by name; "test_batch" is held out.

    Returns:
        The arrays of `images`, with the training batches in the order of members.

    Raises:
        ValueError: a member leads out of the folder, is missing, differs from its
            SHA-256, asks for other objects than arrays, or is not a batch.
    """
    found = archives.members(path, MOST_BYTES, str(path))
    # Checked before anything is unpickled.
    for name, expected in members.items():
        if name not in found:
            raise ValueError(f"{path} lacks {name}")
        sha256 = hashlib.sha256(found[name]).hexdigest()
        if sha256 != expected:
            raise ValueError(f"{path}: {name} has SHA-256 {sha256}, not {expected}")
    batches = {name: _batch(found[name], f"{path}: {name}") for name in members}
    test = batches.pop(f"{FOLDER}test_batch")
    train = {
        leaf: np.concatenate([batch[leaf] for batch in batches.values()])
        for leaf in ("x", "y")
    }
    return train, test


class _Unpickler(pickle.Unpickler):
    """Unpickles arrays and plain values, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def _batch(content: bytes, name: str) -> Arrays:
    """Reads a pickled batch: rows of 1024 red, 1024 green and 1024 blue bytes."""
    try:
        batch = _Unpickler(BytesIO(content), encoding="latin1").load()
        data, labels = np.asarray(batch["data"]), np.array(batch["labels"], np.int32)
    # A pickle may raise any error.
    except Exception as error:
        raise ValueError(f"{name} cannot be unpickled: {error}") from error
    if (data.dtype, data.shape) != (np.uint8, (*labels.shape, 3072)):
        raise ValueError(
            f"{name} must hold {len(labels)} rows of 3072 unsigned bytes, got "
            f"{data.dtype} {data.shape}"
        )
    x = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
    return {"x": np.ascontiguousarray(x), "y": labels}
