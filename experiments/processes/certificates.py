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
    _, key_name, authority_name = files
    cert_path, key_path, authority_path = files.values()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority_path)
    except ssl.SSLError as error:
        raise BadRequest(
            f"{authority_name} {authority_path} is no certificate: {error.reason}: set "
            f"{authority_name} to the PEM file of the authority's certificate"
        ) from error
    try:
        context.load_cert_chain(cert_path, key_path, password=lambda: b"")
    except ssl.SSLError as error:
        raise BadRequest(
            f"{key_name} {key_path} is not the key of the certificate in {cert_path}: "
            f"{error.reason or error}: set {key_name} to the PEM file of its key"
        ) from error
