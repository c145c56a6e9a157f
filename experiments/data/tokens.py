"""Text as numbers: characters, words, or tokens in a file larger than memory."""

import codecs
import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from rich.console import Console

from experiments.command.stopping import say
from experiments.data import downloads
from experiments.data.downloads import bar, make_once, reading, sha256
from experiments.files import open_regular, read_bytes, replacing
from syncalgos import checks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Files of rows, by the builder of `datasets` that reads them; others are plain text.
ROWS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
HUB = "hf:"
PIECE = 2**16  # bytes of a plain file that are read at once
VERSION = 1  # of the files: those of another version are not used
LEAST = 257  # tokens of a trained tokenizer: the bytes and the end of a text
TRAINED_ON = 2**25  # characters, which are enough to train a tokenizer
BATCH = 2**21  # characters that are tokenized at once

SHAKESPEARE = downloads.PINS["tinyshakespeare/input.txt"]


@dataclass(frozen=True)
class Documents:
    """Documents of text, in their order.

    Attributes:
        where: the flag and its value, for errors.
        files: the files, each once; each plain file, and each row of another file, is a
            document.
        hub: name, configuration and split of a dataset, in place of files.
        column: the column of the rows that has the text.
    """

    where: str
    files: tuple[Path, ...]
    hub: tuple[str, str | None, str] | None
    column: str

    @property
    def bytes(self) -> int | None:
        """The size of the text, if known before reading it."""
        if self.hub or any(_builder(path) for path in self.files):
            return None
        return sum(path.stat().st_size for path in self.files)

    @cached_property
    def key(self) -> list[Any]:
        """A key made from the contents of the files, not their names."""
        files = self.files
        held_files = []
        if self.hub:  # a dataset may be a local folder
            files = sorted(x for x in Path(self.hub[0]).rglob("*") if x.is_file())
        for path in files:
            with reading(path):
                held_files.append((_builder(path), sha256(path)))
        return [self.hub, held_files, self.column]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yields text, and whether a document ends with it.

        Raises:
            ValueError: the text cannot be read; one line says why.
        """
        if self.hub:
            name, config, split = self.hub
            yield from self._texts(name, split, name=config)
        for path in self.files:
            builder = _builder(path)
            if not builder:
                yield from _read_plain_text(path)
            elif path.stat().st_size:  # datasets refuses an empty file
                yield from self._texts(builder, data_files=glob.escape(str(path)))

    def _texts(
        self, builder: str, split: str = "train", **options: Any
    ) -> Iterator[tuple[str, bool]]:
        """Yields the texts of the rows of a streamed dataset, each a document."""
        for row in self._rows(builder, split, **options):
            if self.column not in row:
                raise ValueError(
                    f"{self.where}: no column {self.column!r}: set --column to one of "
                    f"{', '.join(row)}"
                )
            text = row[self.column]
            if not isinstance(text, str | None):
                raise ValueError(
                    f"{self.where}: {self.column!r} holds {type(text).__name__}, not "
                    "text: set --column to a column of text"
                )
            if text:
                yield text, True

    def _rows(
        self, builder: str, split: str, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the rows of a streamed dataset."""
        load = _package("datasets").load_dataset
        try:
            yield from map(dict, load(builder, split=split, streaming=True, **options))
        except Exception as error:  # it reads many formats, over networks
            lines = str(error).splitlines()
            first_line = lines[0] if lines else ""
            raise ValueError(
                f"{self.where}: {type(error).__name__}: {first_line}"
            ) from error


def find_documents(flag: str, words: str, column: str) -> Documents:
    """Finds the documents that a user names.

    Args:
        flag: the flag, for errors.
        words: paths or globs separated by commas, or hf:NAME, hf:NAME:CONFIG or
            hf:NAME:CONFIG:SPLIT, a dataset of Hugging Face; SPLIT is train by default.
        column: the column of rows that has the text.

    Raises:
        ValueError: there are no such documents.
    """
    where = f"{flag} {words}"
    if words.startswith(HUB):
        fields = words.removeprefix(HUB).split(":")
        if not fields[0] or len(fields) > 3:
            raise ValueError(f"{where}: use hf:NAME, or hf:NAME:CONFIG:SPLIT")
        name, config, split = [*fields, "", ""][:3]
        return Documents(where, (), (name, config or None, split or "train"), column)
    paths_by_target: dict[Path, Path] = {}
    for pattern in words.split(","):
        word = str(Path(pattern).expanduser())
        # The name of a file may look like a glob.
        names = glob.glob(glob.escape(word)) or sorted(glob.glob(word, recursive=True))
        paths = [path for path in map(Path, names) if path.is_file()]
        if not paths:
            raise ValueError(f"{where}: there is no file {pattern}")
        for path in paths:
            paths_by_target[path.resolve()] = path
    return Documents(where, (*paths_by_target.values(),), None, column)


