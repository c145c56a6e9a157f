"""Data files: found or downloaded, and used only if they are what was pinned."""

import hashlib
import os
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from filelock import FileLock
from platformdirs import user_cache_path
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from experiments.exit_codes import Terminated, handling

TIMEOUT = (10, 60)  # seconds: to connect, and between bytes
PART = ".syncalgos.part"

Convert = Callable[[Path], bytes]


class File(NamedTuple):
    """A data file that is pinned.

    Attributes:
        path: below the data folder.
        size: in bytes.
        sha256: checksum, in hexadecimal.
        urls: addresses: the official source, then its mirrors.
        members: of an archive: the SHA-256 of its files by name.
    """

    path: str
    size: int
    sha256: str
    urls: Sequence[str]
    members: Mapping[str, str] = {}


PINS: dict[str, File] = {
    path: File(path, **pin)
    for path, pin in tomllib.loads(
        Path(__file__).with_name("pins.toml").read_text("utf-8")
    ).items()
}


def folder(data_dir: Path | None = None) -> Path:
    """The data folder: data_dir, else $SYNCALGOS_DATA, else the user's cache."""
    if chosen := data_dir or os.environ.get("SYNCALGOS_DATA"):
        return Path(chosen).expanduser()
    return user_cache()


def user_cache() -> Path:
    """The system's folder for files that can be made again; ~/.cache/syncalgos."""
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
        ValueError: in one line, that the file differs from its pin, or how to get it
            where it cannot be downloaded.
    """
    path = folder(data_dir) / file.path
    try:
        found = sha256(path)
        if found != file.sha256:
            raise ValueError(
                f"{path} is altered or incomplete: its SHA-256 is {found} "
                f"({path.stat().st_size} bytes), not {file.sha256} ({file.size} "
                "bytes); it is left as it is: remove it to download it anew"
            )
    except FileNotFoundError:
        _download(file, path, convert)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    return path


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(file: File, path: Path, convert: Convert | None) -> None:
    """Downloads a file, or raises a ValueError and leaves nothing in its place."""
    folders = (path.parent, *path.parent.absolute().parents)
    missing, problems = [x for x in folders if not x.exists()], []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with handling(_stop, left=(None, signal.SIG_IGN)), _alone(path) as part:
            is_made = _try_sources(file, path, part, convert, problems)
        if is_made:
            return
    except OSError as error:
        problems.append(f"{path.parent} cannot be written: {error.strerror or error}")
    finally:
        _remove_empty(missing)
    it = "it" if convert is None else "it, or the very file of that address,"
    raise ValueError(
        f"{file.path} is missing and cannot be downloaded ({'; '.join(problems)}): put "
        f"{it} in {path.parent} ({file.size} bytes, SHA-256 {file.sha256})"
    )


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, the innermost first, up to one that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Waits until no other process makes a file; yields the part to make it from."""
    part, held = (path.with_name(f".{path.name}{x}") for x in (PART, ".lock"))
    lock = FileLock(held)
    with suppress(OSError):  # not all file systems have locks
        lock.acquire()
    try:
        yield part
    finally:
        with suppress(OSError):  # the folder may be read-only
            part.unlink(missing_ok=True)
            held.unlink(missing_ok=True)
        lock.release()


def _try_sources(
    file: File, path: Path, part: Path, convert: Convert | None, problems: list[str]
) -> bool:
    """Makes a file from the first source that serves it; adds why others did not."""
    if path.exists():  # another process has made it meanwhile
        return True
    for url in file.urls:
        served = part.with_name(url.rpartition("/")[2])
        if convert is not None and served.exists():
            host, source = served, served
        else:
            host, source = urlsplit(url).hostname, url
            size = decimal(file.size, precision=3)
            _say(f"downloading {file.path} ({size}) from {host}")
        problem = _problem(part, file, convert, source)
        if not problem:
            part.replace(path)  # complete: no reader ever finds half a file
            return True
        _say(f"{host}: {problem}")
        problems.append(f"{url}: {problem}")
    return False


def _problem(
    part: Path, file: File, convert: Convert | None, source: str | Path
) -> str:
    """Makes the part from a file or an address; returns what is wrong, or ""."""
    from requests import RequestException

    try:
        if isinstance(source, str):
            # The size of a download to be converted is not pinned: it gets more room.
            total = file.size if convert is None else None
            _receive(source, part, total or 2 * file.size, total)
        if convert is not None:
            part.write_bytes(convert(part if isinstance(source, str) else source))
    except RequestException as error:
        return _reason(error)
    except ValueError as error:
        return str(error)
    with part.open("rb+") as made:
        os.fsync(made.fileno())
    found = sha256(part)
    if found == file.sha256:
        return ""
    is_download = isinstance(source, str)
    return f"{'its SHA-256 is' if is_download else 'what it makes has SHA-256'} {found}"


def _receive(url: str, part: Path, most: int, total: int | None) -> None:
    """Downloads at most so many bytes, with a progress bar on a terminal."""
    import requests

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_hidden = not console.is_terminal
    with (
        part.open("wb") as out,
        requests.get(url, stream=True, timeout=TIMEOUT) as response,
        Progress(*columns, console=console, transient=True, disable=is_hidden) as bar,
    ):
        response.raise_for_status()
        task = bar.add_task("", total=total)
        for chunk in _bounded(response.iter_content(1 << 16), most):
            out.write(chunk)
            bar.advance(task, len(chunk))


def _bounded(chunks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Yields chunks; raises a ValueError where they are more than so many bytes."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise ValueError(f"it sends more than {most} bytes")
        yield chunk


def _reason(error: OSError) -> str:
    """Explains a failed download in a few words."""
    # The text of requests' own errors fills a paragraph.
    from requests import exceptions

    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    # In this order: a timeout, a proxy's and a TLS error are connection errors, too.
    reasons = {
        exceptions.Timeout: "no answer in time",
        exceptions.SSLError: "its TLS certificate is refused",
        exceptions.ProxyError: "no connection through the proxy",
        exceptions.ConnectionError: "the connection failed",
        exceptions.ChunkedEncodingError: "the connection broke off",
    }
    known = (text for kind, text in reasons.items() if isinstance(error, kind))
    return next(known, type(error).__name__)


def _stop(number: int, frame: Any) -> NoReturn:
    """Ends a download by a signal, of which the harness only takes note."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _say(text: str) -> None:
    """Prints a line on stderr; Rich leaves control characters out."""
    console = Console(stderr=True, soft_wrap=True, emoji=False, highlight=False)
    with suppress(OSError, ValueError):  # the latter: it is closed
        console.print(text, markup=False)
