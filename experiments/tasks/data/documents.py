"""Documents of text, read piece by piece, as files may be larger than memory."""

import codecs
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tasks.data.files import sha256

# Files of rows, by the builder of `datasets` that reads them; others are plain text.
ROWS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
HUB = "hf:"
PIECE = 2**16  # bytes of a plain file that are read at once
NEEDED = "--task text needs {}: run pip install -e '.[text]' in the checkout"


class Documents(NamedTuple):
    """Documents of text, in their order.

    Attributes:
        where: the flag and its value, for errors.
        files: the files; each plain file, and each row of another file, is a document.
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

    def key(self) -> list[Any]:
        """Returns a key made from the contents of the files, not their names."""
        files = self.files
        if self.hub:  # a dataset may be a local folder
            files = sorted(x for x in Path(self.hub[0]).rglob("*") if x.is_file())
        held = []
        for path in files:
            with _reading(path):
                held.append((_builder(path), sha256(path)))
        return [self.hub, held, self.column]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yields text, and whether a document ends with it.

        Raises:
            ValueError: the text cannot be read; one line says why.
        """
        if self.hub:
            name, config, split = self.hub
            yield from self._rows(name, name=config, split=split)
        for path in self.files:
            if not (builder := _builder(path)):
                yield from _plain(path)
            elif path.stat().st_size:  # datasets refuses an empty file
                yield from self._rows(builder, data_files=glob.escape(str(path)))

    def _rows(self, builder: str, split: str = "train", **given: Any):
        """Yields the rows of a streamed dataset."""
        try:
            import datasets
        except ImportError:
            raise ValueError(NEEDED.format("datasets")) from None
        try:
            rows = datasets.load_dataset(builder, split=split, streaming=True, **given)
            for row in rows:
                yield from self._row(dict(row))
        except _Refused as error:
            raise ValueError(f"{self.where}: {error}") from None
        except Exception as error:  # it reads many formats, over networks
            first, *_ = str(error).splitlines() or [""]
            what = f"{type(error).__name__}: {first}"
            raise ValueError(f"{self.where}: {what}") from error

    def _row(self, row: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        if self.column not in row:
            have = ", ".join(row)
            raise _Refused(f"no column {self.column!r}: set --column to one of {have}")
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise _Refused(f"{self.column!r} holds {type(text).__name__}, not text")
        if text:
            yield text, True


class _Refused(ValueError):
    """A row that cannot be used."""


def find(flag: str, words: str, column: str) -> Documents:
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
        name, config, split, *more = [*words.removeprefix(HUB).split(":"), "", ""]
        if not name or len(more) > 2:
            raise ValueError(f"{where}: use hf:NAME, or hf:NAME:CONFIG:SPLIT")
        return Documents(where, (), (name, config or None, split or "train"), column)
    files: list[Path] = []
    for pattern in words.split(","):
        word = str(Path(pattern).expanduser())
        # The name of a file may look like a glob.
        named = glob.glob(glob.escape(word)) or sorted(glob.glob(word, recursive=True))
        found = [path for x in named if (path := Path(x)).is_file()]
        if not found:
            raise ValueError(f"{where}: there is no file {pattern}")
        files += found
    return Documents(where, tuple(files), None, column)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Converts an OSError to a ValueError in one line that names the file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{path} cannot be read: {why}") from error


def _builder(path: Path) -> str | None:
    """Returns the builder for a file of rows, maybe compressed; None for plain text."""
    return next((ROWS[x] for x in path.suffixes[-2:] if x in ROWS), None)


def _plain(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields a document from a file, in pieces that end with a line if possible."""
    rest, is_empty = "", True
    for text in _decoded(path):
        held, is_empty = rest + text, is_empty and not text
        # The end of a line is usually also the end of a token.
        end = held.rfind("\n") + 1 or len(held)
        if end:
            yield held[:end], False
        rest = held[end:]
    if rest:
        yield rest, False
    if not is_empty:
        yield "", True


def _decoded(path: Path) -> Iterator[str]:
    """Yields the text of a file as it is read."""
    decoder, end = codecs.getincrementaldecoder("utf-8")(), 0
    with _reading(path), path.open("rb") as file:
        for read in chain(iter(partial(file.read, PIECE), b""), [b""]):
            end += len(read)
            yield _text(decoder, read, end, path)


def _text(decoder: codecs.IncrementalDecoder, read: bytes, end: int, path: Path) -> str:
    """Decodes bytes that end before position `end`; no bytes mean the file's end."""
    start = end - len(read) - len(decoder.getstate()[0])
    try:
        return decoder.decode(read, final=not read)
    except UnicodeDecodeError as error:
        at, value = start + error.start, error.object[error.start]
        raise ValueError(f"{path} is not UTF-8: byte {at} is {value:#x}") from None