def _builder(path: Path) -> str | None:
    """Returns the builder for a file of rows, maybe compressed; None for plain text."""
    return next((ROWS[x] for x in path.suffixes[-2:] if x in ROWS), None)


def _read_plain_text(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields a document from a file, in pieces that end with a line if possible."""
    unread_text = ""
    is_empty = True
    for text in _decode_text(path):
        pending_text = unread_text + text
        is_empty = is_empty and not text
        # The end of a line is usually also the end of a token.
        end = pending_text.rfind("\n") + 1 or len(pending_text)
        if end:
            yield pending_text[:end], False
        unread_text = pending_text[end:]
    if unread_text:
        yield unread_text, False
    if not is_empty:
        yield "", True


def _decode_text(path: Path) -> Iterator[str]:
    """Yields the text of a file as it is read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    end = 0
    with reading(path), open_regular(path) as file:
        for read in chain(iter(partial(file.read, PIECE), b""), [b""]):
            start = end - len(decoder.getstate()[0])
            end += len(read)
            try:
                yield decoder.decode(read, final=not read)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8: byte {start + error.start} is "
                    f"{error.object[error.start]:#x}: convert it to UTF-8"
                ) from None


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
    package = _package("tokenizers")
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
    # It neither truncates a text nor adds to it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # <|endoftext|> within a text is not read as the special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def train_tokenizer(
    documents: Documents, size: int, end: str, folder: Path
) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer on the beginning of a text, or loads it.

    Args:
        documents: the text.
        size: number of tokens; a short text gives fewer.
        end: the special token that ends a document.
        folder: the folder for the tokenizer's file.

    Raises:
        ValueError: a file cannot be read or written.
    """
    package = _package("tokenizers")
    path = folder / f"{_digest('tokenizer', documents.key, size, end)}.tokenizer.json"

    def write(part: BinaryIO) -> None:
        say(f"training a tokenizer of {size} tokens: {path}")
        tokenizer = package.Tokenizer(package.models.BPE())
        level = package.pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[end],
            initial_alphabet=level.alphabet(),
            show_progress=Console(stderr=True).is_terminal,
        )
        tokenizer.train_from_iterator(_beginning(documents), trainer)
        part.write(tokenizer.to_str().encode())

    make_once(path, write)
    try:
        return from_file(path, end)
    except ValueError:
        raise ValueError(f"{path} is damaged: remove it") from None


def tokenize_text(
    documents: Documents,
    tokenizer: "Tokenizer",
    end: str,
    limit: int | None,
    folder: Path,
) -> Tokens:
    """Tokenizes a text into a file, or finds the file.

    Args:
        documents: the text.
        tokenizer: the result of `from_file` or `trained`.
        end: the special token that follows each document.
        limit: the largest number of tokens; None takes all.
        folder: the folder for the file.

    Raises:
        ValueError: a file cannot be read or written, or the text is empty.
    """
    name = _digest("tokens", documents.key, tokenizer.to_str(), end, limit)
    path = folder / f"{name}.tokens"
    note = folder / f"{name}.json"
    dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)

    def write(part: BinaryIO) -> None:
        say(f"tokenizing {documents.where.partition(' ')[2]}: {path}")
        count = 0
        digest = hashlib.sha256()
        with replacing(path) as out:
            for token_block in _encode_text(documents, tokenizer, end, limit):
                values = np.array(token_block, dtype).tobytes()
                out.write(values)
                digest.update(values)
                count += len(token_block)
            if not count:
                raise ValueError(f"{documents.where}: it holds no text")
        part.write(json.dumps({"tokens": count, "sha256": digest.hexdigest()}).encode())

    # The note is written last, so a file with a note is complete.
    make_once(note, write)
    try:
        stored_note = json.loads(read_bytes(note))
        # At each start it would read all of a large file.
        file_status = path.stat()
        is_dated = file_status.st_mtime_ns == note.stat().st_mtime_ns
        is_whole = file_status.st_size == stored_note["tokens"] * dtype.itemsize
        if not (is_whole and (is_dated or sha256(path) == stored_note["sha256"])):
            raise make_damage_error(path)
        # By this time a change of the file is seen.
        with suppress(OSError):  # it may be read-only: then each start checks the file
            os.utime(note, ns=(file_status.st_mtime_ns, file_status.st_mtime_ns))
        return Tokens(np.memmap(path, dtype, "r"), stored_note["sha256"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        raise make_damage_error(path) from None


def make_damage_error(path: Path) -> ValueError:
    """Makes the error for a damaged file of tokens or its note."""
    note = path.with_suffix(".json").name
    return ValueError(f"{path} or {note} is damaged: remove both")


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """Returns the number of tokens that a model has to distinguish."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def byte_counts(tokenizer: "Tokenizer") -> np.ndarray | None:
    """Returns the bytes of text in each token, (tokens,) int32; 0 for special ones.

    Returns None if the tokenizer's tokens do not stand for bytes.
    """
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return None
    counts = np.zeros(vocabulary_size(tokenizer), np.int32)
    # Such a tokenizer writes each byte as one character.
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        counts[number] = len(token)
    for number, token in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if token.special else len(token.content.encode())
    return counts


