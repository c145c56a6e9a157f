"""Text as tokens, written once to a file that need not fit in memory."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from experiments.tasks.data import files
from experiments.tasks.data.documents import NEEDED, Documents
from syncalgos import checks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = 1  # of the files: those of another version are not used
LEAST = 257  # tokens of a trained tokenizer: the bytes and the end of a text
TRAINED_ON = 2**25  # characters, which are enough to train a tokenizer
BATCH = 2**21  # characters that are tokenized at once


class Tokens(NamedTuple):
    """A text as tokens.

    Attributes:
        values: (tokens,), read from the file on demand.
        sha256: the checksum of the values.
    """

    values: np.ndarray
    sha256: str


def from_file(path: Path, end: str) -> "Tokenizer":
    """Reads a tokenizer.json.

    Args:
        path: the file.
        end: the special token that ends a document.

    Raises:
        ValueError: it is not a tokenizer, or lacks the token.
    """
    package = _package()
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"--tokenizer {path}: {error}") from None
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    if end not in special:
        raise ValueError(
            f"--tokenizer {path}: there is no special token {end!r}"
            f"{checks.nearest(end, special)} (set --end-of-text to one of: "
            f"{', '.join(special) or 'none'})"
        )
    return _plain(tokenizer)


def trained(
    documents: Documents, key: list[Any], size: int, end: str, folder: Path
) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer on the beginning of a text, or loads it.

    Args:
        documents: the text.
        key: the key of the documents.
        size: number of tokens; a short text gives fewer.
        end: the special token that ends a document.
        folder: the folder for the tokenizer's file.

    Raises:
        ValueError: a file cannot be read or written.
    """
    package = _package()
    path = folder / f"{_digest('tokenizer', key, size, end)}.tokenizer.json"

    def write(part: Path) -> None:
        files.say(f"training a tokenizer of {size} tokens: {path}")
        made = package.Tokenizer(package.models.BPE())
        level = package.pre_tokenizers.ByteLevel
        made.pre_tokenizer = level(add_prefix_space=False)
        made.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[end],
            initial_alphabet=level.alphabet(),
            show_progress=Console(stderr=True).is_terminal,
        )
        made.train_from_iterator(_beginning(documents), trainer)
        part.write_text(made.to_str(), "utf-8")
        _keep(part, path)

    _once(path, write)
    try:
        return from_file(path, end)
    except ValueError:
        raise ValueError(f"{path} is damaged: remove it") from None


def tokenized(
    documents: Documents,
    key: list[Any],
    tokenizer: "Tokenizer",
    end: str,
    limit: int | None,
    folder: Path,
) -> Tokens:
    """Tokenizes a text into a file, or finds the file.

    Args:
        documents: the text.
        key: the key of the documents.
        tokenizer: the result of `from_file` or `trained`.
        end: the special token that follows each document.
        limit: the largest number of tokens; None takes all.
        folder: the folder for the file.

    Raises:
        ValueError: a file cannot be read or written, or the text is empty.
    """
    name = _digest("tokens", key, tokenizer.to_str(), end, limit)
    path, note = folder / f"{name}.tokens", folder / f"{name}.json"
    dtype = np.dtype(np.uint16 if size_of(tokenizer) <= 2**16 else np.uint32)

    def write(part: Path) -> None:
        files.say(f"tokenizing {documents.where.partition(' ')[2]}: {path}")
        found = _write(part, documents, tokenizer, end, limit, dtype)
        _keep(part, path)
        part.write_text(json.dumps(found))
        _keep(part, note)
        _date(note, path)

    # The note is written last, so a file with a note is complete.
    _once(note, write)
    try:
        found = json.loads(note.read_bytes())
        is_whole = path.stat().st_size == found["tokens"] * dtype.itemsize
        sha256 = found["sha256"]
        # At each start it would read all of a large file.
        if is_whole and path.stat().st_mtime_ns != note.stat().st_mtime_ns:
            is_whole = files.sha256(path) == sha256
        if is_whole:
            _date(note, path)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        raise damaged(path) from None
    if not is_whole:
        raise damaged(path)
    return Tokens(np.memmap(path, dtype, "r"), sha256)


def _date(note: Path, path: Path) -> None:
    """Gives a note the time of its file, by which a change of the file is seen."""
    time = path.stat().st_mtime_ns
    with suppress(OSError):  # it may be read-only: then each start checks the file
        os.utime(note, ns=(time, time))


def damaged(path: Path) -> ValueError:
    """Makes the error for a damaged file of tokens or its note."""
    note = path.with_suffix(".json").name
    return ValueError(f"{path} or {note} is damaged: remove both")


def size_of(tokenizer: "Tokenizer") -> int:
    """Returns the number of tokens that a model has to distinguish."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def byte_counts(tokenizer: "Tokenizer") -> np.ndarray | None:
    """Returns the bytes of text in each token, (tokens,) int32; 0 for special ones.

    Returns None if the tokenizer's tokens do not stand for bytes.
    """
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return None
    counts = np.zeros(size_of(tokenizer), np.int32)
    # Such a tokenizer writes each byte as one character.
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        counts[number] = len(token)
    for number, token in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if token.special else len(token.content.encode())
    return counts


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ValueError(NEEDED.format("tokenizers")) from None
    return tokenizers


def _plain(tokenizer: "Tokenizer") -> "Tokenizer":
    """Returns a tokenizer that neither truncates a text nor adds to it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # <|endoftext|> within a text is not read as the special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _beginning(documents: Documents) -> Iterator[str]:
    """Yields the text that a tokenizer is trained on."""
    left = TRAINED_ON
    for text, _ in documents.pieces():
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _batches(documents: Documents) -> Iterator[tuple[list[str], list[bool]]]:
    """Yields some pieces at a time, and which of them end a document."""
    texts: list[str] = []
    ends: list[bool] = []
    held = 0
    for text, is_end in documents.pieces():
        texts.append(text)
        ends.append(is_end)
        held += len(text)
        if held >= BATCH:
            yield texts, ends
            texts, ends, held = [], [], 0
    if texts:
        yield texts, ends


def _write(
    path: Path,
    documents: Documents,
    tokenizer: "Tokenizer",
    end: str,
    limit: int | None,
    dtype: np.dtype,
) -> dict[str, Any]:
    """Writes a text as tokens, with a progress bar on a terminal; returns its note."""
    count, digest, last = 0, hashlib.sha256(), [tokenizer.token_to_id(end)]
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_hidden = not console.is_terminal
    with (
        path.open("wb") as out,
        Progress(*columns, console=console, transient=True, disable=is_hidden) as bar,
    ):
        shown = bar.add_task("", total=documents.bytes)
        for texts, ends in _batches(documents):
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            parts = [x.ids + last * e for x, e in zip(found, ends, strict=True)]
            made = np.concatenate([np.array(x, dtype) for x in parts])
            made = made[: None if limit is None else limit - count]
            digest.update(made.tobytes())
            out.write(made.tobytes())
            count += len(made)
            bar.advance(shown, sum(len(x.encode()) for x in texts))
            if count == limit:
                break
    if not count:
        raise ValueError(f"{documents.where}: it holds no text")
    if files.sha256(path) != digest.hexdigest():
        raise ValueError(f"{path} differs from what was written to it")
    return {"tokens": count, "sha256": digest.hexdigest()}


def _once(path: Path, write: Callable[[Path], None]) -> None:
    """Calls a function to write a file if it is missing, in one process at a time."""
    if path.exists():
        return
    with files.made(path) as part:
        if not path.exists():
            write(part)


def _keep(part: Path, path: Path) -> None:
    """Gives a complete file its name, so that no reader finds half a file."""
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    part.replace(path)


def _digest(*key: Any) -> str:
    return hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()[:32]
