"""MNIST and Fashion-MNIST: IDX files, with or without gzip."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from experiments.tasks.data.files import PINS, File, find, folder, sha256
from syncalgos import checks

NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
FILES = {
    data_set: [PINS[f"{data_set}/{name}"] for name in NAMES]
    for data_set in ("mnist", "fashion-mnist")
}

# Other possible folders of the files, such as those of torchvision.
FOLDERS = {
    "mnist": ("mnist", "MNIST/raw", "."),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw", "."),
}

Arrays = dict[str, np.ndarray]


def images(name: str, data_dir: Path | None = None) -> tuple[Arrays, Arrays]:
    """Loads a data set of small grey images in 10 classes.

    Args:
        name: "mnist" or "fashion-mnist".
        data_dir: the data folder (see `files.folder`).

    Returns:
        The training and the held-out examples, each {"x": images (n, 28, 28) uint8,
        "y": labels (n,) int32}.

    Raises:
        ValueError: an unknown name, or a file that is missing, altered or malformed.

    Source: LeCun et al., "Gradient-based learning applied to document recognition",
    1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017.
    """
    checks.one_of("data set", name, FILES)
    paths = [_there(file, data_dir) or find(file, data_dir) for file in FILES[name]]
    return _examples(paths[0], paths[1]), _examples(paths[2], paths[3])


def _there(file: File, data_dir: Path | None) -> Path | None:
    """Returns a file with the right checksum and another name or folder, if any."""
    expected = {Path(file.path).name: file.sha256, **file.members}
    expected |= {name.replace("-idx", ".idx"): x for name, x in file.members.items()}
    places = [folder(data_dir) / x for x in FOLDERS[Path(file.path).parent.name]]
    found = ((place / x, digest) for place in places for x, digest in expected.items())
    return next((x for x, digest in found if _is(x, digest)), None)


def _is(path: Path, digest: str) -> bool:
    """Whether a file exists, and has this SHA-256."""
    try:
        return sha256(path) == digest
    except OSError:
        return False


def _examples(images_path: Path, labels_path: Path) -> Arrays:
    """Reads images with their labels."""
    x, y = read(images_path), read(labels_path)
    if x.shape != (len(y), 28, 28) or y.shape != (len(x),):
        raise ValueError(
            f"{images_path} and {labels_path} must hold images (n, 28, 28) and labels "
            f"(n,), got {x.shape} and {y.shape}"
        )
    return {"x": x, "y": y.astype(np.int32)}


def read(path: Path) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, compressed if its name ends in .gz.

    Raises:
        ValueError: it has another format, or is incomplete.
    """
    # The header is 0, 0, 8 for unsigned bytes, the number of dimensions, and each
    # dimension as four bytes, the high one first.
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError(
            f"{path} must begin with 00 00 08 (IDX of unsigned bytes), got "
            f"{content[:4].hex(' ') or 'nothing'}"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} ends inside its header of {content[3]} dimensions")
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} bytes of data for its shape "
            f"{tuple(shape)}, got {len(content) - start}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
