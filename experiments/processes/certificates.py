"""Certificates for TLS, checked before a connection is tried with them."""

import ssl
from collections.abc import Mapping
from pathlib import Path

from experiments.command.errors import BadRequest
from experiments.files import needed, open_regular

MOST_BYTES = 1 << 24  # of certificates; those of an operating system take 250 kB


def check(files: Mapping[str, str]) -> None:
    """Raises a BadRequest for certificates that no connection can use.

    Args:
        files: the files of a certificate, of its key and of the authority's certificate
            in this order, each by the name of its setting.
    """
    for name, path in files.items():
        with needed(name, Path(path)):
            open_regular(path, MOST_BYTES).close()
    (_, cert), (of_key, key), (of_authority, authority) = files.items()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        line = f"{of_authority} {authority} is no certificate: {error.reason}"
        raise BadRequest(line) from error
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        line = f"{of_key} {key} is not the key of the certificate in {cert}"
        raise BadRequest(f"{line}: {error.reason or error}") from error
