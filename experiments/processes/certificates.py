"""Certificates for TLS, checked before a connection is tried with them."""

import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command.errors import BadRequest
from experiments.files import open_regular, refuse_os_errors

MOST_BYTES = 1 << 24  # of certificates; those of an operating system take 250 kB
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the module ssl does not name.
AT_ANY_TIME = 0x200000
# Of OpenSSL: X509_V_ERR_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH, …_INVALID_PURPOSE.
OF_OTHER_NAME = 62
OF_OTHER_ADDRESS = 64
OF_OTHER_PURPOSE = 26
TURNS = 10  # of a handshake, which takes three


class _Files(NamedTuple):
    """The files of a process, with the names of their settings."""

    cert_name: str
    cert_path: str
    key_name: str
    key_path: str
    authority_name: str
    authority_path: str


def check_certificates(
    files: Mapping[str, str],
    is_server: bool = False,
    host: str | None = None,
    uri_prefix: str = "",
) -> None:
    """Raises a BadRequest for certificates that no connection can use.

    They are used for a connection in memory, of which both ends have these files.

    Args:
        files: the files of a certificate, of its key and of the authority's certificate
            in this order, each by the name of its setting.
        is_server: whether other processes connect to this one.
        host: the name or address by which they do, which the certificate must have;
            None if they do not look at it.
        uri_prefix: with what one of the certificate's URIs must begin.
    """
    for name, path in files.items():
        with refuse_os_errors(name, Path(path)):
            open_regular(path, MOST_BYTES).close()
    (cert_name, cert_path), (key_name, key_path), authority = files.items()
    own_files = _Files(cert_name, cert_path, key_name, key_path, *authority)
    _check_authority(own_files)
    _check_key(own_files)
    certificate = _verify(own_files)
    if is_server:
        _verify(own_files, is_server=True, host=host)
    uris = _alternative_names(certificate, "URI")
    if not any(uri.startswith(uri_prefix) for uri in [*uris, ""]):
        raise BadRequest(
            f"{cert_name} {cert_path} has no URI that begins with {uri_prefix} (its "
            f"URIs: {', '.join(uris) or 'none'}): make a certificate with one"
        )


def _check_authority(files: _Files) -> None:
    """Checks that the file of the authority has a certificate."""
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    except ssl.SSLError as error:
        raise BadRequest(
            f"{files.authority_name} {files.authority_path} is no certificate: "
            f"{error.reason}: set {files.authority_name} to the PEM file of the "
            "authority's certificate"
        ) from error


def _check_key(files: _Files) -> None:
    """Checks that the key is the certificate's."""
    try:
        _present(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    except ssl.SSLError as error:
        raise BadRequest(
            f"{files.key_name} {files.key_path} is not the key of the certificate in "
            f"{files.cert_path}: {error.reason or error}: set {files.key_name} to the "
            "PEM file of its key"
        ) from error


def _trust(context: ssl.SSLContext, files: _Files) -> None:
    """Has one end of a connection trust the authority."""
    context.load_verify_locations(files.authority_path)


def _present(context: ssl.SSLContext, files: _Files) -> None:
    """Has one end of a connection present the certificate."""
    context.load_cert_chain(files.cert_path, files.key_path, password=lambda: b"")


def _verify(
    files: _Files, is_server: bool = False, host: str | None = None
) -> dict[str, Any]:
    """Returns the certificate as the other end sees it; raises a BadRequest."""
    try:
        return _connect(files, is_server, host)
    except ssl.SSLError as error:
        failure = error
    try:
        certificate = _connect(files, is_server, at_any_time=True)
    except ssl.SSLError as error:
        if getattr(error, "verify_code", None) == OF_OTHER_PURPOSE:
            purpose = "serverAuth" if is_server else "clientAuth"
            raise BadRequest(
                f"{files.cert_name} {files.cert_path} lacks the extendedKeyUsage "
                f"{purpose}: make a certificate with it"
            ) from error
        raise BadRequest(
            f"{files.cert_name} {files.cert_path} is refused by the authority in "
            f"{files.authority_path}: {_reason(error)}: set {files.authority_name} to "
            "the certificate of the authority that has signed it"
        ) from error
    _check_dates(files.cert_name, files.cert_path, [certificate])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, files)
    _check_dates(files.authority_name, files.authority_path, context.get_ca_certs())
    code = getattr(failure, "verify_code", None)
    # gRPC, by which jax connects, takes the subject's name for that of a host.
    if code == OF_OTHER_NAME and _common_name(certificate) == host:
        return certificate
    if code in (OF_OTHER_NAME, OF_OTHER_ADDRESS):
        raise BadRequest(
            f"{files.cert_name} {files.cert_path} is for {_hosts(certificate)}, not "
            f"for {host}, to which other processes connect (--coordinator): make a "
            "certificate for it, as a subjectAltName"
        ) from failure
    raise BadRequest(
        f"{files.cert_name} {files.cert_path} cannot be used: {_reason(failure)}: make "
        "another certificate"
    ) from failure


