"""Free Spoken Digit Dataset: recordings of ten words, and their log-mel features."""

import re
import tarfile
import wave
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tasks.data import archives
from experiments.tasks.data.files import PINS, find, folder
from syncalgos import checks

# The tar file that `pack` makes, and its gzip; pins.toml explains why.
TAR = PINS["fsdd/fsdd-recordings.tar"]
TAR_GZ = PINS["fsdd/fsdd-recordings.tar.gz"]
MOST_BYTES = 1 << 26  # the tag's archive unpacks to 24 MB
NAME = re.compile(r"(?:.*/)?(recordings/(\d)_([a-z]+)_(\d+)\.wav)")

RATE = 8000  # samples per second
WINDOW = 200  # samples of a frame, 25 ms
HOP = 128  # samples from frame to frame, 16 ms
FFT = 256
BANDS = 40
LONGEST = 142  # frames of any recording
FLOOR = 1e-6  # the lowest power of a band, as digital silence has none

Arrays = dict[str, np.ndarray]


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
        data_dir: the data folder (see `files.folder`).

    Raises:
        ValueError: the file is missing, altered or malformed.

    Source: Jackson et al., Free Spoken Digit Dataset, v1.0.10, 2020.
    """
    if (folder(data_dir) / TAR_GZ.path).exists():
        path = find(TAR_GZ, data_dir)
    else:
        path = find(TAR, data_dir, pack)
    members = archives.members(path, MOST_BYTES, str(path))
    return [_recording(name, wav, path) for name, wav in members.items()]


def pack(path: Path) -> bytes:
    """Packs the recordings of the repository's archive into reproducible bytes.

    Raises:
        ValueError: the archive cannot be read, or a name leads out of its folder.
    """
    # The archive cannot be pinned, because its bytes depend on the server's gzip.
    found = archives.members(path, MOST_BYTES, "the archive")
    wavs = {m[1]: wav for name, wav in found.items() if (m := NAME.fullmatch(name))}
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(wavs):
            # Time 0, user 0 and mode 0644.
            member = tarfile.TarInfo(name)
            member.size = len(wavs[name])
            tar.addfile(member, BytesIO(wavs[name]))
    return packed.getvalue()


def _recording(name: str, content: bytes, path: Path) -> Recording:
    """Reads one member of the archive."""
    if not (match := NAME.fullmatch(name)):
        raise ValueError(f"{path}: {name} is not recordings/DIGIT_SPEAKER_TAKE.wav")
    try:
        with wave.open(BytesIO(content)) as wav:
            form = wav.getnchannels(), wav.getsampwidth(), wav.getframerate()
            samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    except (EOFError, ValueError, wave.Error) as error:
        raise ValueError(f"{path}: {name} is not a WAV file: {error}") from error
    if form != (1, 2, RATE):
        raise ValueError(
            f"{path}: {name} must have 1 channel of 2 bytes at {RATE} Hz, got {form}"
        )
    return Recording(int(match[2]), match[3], int(match[4]), samples)


def _mel(hertz: np.ndarray) -> np.ndarray:
    """Converts to perceived pitch (O'Shaughnessy, 1987; the formula of HTK)."""
    return 2595 * np.log10(1 + hertz / 700)


def _triangles() -> np.ndarray:
    """Weights (FFT / 2 + 1, BANDS) of triangles that overlap by half, even in mel."""
    bins = np.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
    ends = 700 * (10 ** (np.linspace(0, _mel(bins[-1, 0]), BANDS + 2) / 2595) - 1)
    low, middle, high = ends[:-2], ends[1:-1], ends[2:]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
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
        data_dir: the data folder (see `files.folder`).
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
    checks.whole("frames", frames, least=1)
    loaded = recordings(data_dir)
    features = [log_mel(recording.samples)[:frames] for recording in loaded]
    # The first takes of each digit and speaker.
    held_out = np.array([recording.take < 5 for recording in loaded])
    own = np.concatenate([f for f, h in zip(features, held_out, strict=True) if not h])
    # From training recordings only: held-out ones must not influence their own test.
    mean, deviation = own.mean(0, np.float64), own.std(0, np.float64)
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