def _package(name: str) -> Any:
    """Imports a package of the extra `text`."""
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(
            f"--task text needs {name}, which is not installed: run pip install -e "
            "'.[text]' in the checkout of syncalgos"
        ) from None


def _beginning(documents: Documents) -> Iterator[str]:
    """Yields the text that a tokenizer is trained on."""
    num_characters_left = TRAINED_ON
    for text, _ in documents.pieces():
        yield text[:num_characters_left]
        num_characters_left -= len(text)
        if num_characters_left <= 0:
            return


def _batches(documents: Documents) -> Iterator[list[tuple[str, bool]]]:
    """Yields some pieces at a time."""
    batch = []
    size = 0
    for piece in documents.pieces():
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _encode_text(
    documents: Documents, tokenizer: "Tokenizer", end: str, limit: int | None
) -> Iterator[list[Any]]:
    """Yields the tokens of a text, with a progress bar on a terminal."""
    count = 0
    last_tokens = [tokenizer.token_to_id(end)]
    with bar(documents.bytes) as advance:
        for batch in _batches(documents):
            texts = [text for text, _ in batch]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            pairs = zip(encodings, batch, strict=True)
            parts = (x.ids + last_tokens * is_end for x, (_, is_end) in pairs)
            token_ids = [*chain(*parts)][: None if limit is None else limit - count]
            yield token_ids
            count += len(token_ids)
            advance(sum(len(x.encode()) for x in texts))
            if count == limit:
                return


def _digest(*key: Any) -> str:
    return hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()[:32]


def shakespeare(data_dir: Path | None = None) -> str:
    """Loads "tiny Shakespeare": 40,000 lines of plays, in ASCII.

    Args:
        data_dir: the data folder (see `downloads.folder`).

    Raises:
        ValueError: the file is missing or altered.

    Source: Karpathy, char-rnn, 2015.
    """
    return read_bytes(downloads.find(SHAKESPEARE, data_dir)).decode("ascii")


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
    words = re.findall(r"[a-z']+", text.lower())
    counts = Counter(words)
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))
    code = {word: i for i, word in enumerate(vocabulary)}
    return np.array([code[word] for word in words], np.int32), vocabulary


def split(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the last tenth of a text: the part to train on, and the other."""
    end = int(len(codes) * 0.9)
    return codes[:end], codes[end:]


def windows(codes: np.ndarray, length: int, stride: int = 1) -> np.ndarray:
    """Returns the windows that begin at every stride-th code, (windows, length)."""
    view = np.lib.stride_tricks.sliding_window_view(codes, length)
    return np.ascontiguousarray(view[::stride])
