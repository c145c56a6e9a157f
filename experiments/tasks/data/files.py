"""Data files: found or downloaded, and used only if they are what was pinned."""

import hashlib
import os
import secrets
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

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
    # Renamed when complete, so that no reader ever finds half a file.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    folders = (path.parent, *path.parent.absolute().parents)
    missing, problems = [x for x in folders if not x.exists()], []
    try:
        with handling(_stop, left=(None, signal.SIG_IGN)):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path.parent)
            is_made = _try_sources(file, part, convert, problems)
        if is_made:
            os.replace(part, path)
            return
    except OSError as error:
        problems.append(f"{path.parent} cannot be written: {error.strerror or error}")
    finally:
        _clean(part, missing)
    it = "it" if convert is None else "it, or the very file of that address,"
    raise ValueError(
        f"{file.path} is missing and cannot be downloaded ({'; '.join(problems)}): put "
        f"{it} in {path.parent} ({file.size} bytes, SHA-256 {file.sha256})"
    )


def _clean(part: Path, missing: Sequence[Path]) -> None:
    """Removes the part, and the folders that are new, while they are empty."""
    with suppress(OSError):  # the folder may be read-only, or hold other files
        part.unlink(missing_ok=True)
        for folder in missing:
            folder.rmdir()


def _try_sources(
    file: File, part: Path, convert: Convert | None, problems: list[str]
) -> bool:
    """Makes the part from the first source that serves it; adds why others did not."""
    for url in file.urls:
        host = urlsplit(url).hostname
        served = part.with_name(url.rpartition("/")[2])
        if convert is not None and served.exists():
            host, problem = served, _make(part, file, convert, served)
        else:
            size = decimal(file.size, precision=3)
            _log(f"downloading {file.path} ({size}) from {host}")
            problem = _make(part, file, convert, url)
        if not problem:
            return True
        _log(f"{host}: {problem}")
        problems.append(f"{url}: {problem}")
    return False


def _make(part: Path, file: File, convert: Convert | None, source: str | Path) -> str:
    """Makes the part from a file or an address; returns what is wrong, or ""."""
    from requests import RequestException

    try:
        with part.open("wb") as out:
            _fill(out, part, file, convert, source)
            os.fsync(out.fileno())
            found = sha256(part)
    except RequestException as error:
        return _reason(error)
    except ValueError as error:
        return str(error)
    if found == file.sha256:
        return ""
    if isinstance(source, str):
        return f"its SHA-256 is {found}"
    return f"what it makes has SHA-256 {found}"


def _fill(
    out: IO[bytes], part: Path, file: File, convert: Convert | None, source: str | Path
) -> None:
    """Downloads, if the source is an address, and converts, all under a lock."""
    # Not all file systems have locks.
    with suppress(OSError):
        _lock(out)
    if isinstance(source, str):
        # The size of a download to be converted is not pinned: it gets twice the room.
        total = file.size if convert is None else None
        _receive(source, out, total or 2 * file.size, total)
        source = part
    if convert is not None:
        part.write_bytes(convert(source))


def _receive(url: str, out: IO[bytes], most: int, total: int | None) -> None:
    """Downloads at most so many bytes, with a progress bar on a terminal."""
    import requests

    console = _console()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_hidden = not console.is_terminal
    with (
        requests.get(url, stream=True, timeout=TIMEOUT) as response,
        Progress(*columns, console=console, transient=True, disable=is_hidden) as bar,
    ):
        response.raise_for_status()
        task = bar.add_task("", total=total)
        for chunk in response.iter_content(1 << 16):
            out.write(chunk)
            bar.advance(task, len(chunk))
            _check_size(out.tell(), most)
    out.flush()


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it sends more than {most} bytes")


def _console() -> Console:
    """Rich's console on stderr, which prints text as it is."""
    return Console(
        stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False
    )


def _log(line: str) -> None:
    _console().print(line)


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


def _lock(part: IO[bytes]) -> None:
    """Marks a part as a living process's; raises an OSError if another holds it."""
    # An open file cannot be removed there: it needs no lock.
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(parent: Path) -> None:
    """Removes the parts of killed downloads; a lock marks those still under way."""
    for part in parent.glob(f".*{PART}"):
        # It is locked, or another process removed it first.
        with suppress(OSError), part.open("rb") as leftover:
            _lock(leftover)
            part.unlink()


def _stop(number: int, frame: Any) -> NoReturn:
    """Ends a download by a signal, of which the harness only takes note."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated
