"""Shakespeare's plays as characters or words."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from experiments.tasks.data.files import PINS, find
from syncalgos import checks

SHAKESPEARE = PINS["tinyshakespeare/input.txt"]


def text(data_dir: Path | None = None) -> str:
    """Loads "tiny Shakespeare": 40,000 lines of plays, in ASCII.

    Args:
        data_dir: the data folder (see `files.folder`).

    Raises:
        ValueError: the file is missing or altered.

    Source: Karpathy, char-rnn, 2015.
    """
    return find(SHAKESPEARE, data_dir).read_bytes().decode("ascii")


def characters(text: str) -> tuple[np.ndarray, list[str]]:
    """Splits a text into characters.

    Returns:
        Codes, (n,) int32, and the sorted alphabet: character i has code i.
    """
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, codes = np.unique(points, return_inverse=True)
    return codes.astype(np.int32), [chr(point) for point in alphabet]


def words(text: str) -> tuple[np.ndarray, list[str]]:
    """Splits a text into lower-case words: runs of the letters a to z and '.

    Returns:
        Codes, (n,) int32, and the vocabulary, sorted by frequency and then by name:
        word i has code i.
    """
    found = re.findall(r"[a-z']+", text.lower())
    counts = Counter(found)
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))
    code = {word: i for i, word in enumerate(vocabulary)}
    return np.array([code[word] for word in found], np.int32), vocabulary


def split(codes: np.ndarray, held_out: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the last part of a text.

    Args:
        codes: the text, (n,).
        held_out: the held-out share, above 0 and below 1.

    Returns:
        The part to train on, and the held-out part.
    """
    checks.real("held_out", held_out, above=0, below=1)
    end = int(len(codes) * (1 - held_out))
    return codes[:end], codes[end:]


def windows(codes: np.ndarray, length: int, stride: int = 1) -> np.ndarray:
    """Returns the windows that begin at every stride-th code, (windows, length)."""
    view = np.lib.stride_tricks.sliding_window_view(codes, length)
    return np.ascontiguousarray(view[::stride])
