"""Small files in the formats of the data sets, good ones and bad ones."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from typing import Any

import numpy as np

from experiments.data.downloads import File


def put(folder, path, content):
    """Writes a file below folder and pins it."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    return File(path, len(content), hashlib.sha256(content).hexdigest(), ())


def tar(members, **attributes):
    """A tar archive of contents by name; attributes are every member's."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for attribute, value in attributes.items():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


InPython: Any = pickle._Pickler  # without types in the standard library's stubs


class Python2(InPython):
    """Pickles text, bytes and arrays as Python 2 and its NumPy did."""

    def save(self, obj, save_persistent_id=True):
        if not isinstance(obj, str | bytes):
            return super().save(obj, save_persistent_id)
        plain = obj.encode() if isinstance(obj, str) else obj
        self.write(b"T" + struct.pack("<i", len(plain)) + plain)


def python2(value):
    """A pickle of Python 2."""
    out = io.BytesIO()
    Python2(out, protocol=2).dump(value)
    return out.getvalue().replace(b"numpy._core", b"numpy.core")


def batch(n, seed):
    """A batch as CIFAR-10 has it, its images (n, height, width, channels), y."""
    draws = np.random.default_rng(seed)
    x = draws.integers(0, 256, (n, 32, 32, 3), np.uint8)
    y = draws.integers(0, 10, n)
    data = np.stack([x[..., c].reshape(n, -1) for c in range(3)], 1).reshape(n, -1)
    names = [f"image_{i}.png" for i in range(n)]
    contents = {"batch_label": f"batch {seed}", "labels": y.tolist(), "data": data}
    return python2({**contents, "filenames": names}), x, y


def cifar_archive(folder, contents):
    """Writes batches; returns the archive's path."""
    members = {f"cifar-10-batches-py/{name}": x for name, x in contents.items()}
    put(folder, "cifar.tar.gz", gzip.compress(tar(members)))
    return folder / "cifar.tar.gz"
