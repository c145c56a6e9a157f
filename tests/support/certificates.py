"""Certificates that openssl makes, with chosen dates and names."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

CONFIG = """
[ca]
default_ca = own
[own]
dir = {folder}
new_certs_dir = {folder}
database = {folder}/index.txt
serial = {folder}/serial
default_md = sha256
policy = any
unique_subject = no
copy_extensions = none
[any]
commonName = supplied
"""


class Authority:
    """Signs certificates.

    Args:
        folder: a new folder for its files.
        days: from when to when it is valid, from now on.

    Attributes:
        path: its certificate.
    """

    def __init__(self, folder: Path, days: tuple[float, float] = (-1, 1)):
        if not shutil.which("openssl"):
            pytest.skip("certificates take the program openssl")
        folder.mkdir(parents=True)
        self._folder = folder
        self._num_certificates = 0
        self._config = folder / "ca.cnf"
        self._config.write_text(CONFIG.format(folder=folder))
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        self.path = folder / "ca.pem"
        self._key = folder / "ca-key.pem"
        self._request("authority", self._key, folder / "ca.csr")
        extensions = "basicConstraints=critical,CA:true\n"
        self._sign(folder / "ca.csr", self.path, days, extensions, "-selfsign")

    def sign(
        self,
        hosts: str = "IP:127.0.0.1",
        days: tuple[float, float] = (-1, 1),
        usage: str = "serverAuth,clientAuth",
        name: str = "process",
    ) -> tuple[Path, Path]:
        """Returns a new certificate and its key.

        Args:
            hosts: a subjectAltName, as openssl writes it; "" for none.
            days: from when to when it is valid, from now on.
            usage: an extendedKeyUsage.
            name: the common name.
        """
        self._num_certificates += 1
        stem = self._folder / f"own-{self._num_certificates}"
        request = stem.with_suffix(".csr")
        key = stem.with_suffix(".key")
        self._request(name, key, request)
        extensions = f"extendedKeyUsage={usage}\n"
        if hosts:
            extensions += f"subjectAltName={hosts}\n"
        certificate = stem.with_suffix(".pem")
        self._sign(request, certificate, days, extensions)
        return certificate, key

    def _request(self, name: str, key: Path, request: Path) -> None:
        """Makes a key and the request of a certificate."""
        words = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj"
        files = ["-keyout", str(key), "-out", str(request)]
        _openssl([*words.split(), f"/CN={name}", *files])

    def _sign(
        self,
        request: Path,
        certificate: Path,
        days: tuple[float, float],
        extensions: str,
        *options: str,
    ) -> None:
        """Signs a request."""
        path = request.with_suffix(".ext")
        path.write_text(extensions)
        start, end = (_time(x) for x in days)
        words = ["ca", "-batch", "-notext", "-config", str(self._config), *options]
        words += ["-keyfile", str(self._key), "-extfile", str(path)]
        words += ["-startdate", start, "-enddate", end]
        if not options:
            words += ["-cert", str(self.path)]
        _openssl([*words, "-in", str(request), "-out", str(certificate)])


def _time(days: float) -> str:
    """Returns a time in some days, as openssl takes it."""
    return f"{datetime.now(UTC) + timedelta(days=days):%Y%m%d%H%M%SZ}"


def _openssl(words: list[str]) -> None:
    """Calls openssl."""
    command = ["openssl", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