def _connect(
    files: _Files,
    is_server: bool,
    host: str | None = None,
    at_any_time: bool = False,
) -> dict[str, Any]:
    """Connects two ends in memory, one of which verifies the certificate.

    Args:
        files: the files of both ends.
        is_server: whether the server's certificate is verified, or the client's.
        host: the host that it must have.
        at_any_time: whether its dates do not matter.

    Returns:
        The certificate, as `ssl` describes it.

    Raises:
        SSLError: it is refused.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _present(client_context, files)
    _present(server_context, files)
    verifier = client_context if is_server else server_context
    verifier.verify_mode = ssl.CERT_REQUIRED
    _trust(verifier, files)
    if at_any_time:
        verifier.verify_flags |= AT_ANY_TIME
    if host is not None:
        client_context.check_hostname = True
        client_context.hostname_checks_common_name = False

    to_client = ssl.MemoryBIO()
    to_server = ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(TURNS):
        is_done = [_shake_hands(end) for end in (client, server)]
        if all(is_done):
            break
    return (client if is_server else server).getpeercert() or {}


def _shake_hands(end: ssl.SSLObject) -> bool:
    """Goes on with a handshake as far as possible; returns whether it is over."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _check_dates(name: str, path: str, certificates: list[dict[str, Any]]) -> None:
    """Raises a BadRequest if none of the certificates of a file is valid now."""
    current_time = time.time()
    starts = [ssl.cert_time_to_seconds(x["notBefore"]) for x in certificates]
    ends = [ssl.cert_time_to_seconds(x["notAfter"]) for x in certificates]
    # Of several, some may be older or newer ones.
    if starts and min(starts) > current_time:
        raise BadRequest(
            f"{name} {path} is not valid yet: it starts on {_date(min(starts))}: wait, "
            f"or set this machine's clock, which says {_date(current_time)}"
        )
    if ends and max(ends) < current_time:
        raise BadRequest(
            f"{name} {path} expired on {_date(max(ends))}: make another one, or set "
            f"this machine's clock, which says {_date(current_time)}"
        )


def _date(seconds: float) -> str:
    """Returns a time as text."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _reason(error: ssl.SSLError) -> str:
    """Returns why OpenSSL refuses a certificate."""
    return getattr(error, "verify_message", None) or error.reason or str(error)


def _alternative_names(certificate: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the names of one kind that a certificate is for."""
    pairs = certificate.get("subjectAltName", ())
    return [name for name_kind, name in pairs if name_kind == kind]


def _common_name(certificate: Mapping[str, Any]) -> str | None:
    """Returns the subject's name; None if a certificate has others."""
    if certificate.get("subjectAltName"):
        return None
    fields: dict[str, str] = {}
    for group in certificate.get("subject", ()):
        fields.update(group)
    return fields.get("commonName")


def _hosts(certificate: Mapping[str, Any]) -> str:
    """Lists the hosts that a certificate is for."""
    names = _alternative_names(certificate, "DNS")
    addresses = _alternative_names(certificate, "IP Address")
    common_name = _common_name(certificate)
    if common_name is not None:
        return f"its subject's name alone ({common_name})"
    return ", ".join([*names, *addresses]) or "no host"
