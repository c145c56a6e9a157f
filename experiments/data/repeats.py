"""Documents of a text that stand in both of its parts."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

MOST_COMPARED = 2**28  # tokens, which take a few seconds
PIECE = 2**24  # tokens that are searched at once


class RepeatedDocuments(NamedTuple):
    """How many documents are not new.

    Attributes:
        num_train: the number of documents to train on.
        num_train_repeated: how many of them are copies of an earlier one.
        num_test: the number of held-out documents.
        num_test_repeated: how many of them are also documents to train on.
    """

    num_train: int
    num_train_repeated: int
    num_test: int
    num_test_repeated: int


def count_repeated_documents(
    train: np.ndarray, test: np.ndarray, end: int, is_one_text: bool
) -> RepeatedDocuments | None:
    """Compares the documents of two parts.

    Args:
        train: the tokens to train on.
        test: the held-out tokens.
        end: the token that follows each document.
        is_one_text: whether `test` goes on where `train` ends, in the midst of a
            document, which counts as held out.

    Returns:
        The numbers of documents that are not empty; None if the text is too long to be
        compared.
    """
    if len(train) + len(test) > MOST_COMPARED:
        return None
    train_digests = []
    start = 0
    for stop in _ends(train, end):
        if stop > start:
            train_digests.append(_digest(train[start:stop]))
        start = stop + 1
    cut_document = train[start:] if is_one_text else train[:0]
    test_digests = []
    start = 0
    for stop in _ends(test, end):
        if stop + len(cut_document) > start:
            test_digests.append(_digest(cut_document, test[start:stop]))
        cut_document = train[:0]
        start = stop + 1
    known_digests = set(train_digests)
    return RepeatedDocuments(
        num_train=len(train_digests),
        num_train_repeated=len(train_digests) - len(known_digests),
        num_test=len(test_digests),
        num_test_repeated=sum(digest in known_digests for digest in test_digests),
    )


def _ends(row: np.ndarray, end: int) -> Iterator[int]:
    """Yields the places of the tokens that follow documents."""
    for start in range(0, len(row), PIECE):
        yield from (start + np.flatnonzero(row[start : start + PIECE] == end)).tolist()


def _digest(*parts: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.digest()
