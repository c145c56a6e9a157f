"""MNIST and Fashion-MNIST, which come as gzip'd IDX files."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from experiments.data.files import File, find
from syncalgos import checks

MNIST = (
    "http://yann.lecun.com/exdb/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)


def _file(folder: str, name: str, size: int, sha256: str) -> File:
    """One of a data set's files."""
    sources = {"mnist": MNIST, "fashion-mnist": FASHION}[folder]
    urls = tuple(source + name for source in sources)
    return File(f"{folder}/{name}", size, sha256, urls)


# Of each data set: images and labels to train on, and those held out.
FILES = {
    "mnist": (
        _file(
            "mnist",
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _file(
            "mnist",
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _file(
            "mnist",
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _file(
            "mnist",
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": (
        _file(
            "fashion-mnist",
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        _file(
            "fashion-mnist",
            "train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        _file(
            "fashion-mnist",
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        _file(
            "fashion-mnist",
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
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
    paths = [find(file, data_dir) for file in FILES[name]]
    return _examples(paths[0], paths[1]), _examples(paths[2], paths[3])


def _examples(images_path: Path, labels_path: Path) -> Arrays:
    """Images with their labels."""
    x, y = read(images_path), read(labels_path)
    if x.shape != (len(y), 28, 28) or y.shape != (len(x),):
        raise ValueError(
            f"{images_path} and {labels_path} must hold images (n, 28, 28) and labels "
            f"(n,), got {x.shape} and {y.shape}"
        )
    return {"x": x, "y": y.astype(np.int32)}


def read(path: Path) -> np.ndarray:
    """Reads a gzip'd IDX file of unsigned bytes.

    Raises:
        ValueError: it is something else, or incomplete.

    The header is 0, 0, 8 for unsigned bytes, the number of dimensions, and each
    dimension as four bytes, the high one first.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError(
            f"{path} must open with 00 00 08 (IDX of unsigned bytes), got "
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
