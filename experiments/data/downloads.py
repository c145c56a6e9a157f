"""Data files: found or downloaded, and used only if they match their checksums."""

import hashlib
import os
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn
from urllib.parse import urlsplit

from filelock import FileLock
from platformdirs import user_cache_path
from rich.console import Console
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Column

from experiments.command.stopping import Terminated, handling, say
from experiments.command.terminal import bar_column
from experiments.files import Damaged, make_folder, open_regular, replacing

TIMEOUT = (10, 60)  # seconds: to connect, and between bytes

Convert = Callable[[Path], bytes]


class File(NamedTuple):
    """A data file with a pinned checksum.

    Attributes:
        path: the path below the data folder.
        size: the size in bytes.
        sha256: the SHA-256 checksum, in hexadecimal.
        urls: the official source, and then its mirrors.
        members: the SHA-256 of the files in an archive, by name.
    """

    path: str
    size: int
    sha256: str
    urls: Sequence[str]
    members: Mapping[str, str] = {}


_PINNED = tomllib.loads(Path(__file__).with_name("pins.toml").read_text("utf-8"))
PINS = {path: File(path, **pin) for path, pin in _PINNED.items()}


def folder(data_dir: Path | None = None) -> Path:
    """Returns data_dir, else $SYNCALGOS_DATA, else the user's cache folder."""
    chosen = data_dir or os.environ.get("SYNCALGOS_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return user_cache()


def user_cache() -> Path:
    """Returns the user's cache folder, such as ~/.cache/syncalgos."""
    return user_cache_path("syncalgos")


def find(
    file: File, data_dir: Path | None = None, convert: Convert | None = None
) -> Path:
    """Returns the path of a data file whose checksum is right.

    A missing file is downloaded. An existing one is never written to, so a data folder
    may be read-only.

    Args:
        file: the file to find.
        data_dir: the data folder; None means $SYNCALGOS_DATA or the user's cache.
        convert: makes the file from the download; None if the download is the file.

    Raises:
        ValueError: the file differs from its pin, or cannot be downloaded; then the one
            line says how to get it.
    """
    path = folder(data_dir) / file.path
    with reading(path):
        try:
            digest = sha256(path)
        except FileNotFoundError:
            _download(file, path, convert)
            return path
        size = path.stat().st_size
    if digest != file.sha256:
        raise ValueError(
            f"{path} is altered or incomplete: its SHA-256 is {digest} ({size} bytes), "
            f"not {file.sha256} ({file.size} bytes). Remove it to download it again"
        )
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts an OSError to a ValueError in one line that names the file."""
    try:
        yield
    except Damaged as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(file: File, path: Path, convert: Convert | None) -> None:
    """Downloads a file, or raises a ValueError and leaves no file."""
    problems = []
    try:
        with make_folder(path.parent), _making(path):
            for url in file.urls:
                if path.exists():  # another process has made it meanwhile
                    break
                problem = _make(file, path, url, convert)
                if problem:
                    problems.append(f"{url}: {problem}")
        if path.exists():
            return
    except OSError as error:
        problems.append(f"{path.parent} cannot be written: {error.strerror or error}")
    if convert is None:
        raise ValueError(
            f"{file.path} is missing and cannot be downloaded ({'; '.join(problems)}): "
            f"put it in {path.parent} ({file.size} bytes, SHA-256 {file.sha256})"
        )
    raise ValueError(
        f"{file.path} is missing and cannot be downloaded ({'; '.join(problems)}): put "
        f"it, or the file from that address, in {path.parent} ({file.size} bytes, "
        f"SHA-256 {file.sha256})"
    )


def make_once(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls a function to write a file if it is missing, in one process at a time.

    A signal ends this at once.

    Args:
        path: the path of the file.
        write: writes the content; after an error there is no file.

    Raises:
        ValueError: the folder cannot be written.
    """
    if path.exists():
        return
    try:
        with _making(path):
            if not path.exists():
                with replacing(path) as part:
                    write(part)
    except OSError as error:
        raise ValueError(
            f"{path.parent} cannot be written: {error.strerror or error}: use another "
            "--data-dir"
        ) from error


@contextmanager
def _making(path: Path) -> Iterator[None]:
    """Makes a file's folder, and keeps other processes from making the file.

    A signal ends this at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_name(f".{path.name}.lock")
    lock = FileLock(lock_path)
    with handling(_stop, kept_handlers=(None, signal.SIG_IGN)):
        with suppress(OSError):  # not all file systems have locks
            lock.acquire()
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may be read-only
                lock_path.unlink(missing_ok=True)
            lock.release()


def _make(file: File, path: Path, url: str, convert: Convert | None) -> str:
    """Makes a file from an address, or from a local copy of that download.

    Returns the reason if the source failed, or the file differs from its pin; else "".
    """
    served = path.with_name(url.rpartition("/")[2])
    is_here = convert is not None and served.exists()
    host = served if is_here else urlsplit(url).hostname
    try:
        with replacing(path) as part:
            if not is_here:
                size = decimal(file.size, precision=3)
                say(f"downloading {file.path} ({size}) from {host}")
                # The size of a download before conversion is not pinned: it may be
                # larger.
                total = file.size if convert is None else None
                _receive(url, part, total or 2 * file.size, total)
            if convert is not None:
                content = convert(served if is_here else Path(part.name))
                part.seek(0)
                part.truncate()
                part.write(content)
                part.flush()
            digest = sha256(Path(part.name))
            if digest != file.sha256 and is_here:
                raise ValueError(f"its conversion has SHA-256 {digest}")
            if digest != file.sha256:
                raise ValueError(f"its SHA-256 is {digest}")
    except ValueError as error:
        say(f"{host}: {error}")
        return str(error)
    return ""


def _receive(url: str, out: BinaryIO, max_bytes: int, total: int | None) -> None:
    """Downloads at most `most` bytes; a ValueError says why it failed."""
    import requests

    try:
        with (
            requests.get(url, stream=True, timeout=TIMEOUT) as response,
            bar(total) as add,
        ):
            response.raise_for_status()
            for chunk in response.iter_content(1 << 16):
                add(out.write(chunk))
                if out.tell() > max_bytes:
                    raise ValueError(f"it sends more than {max_bytes} bytes")
    except requests.RequestException as error:
        raise ValueError(_reason(error)) from error
    out.flush()


@contextmanager
def bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a bar of bytes, which only a terminal shows."""
    console = Console(stderr=True)
    columns = (
        bar_column(console),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
    )
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bars:
        yield partial(bars.advance, bars.add_task("", total=total))


def _reason(error: Any) -> str:
    """Explains an error of requests in a few words."""
    from requests import exceptions

    # Their texts are a paragraph long.
    if error.response is not None:
        return f"HTTP {error.response.status_code}"
    # In this order: timeouts, proxy and TLS errors are also connection errors.
    reasons = {
        exceptions.Timeout: "no answer in time",
        exceptions.SSLError: "its TLS certificate is refused",
        exceptions.ProxyError: "no connection through the proxy",
        exceptions.ConnectionError: "the connection failed",
        exceptions.ChunkedEncodingError: "the connection broke off",
    }
    matching_reasons = (
        text for kind, text in reasons.items() if isinstance(error, kind)
    )
    return next(matching_reasons, type(error).__name__)


def _stop(number: int, frame: Any) -> NoReturn:
    """Ends a download at a signal, which the harness itself would only note."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated
