"""Addresses at which a host listens, and at which others reach it."""

import errno
import ipaddress
import re
import socket
import time
from contextlib import suppress

ATTEMPT = 3.0  # seconds for one attempt to connect
PAUSE = 0.25  # seconds between two


def address(text: str, name: str = "--coordinator") -> tuple[str, int]:
    """Splits HOST:PORT.

    Args:
        text: such as hosta:9999, 10.0.0.1:9999 or [::1]:9999.
        name: the name of the argument, for the error.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"(?:\[([^\[\]\s/]+)\]|([^:\[\]\s/]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(
            f"{name} must be HOST:PORT, such as 10.0.0.1:9999 or [::1]:9999 (port 1 to "
            f"65535), got {text!r}"
        )
    return match[1] or match[2], int(match[3])


def joined_address(host: str, port: int) -> str:
    """Joins HOST:PORT, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str | None:
    """Finds the address of this machine that a host name or an address refers to.

    Returns:
        The address; None if other machines cannot reach this one by that name, because
        the name is unknown here, or refers to another machine or only to the loopback
        device.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # The text comes from the user and may not be a valid name.
    except (OSError, UnicodeError):
        return None
    # Many systems list their own name as 127.0.1.1 in /etc/hosts.
    is_name = not is_address(host) and not host.startswith("localhost")
    for meant in (str(place[0]) for *_, place in found):
        if is_name and ipaddress.ip_address(meant).is_loopback:
            continue
        with suppress(OSError):  # listening there is the only sure test
            listen(meant, 0).close()
            return meant
    return None


def is_address(host: str) -> bool:
    """Whether a host is given as an IP address and not as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def reach(host: str, port: int, seconds: float) -> str | None:
    """Waits until a program listens at an address.

    Returns:
        None if it can be reached in time; otherwise the reason of the last failure.
    """
    deadline = time.monotonic() + seconds
    while (reason := _refusal(host, port)) and time.monotonic() < deadline:
        time.sleep(PAUSE)
    return reason


def _refusal(host: str, port: int) -> str | None:
    """Returns why a connection to an address fails; None if it succeeds."""
    try:
        with socket.create_connection((host, port), ATTEMPT) as sock:
            # If no program listens, a local connection may connect to itself.
            is_own = sock.getsockname() == sock.getpeername()
            return "no program listens there" if is_own else None
    # The text comes from the user and may not be a valid name.
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)


def listen(host: str | None, port: int) -> socket.socket:
    """Listens at one address of this machine, or at all of them.

    Args:
        host: the address; None for all addresses.
        port: the port; 0 for a free one.

    Raises:
        OSError: the port is in use, or this user may not use it.
    """
    is_dual = host is None and socket.has_dualstack_ipv6()
    is_wide = is_dual or ":" in (host or "")
    family = socket.AF_INET6 if is_wide else socket.AF_INET
    try:
        return socket.create_server(
            (host or "", port), family=family, dualstack_ipv6=is_dual
        )
    except OSError as error:
        # IPv6 may be switched off.
        if not is_dual or error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", port))


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that is free now at an address."""
    with listen(host, 0) as sock:
        return sock.getsockname()[1]
