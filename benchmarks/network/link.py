"""A slow link: two network namespaces joined by a veth pair, shaped at both ends.

On Linux, with `ip`, `tc` and `unshare`, as root. The shaper is tc's token bucket: it
lets so many bits a second out, headers included, and adds no latency.
"""

import json
import os
import shlex
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of the two ends; seen in the namespaces alone
INTERFACE = "wire"  # of each end, in its namespace
PORT = 5701  # of `probe`
HEADERS = 66  # of a TCP segment with time stamps: Ethernet 14, IP 20, TCP 32
TRIPS, PING = 200, 64  # messages of so many bytes
TRANSFERS = 3  # of which the fastest counts: other jobs may disturb one
PATIENCE = 60  # seconds


class Link:
    """Two namespaces and the pair that joins them; removed when a `with` ends.

    Raises:
        OSError: no privileges, or a program is missing.
    """

    def __init__(self):
        self._names = [f"slow-link-{os.getpid()}-{end}" for end in (0, 1)]

    def __enter__(self) -> "Link":
        with ExitStack() as undo:  # where making it fails, or is interrupted
            undo.callback(self.__exit__)
            self._make()
            undo.pop_all()
        return self

    def __exit__(self, *_) -> None:
        for name in self._names:  # the pair goes with them
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "del", name])

    def _make(self) -> None:
        for name in self._names:
            _system(f"ip netns add {name}")
        first, second = self._names
        ends = f"{INTERFACE} netns {first} type veth peer {INTERFACE} netns {second}"
        _system(f"ip link add {ends}")
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _system(f"ip -n {name} addr add {address}/24 dev {INTERFACE}")
            _system(f"ip -n {name} link set lo up")
            _system(f"ip -n {name} link set {INTERFACE} up")
        self.shape(100)
        _system(shlex.join([*self.command(0), "true"]))

    def shape(self, rate: float) -> None:
        """Sets the rate of each direction, in Mbit/s.

        The bucket holds 2 ms of it, and 16 kB at least: with less, a timer that is late
        costs rate.
        """
        bits = round(rate * 1e6)
        bucket = max(16_000, round(bits / 8 * 0.002))
        shaper = f"tbf rate {bits}bit burst {bucket} latency 50ms"
        for name in self._names:
            _system(f"tc -n {name} qdisc replace dev {INTERFACE} root {shaper}")

    def command(self, end: int) -> list[str]:
        """Returns a prefix that runs a command at an end, 0 or 1.

        There the command may rename the host, which nobody else sees.
        """
        return ["ip", "netns", "exec", self._names[end], "unshare", "--uts"]


def _system(command: str) -> None:
    """Runs a command that must succeed."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


def settle(end: int) -> None:
    """Sets this process's host name and congestion control; call it once, first."""
    # gloo listens where the host's name resolves to.
    socket.sethostname(ADDRESSES[end])
    # It differs between machines, and Linux allows Reno alone in every namespace.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")


class Sent(NamedTuple):
    """Bytes that an end has sent so far.

    Attributes:
        interface: by the interface's counter. What is left to the network card to cut
            into segments has the headers of one.
        payload: of those, without headers.
        wire: by the shaper's counter, with the headers of every segment.
    """

    interface: int
    payload: int
    wire: int


def sent() -> Sent:
    """Returns the bytes sent so far by the end at which this process runs."""
    counters = Path("/sys/class/net", INTERFACE, "statistics")
    size, packets = (
        int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets")
    )
    command = f"tc -s -j qdisc show dev {INTERFACE}"
    shaper = json.loads(subprocess.check_output(shlex.split(command)))[0]
    return Sent(size, size - HEADERS * packets, shaper["bytes"])


class Probe(NamedTuple):
    """Measurements of a plain TCP connection.

    Attributes:
        goodput: bytes of payload per second, one way, in the best of some transfers.
        latency: seconds, half the median round trip of a small message.
    """

    goodput: float
    latency: float


def probe(end: int, size: int) -> Probe:
    """Sends small messages there and back, then `size` bytes from end 1 to end 0.

    Both ends call it, and get the same.
    """
    with _connection(end) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if end == 1:
            for sent in (*[PING] * TRIPS, *[size] * TRANSFERS):
                peer.sendall(bytes(sent))
                _receive(peer, PING)
            return Probe(*json.loads(_receive(peer, PING)))
        trips = [_answered(peer, PING) for _ in range(TRIPS)]
        rates = [size / _answered(peer, size) for _ in range(TRANSFERS)]
        found = Probe(round(max(rates)), round(median(trips) / 2, 7))
        peer.sendall(json.dumps(found).encode().ljust(PING))
        return found


def _answered(peer: socket.socket, size: int) -> float:
    """Seconds until so many bytes have come; then a small message goes back."""
    start = time.perf_counter()
    _receive(peer, size)
    seconds = time.perf_counter() - start
    peer.sendall(bytes(PING))
    return seconds


def _connection(end: int) -> socket.socket:
    """Connects the ends, whichever comes first."""
    if end == 0:
        with socket.create_server((ADDRESSES[0], PORT)) as server:
            server.settimeout(PATIENCE)
            peer, _ = server.accept()
            peer.settimeout(PATIENCE)
            return peer
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((ADDRESSES[0], PORT), PATIENCE)
        time.sleep(0.05)
    raise ConnectionError(f"the other end did not come for {PATIENCE} s")


def _receive(peer: socket.socket, size: int) -> bytes:
    """Receives exactly so many bytes."""
    parts: list[bytes] = []
    while size:
        part = peer.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
