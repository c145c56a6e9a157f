"""Data files: found or downloaded, and used only if they are what was pinned."""

import hashlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from platformdirs import user_cache_path

from experiments.cli.errors import Terminated
from experiments.cli.terminal import say, size

TIMEOUT = (10, 60)  # seconds: to connect, and between bytes
PART = ".syncalgos.part"


class File(NamedTuple):
    """A data file that is pinned.

    Attributes:
        path: where it lies, below the data folder.
        size: its bytes.
        sha256: its checksum, in hexadecimal.
        urls: where it comes from: the official source, then its mirrors.
    """

    path: str
    size: int
    sha256: str
    urls: tuple[str, ...]


def folder(data_dir: Path | None = None) -> Path:
    """The data folder: data_dir, else $SYNCALGOS_DATA, else the user's cache."""
    if chosen := data_dir or os.environ.get("SYNCALGOS_DATA"):
        return Path(chosen).expanduser()
    return user_cache()


def user_cache() -> Path:
    """Where the user's system keeps what can be made again; ~/.cache/syncalgos."""
    return user_cache_path("syncalgos")


def find(
    file: File,
    data_dir: Path | None = None,
    convert: Callable[[Path], bytes] | None = None,
) -> Path:
    """Returns the path of a data file whose checksum is right.

    A file that is missing is downloaded. One that is there is never written to, so a
    data folder may be read-only.

    Args:
        file: what to find.
        data_dir: the data folder; None means $SYNCALGOS_DATA or the user's cache.
        convert: makes the file of what its urls serve; None if they serve the file.

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


def _download(file: File, path: Path, convert: Callable[[Path], bytes] | None) -> None:
    """Puts a file in its place, or raises a ValueError and leaves nothing there."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    made, failed = not path.parent.exists(), []
    with _interruptible():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path.parent)
            for url in file.urls:
                host = urlsplit(url).hostname
                served = path.parent / url.rpartition("/")[2]
                if convert is not None and served.exists():
                    host, problem = served, _convert(served, part, file, convert)
                else:
                    say(f"downloading {file.path} ({size(file.size)}) from {host}")
                    problem = _fetch(url, part, file, convert)
                if not problem:
                    os.replace(part, path)
                    return
                say(f"{host}: {problem}")
                failed.append(f"{url}: {problem}")
        except OSError as error:
            failed.append(f"{path.parent} cannot be written: {error.strerror or error}")
        finally:
            if part.exists():
                part.unlink()
            if made and path.parent.exists() and not any(path.parent.iterdir()):
                path.parent.rmdir()
    it = "it" if convert is None else "it, or the very file of that address,"
    raise ValueError(
        f"{file.path} is missing and cannot be downloaded ({'; '.join(failed)}): put "
        f"{it} in {path.parent} ({file.size} bytes, SHA-256 {file.sha256})"
    )


def _convert(
    served: Path, part: Path, file: File, convert: Callable[[Path], bytes]
) -> str:
    """Makes part of what the user put there; returns what is wrong, or nothing."""
    try:
        part.write_bytes(convert(served))
    except ValueError as error:
        return str(error)
    found = sha256(part)
    return "" if found == file.sha256 else f"what it makes has SHA-256 {found}"


def _fetch(
    url: str, part: Path, file: File, convert: Callable[[Path], bytes] | None
) -> str:
    """Downloads to part; returns what is wrong with it, or nothing."""
    import pooch
    import requests
    from tqdm import tqdm

    download = pooch.HTTPDownloader(chunk_size=1 << 16, timeout=TIMEOUT)
    # The size of what is converted is not pinned: it gets some room, and no total.
    total = file.size if convert is None else None
    with (
        part.open("w+b") as out,
        tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=None) as bar,
    ):
        _lock(out)
        try:
            download(url, _Watched(out, total or 2 * file.size, bar.update), None)
            if convert is not None:
                out.flush()
                content = convert(part)
                out.seek(0)
                out.truncate()
                out.write(content)
        except requests.RequestException as error:
            return _reason(error)
        except ValueError as error:
            return str(error)
        out.seek(0)
        found = hashlib.file_digest(out, "sha256").hexdigest()
    return "" if found == file.sha256 else f"its SHA-256 is {found}"


class _Watched:
    """What pooch writes to: a file with a progress bar that may not grow too large."""

    def __init__(self, out: IO[bytes], most: int, moved: Callable[[int], Any]):
        self.out, self.most, self.moved = out, most, moved

    def write(self, chunk: bytes) -> None:
        self.out.write(chunk)
        self.moved(len(chunk))
        if self.out.tell() > self.most:
            raise ValueError(f"it sends more than {self.most} bytes")

    def flush(self) -> None:
        """Nothing: pooch flushes every chunk."""


def _reason(error: OSError) -> str:
    """Why a download failed, in a few words; requests' own errors fill a paragraph."""
    from requests import exceptions

    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    reasons = {
        exceptions.Timeout: "no answer in time",
        exceptions.SSLError: "its TLS certificate is refused",
        exceptions.ProxyError: "no connection through the proxy",
        exceptions.ConnectionError: "the connection failed",
        exceptions.ChunkedEncodingError: "the connection broke off",
    }
    known = (text for kind, text in reasons.items() if isinstance(error, kind))
    return next(known, type(error).__name__)


def _lock(part: IO[bytes]) -> bool:
    """Marks a part as some living process's; False if it is another's."""
    if sys.platform == "win32":
        return True  # an open file cannot be removed there
    import fcntl

    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(parent: Path) -> None:
    """Removes what killed downloads left; not what runs at this moment."""
    for part in parent.glob(f".*{PART}"):
        with suppress(OSError), part.open("rb") as leftover:  # or another was quicker
            if _lock(leftover):
                part.unlink()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end a download; the harness only takes note of them."""

    def stop(number, frame) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: not Python's to restore
                before[number] = handler
                signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
