"""Tar archives, read in memory: nothing is extracted to disk."""

import gzip
import tarfile
import zlib
from io import BytesIO
from pathlib import Path, PurePosixPath


def members(path: Path, most_bytes: int, name: str) -> dict[str, bytes]:
    """Reads the files of a tar archive.

    Args:
        path: the archive, gzip'd or not.
        most_bytes: refuse an archive that unpacks to more.
        name: how errors call it.

    Returns:
        Each file's content by its name.

    Raises:
        ValueError: it cannot be read, is too large, or holds a link, a device or a
            name that leads out of the folder.
    """
    try:
        content = BytesIO(_unpacked(path, most_bytes, name))
        with tarfile.open(fileobj=content, mode="r:") as tar:
            found = {}
            for member in tar:
                _check(member, name)
                if (file := tar.extractfile(member)) is not None:
                    found[member.name] = file.read()
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{name} is not a readable tar archive: {error}") from error
    return found


def _unpacked(path: Path, most_bytes: int, name: str) -> bytes:
    """An archive's bytes; all at once, so that its headers can ask for no more."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        content = (gzip.GzipFile(fileobj=raw) if zipped else raw).read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{name} unpacks to more than {most_bytes} bytes")
    return content


def _check(member: tarfile.TarInfo, name: str) -> None:
    """Raises a ValueError unless a member is a file or folder inside the archive's."""
    inside = PurePosixPath(member.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"{name} is refused: {member.name!r} leaves the folder")
    if not (member.isfile() or member.isdir()):
        raise ValueError(f"{name} is refused: {member.name!r} is a link or a device")
