"""Formats of the data sets: IDX, CIFAR-10 and recordings; archives in memory."""

import gzip
import pickle
import re
import tarfile
import wave
import zlib
from contextlib import suppress
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data.downloads import PINS, File, find, folder, sha256
from experiments.data.feeding import Arrays
from experiments.files import read_bytes


def members(path: Path, most_bytes: int, name: str) -> dict[str, bytes]:
    """Reads the files of a tar archive.

    Args:
        path: the archive, with or without gzip.
        most_bytes: the largest size that the archive may unpack to.
        name: the name of the archive, for errors.

    Returns:
        Each file's content by its name.

    Raises:
        ValueError: it cannot be read, or is too large.
    """
    try:
        # All at once, so that sizes in its headers cannot ask for more memory.
        content = read_bytes(path)
        if content.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=BytesIO(content)).read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"{name} unpacks to more than {most_bytes} bytes")
        with tarfile.open(fileobj=BytesIO(content), mode="r:") as tar:
            # In memory, where no name and no link leads out of a folder.
            pairs = [(x.name, tar.extractfile(x)) for x in tar if x.isfile()]
            return {path: file.read() for path, file in pairs if file is not None}
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{name} is not a readable tar archive: {error}") from error


# Possible folders of the files, such as those of torchvision.
FOLDERS = {
    "mnist": ("mnist", "MNIST/raw", "."),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw", "."),
}
# Images and labels to train on, then those that are held out, as they are pinned.
IDX_FILES: dict[str, list[File]] = {name: [] for name in FOLDERS}
for _path, _file in PINS.items():
    _name = _path.partition("/")[0]
    if _name in IDX_FILES:
        IDX_FILES[_name].append(_file)


def mnist_images(name: str, data_dir: Path | None = None) -> tuple[Arrays, Arrays]:
    """Loads a data set of small grey images in 10 classes.

    Args:
        name: "mnist" or "fashion-mnist".
        data_dir: the data folder (see `downloads.folder`).

    Returns:
        The training and the held-out examples, each {"x": images (n, 28, 28) uint8,
        "y": labels (n,) int32}.

    Raises:
        ValueError: a file is missing or altered.

    Source: LeCun et al., "Gradient-based learning applied to document recognition",
    1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017.
    """
    paths = [
        _find_elsewhere(file, data_dir) or find(file, data_dir)
        for file in IDX_FILES[name]
    ]
    return _examples(paths[0], paths[1]), _examples(paths[2], paths[3])


def _find_elsewhere(file: File, data_dir: Path | None) -> Path | None:
    """Returns a file with the right checksum and another name or folder, if any."""
    checksums_by_name = {Path(file.path).name: file.sha256, **file.members}
    checksums_by_name |= {
        name.replace("-idx", ".idx"): checksum
        for name, checksum in file.members.items()
    }
    for place, name in product(FOLDERS[Path(file.path).parent.name], checksums_by_name):
        with suppress(OSError):
            path = folder(data_dir) / place / name
            if sha256(path) == checksums_by_name[name]:
                return path
    return None


def _examples(images: Path, labels: Path) -> Arrays:
    """Reads images with their labels."""
    return {"x": read_idx(images), "y": read_idx(labels).astype(np.int32)}


def read_idx(path: Path) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, compressed if its name ends in .gz.

    It has been compared with its checksum, so that its form is known.
    """
    content = read_bytes(path)
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    # The header is 0, 0, 8 for unsigned bytes, the number of dimensions, and each
    # dimension as four bytes, the high one first.
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


FOLDER = "cifar-10-batches-py/"
CIFAR = PINS["cifar-10/cifar-10-python.tar.gz"]
CIFAR_BYTES = 1 << 28  # the archive unpacks to 186 MB

# The functions that a pickled array calls: any other could run a program.
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.ndarray(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def cifar_images(data_dir: Path | None = None) -> tuple[Arrays, Arrays]:
    """Loads CIFAR-10: small colour images in 10 classes.

    Args:
        data_dir: the data folder (see `downloads.folder`).

    Returns:
        The 50,000 training and the 10,000 held-out examples, each {"x": images
        (n, 32, 32, 3) uint8, "y": labels (n,) int32}.

    Raises:
        ValueError: the file is missing, altered or malformed.

    Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    return read_cifar(find(CIFAR, data_dir))


def read_cifar(path: Path) -> tuple[Arrays, Arrays]:
    """Reads an archive of batches, in memory; "test_batch" is held out.

    It has been compared with its checksum, so that its form is known.

    Raises:
        ValueError: a member asks for other objects than arrays.
    """
    content_by_name = members(path, CIFAR_BYTES, str(path))
    batch_by_name = {
        name: _batch(content_by_name[name], f"{path}: {name}")
        for name in sorted(content_by_name)
        if name.startswith((f"{FOLDER}data_batch_", f"{FOLDER}test_batch"))
    }
    test_batch = batch_by_name.pop(f"{FOLDER}test_batch")
    train = jax.tree.map(lambda *x: np.concatenate(x), *batch_by_name.values())
    return train, test_batch


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
        x = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
        return {"x": np.ascontiguousarray(x), "y": np.array(batch["labels"], np.int32)}
    # A pickle may raise any error.
    except Exception as error:
        raise ValueError(f"{name} cannot be unpickled: {error}") from error


# The tar file that `pack` makes, and its gzip; pins.toml explains why.
TAR = PINS["fsdd/fsdd-recordings.tar"]
TAR_GZ = PINS["fsdd/fsdd-recordings.tar.gz"]
SPEECH_BYTES = 1 << 26  # the tag's archive unpacks to 24 MB
NAME = re.compile(r"(?:.*/)?(recordings/(\d)_([a-z]+)_(\d+)\.wav)")

