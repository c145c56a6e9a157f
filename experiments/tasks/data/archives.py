"""Tar archives, read in memory; nothing is extracted to disk."""

import gzip
import tarfile
import zlib
from io import BytesIO
from pathlib import Path, PurePosixPath


def members(path: Path, most_bytes: int, name: str) -> dict[str, bytes]:
    """Reads the files of a tar archive.

    Args:
        path: the archive, with or without gzip.
        most_bytes: the largest size that the archive may unpack to.
        name: the name of the archive, for errors.

    Returns:
        Each file's content by its name.

    Raises:
        ValueError: it cannot be read, is too large, or holds a link, a device or a
            name that leads out of the folder.
    """
    try:
        content = BytesIO(_unpacked(path, most_bytes, name))
        with tarfile.open(fileobj=content, mode="r:") as tar:
            checked = [_checked(member, name) for member in tar]
            pairs = [(member.name, tar.extractfile(member)) for member in checked]
            return {path: file.read() for path, file in pairs if file is not None}
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{name} is not a readable tar archive: {error}") from error


def _unpacked(path: Path, most_bytes: int, name: str) -> bytes:
    """Returns the unpacked bytes of an archive."""
    # All at once, so that sizes in its headers cannot ask for more memory.
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        content = (gzip.GzipFile(fileobj=raw) if zipped else raw).read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{name} unpacks to more than {most_bytes} bytes")
    return content


def _checked(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    """Returns a member, or raises a ValueError unless it is a file or folder inside."""
    inside = PurePosixPath(member.name)
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"{name} is refused: {member.name!r} leads out of the folder")
    if not (member.isfile() or member.isdir()):
        raise ValueError(f"{name} is refused: {member.name!r} is a link or a device")
    return member
