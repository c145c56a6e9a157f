"""CIFAR-10, which comes as pickles in a tar archive."""

import hashlib
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import archives
from experiments.data.files import File, find

ARCHIVE = File(
    "cifar-10/cifar-10-python.tar.gz",
    170_498_071,
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
)
FOLDER = "cifar-10-batches-py/"
MEMBERS = {
    f"{FOLDER}{name}": sha256
    for name, sha256 in {
        "data_batch_1": (
            "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"
        ),
        "data_batch_2": (
            "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"
        ),
        "data_batch_3": (
            "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"
        ),
        "data_batch_4": (
            "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"
        ),
        "data_batch_5": (
            "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"
        ),
        "test_batch": (
            "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"
        ),
    }.items()
}
MOST_BYTES = 1 << 28  # the archive unpacks to 186 MB

# All that a pickled array calls. Any other name could run a program.
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
    return read(find(ARCHIVE, data_dir), MEMBERS)


def read(path: Path, members: Mapping[str, str]) -> tuple[Arrays, Arrays]:
    """Reads an archive of batches, in memory.

    Args:
        path: the archive, whose own checksum is right.
        members: the batches' SHA-256 by name; what is in "test_batch" is held out.

    Returns:
        As `images`; training batches in the order of members.

    Raises:
        ValueError: a member leaves the folder, is missing, differs from its SHA-256,
            asks for more than arrays, or holds something else.
    """
    found = archives.members(path, MOST_BYTES, str(path))
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
    """Makes arrays and plain values, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def _batch(content: bytes, name: str) -> Arrays:
    """One pickled batch: rows of 1024 red, 1024 green and 1024 blue bytes."""
    try:
        batch = _Unpickler(BytesIO(content), encoding="latin1").load()
        data, labels = np.asarray(batch["data"]), np.array(batch["labels"], np.int32)
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"{name} cannot be unpickled: {error}") from error
    if (data.dtype, data.shape) != (np.uint8, (*labels.shape, 3072)):
        raise ValueError(
            f"{name} must hold {len(labels)} rows of 3072 unsigned bytes, got "
            f"{data.dtype} {data.shape}"
        )
    x = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
    return {"x": np.ascontiguousarray(x), "y": labels}