RATE = 8000  # samples per second
WINDOW = 200  # samples of a frame, 25 ms
HOP = 128  # samples from frame to frame, 16 ms
FFT = 256
BANDS = 40
LONGEST = 142  # frames of any recording
FLOOR = 1e-6  # the lowest power of a band, as digital silence has none


class Recording(NamedTuple):
    """One spoken digit.

    Attributes:
        digit: 0 to 9.
        speaker: the speaker's name.
        take: the index in its name, 0 to 49; 0 to 4 are held out.
        samples: (n,) int16, 8,000 per second.
    """

    digit: int
    speaker: str
    take: int
    samples: np.ndarray


def recordings(data_dir: Path | None = None) -> list[Recording]:
    """Loads the 3,000 recordings: six speakers say each digit 50 times.

    Args:
        data_dir: the data folder (see `downloads.folder`).

    Raises:
        ValueError: the file is missing, altered or malformed.

    Source: Jackson et al., Free Spoken Digit Dataset, v1.0.10, 2020.
    """
    is_served = (folder(data_dir) / TAR_GZ.path).exists()
    path = find(TAR_GZ, data_dir) if is_served else find(TAR, data_dir, pack)
    contents_by_name = members(path, SPEECH_BYTES, str(path))
    return [_recording(name, wav) for name, wav in contents_by_name.items()]


def pack(path: Path) -> bytes:
    """Packs the recordings of the repository's archive into reproducible bytes.

    Raises:
        ValueError: the archive cannot be read.
    """
    # The archive cannot be pinned, because its bytes depend on the server's gzip.
    contents_by_name = members(path, SPEECH_BYTES, "the archive")
    wavs = {}
    for name, content in contents_by_name.items():
        match = NAME.fullmatch(name)
        if match:
            wavs[match[1]] = content
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(wavs):
            # Time 0, user 0 and mode 0644.
            member = tarfile.TarInfo(name)
            member.size = len(wavs[name])
            tar.addfile(member, BytesIO(wavs[name]))
    return packed.getvalue()


def _recording(name: str, content: bytes) -> Recording:
    """Reads one member of an archive that has been compared with its checksum."""
    with wave.open(BytesIO(content)) as wav:
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    [(_, digit, speaker, take)] = NAME.findall(name)
    return Recording(int(digit), speaker, int(take), samples)


def _triangles() -> np.ndarray:
    """Weights (FFT / 2 + 1, BANDS) of triangles that overlap by half, even in mel."""
    bins = np.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
    # Perceived pitch in mel, and back (O'Shaughnessy, 1987; the formula of HTK).
    highest = 2595 * np.log10(1 + bins[-1, 0] / 700)
    ends = 700 * (10 ** (np.linspace(0, highest, BANDS + 2) / 2595) - 1)
    low = ends[:-2]
    middle = ends[1:-1]
    high = ends[2:]
    rising = (bins - low) / (middle - low)
    falling = (high - bins) / (high - middle)
    return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


HANN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
TRIANGLES = _triangles()


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Computes log-mel features: 40 bands from 0 to 4 kHz, a frame every 16 ms.

    Args:
        samples: (n,) int16, 8,000 per second; padded if shorter than a window.

    Returns:
        (frames, 40) float32: the log of each band's power, at least log(1e-6), with
        samples scaled to -1 to 1. Frames that would reach past the end are left out.
    """
    sound = samples.astype(np.float32) / 32768
    sound = np.pad(sound, (0, max(WINDOW - len(sound), 0)))
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]
    spectrum = np.fft.rfft(frames * HANN, FFT)  # (frames, FFT / 2 + 1)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    return np.log(np.maximum(power @ TRIANGLES, FLOOR))


def spoken_digits(
    data_dir: Path | None = None, frames: int = 64
) -> tuple[Arrays, Arrays, np.ndarray]:
    """Loads the recordings as log-mel features of one length.

    Args:
        data_dir: the data folder (see `downloads.folder`).
        frames: number of frames of each example, at least 1; longer recordings are cut.

    Returns:
        The 2,700 training and the 300 held-out examples, each {"x": features
        (n, frames, 40) float32, "length": frames of the recording itself, (n,) int32,
        "y": digits (n,) int32}. Each band has mean 0 and deviation 1 over the training
        recordings' own frames; the frames after them are 0. Then the speaker of each
        training example, (2700,) int32: an index in the sorted names.

    Raises:
        ValueError: the file is missing, altered or malformed.
    """
    loaded = recordings(data_dir)
    features = [log_mel(recording.samples)[:frames] for recording in loaded]
    # The first takes of each digit and speaker.
    held_out = np.array([recording.take < 5 for recording in loaded])
    training_features = np.concatenate(
        [f for f, h in zip(features, held_out, strict=True) if not h]
    )
    # From training recordings only: held-out ones must not influence their own test.
    mean = training_features.mean(0, np.float64)
    deviation = training_features.std(0, np.float64)
    x = np.zeros((len(loaded), frames, BANDS), np.float32)
    for row, feature in zip(x, features, strict=True):
        row[: len(feature)] = (feature - mean) / deviation
    arrays = {
        "x": x,
        "length": np.array([len(feature) for feature in features], np.int32),
        "y": np.array([recording.digit for recording in loaded], np.int32),
    }
    train = {name: array[~held_out] for name, array in arrays.items()}
    test = {name: array[held_out] for name, array in arrays.items()}
    _, speakers = np.unique([r.speaker for r in loaded], return_inverse=True)
    return train, test, speakers.astype(np.int32)[~held_out]
