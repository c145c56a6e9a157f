"""Finds the commands of a run, and checks that they belong together."""

import errno
import itertools
import json
import os
import select
import socket
from pathlib import Path
from typing import Any, NamedTuple

from experiments.supervisor.group import processes

VERSION = 2  # of the messages between supervisors
MARK = "syncalgos"  # the key of the version, in the first message either way
ATTEMPT = 3.0  # seconds for one attempt to connect
PAUSE = 0.25  # seconds between two
SHOWN = 3  # differences that are named
LONGEST_VALUE = 40  # characters of a value that is named


class Hello(NamedTuple):
    """The introduction of a command.

    Attributes:
        total: the number of processes that it expects in all.
        ids: the processes that it starts.
        host: name, boot and network of its machine, which together identify it.
        pid: of the supervisor.
        facts: the values on which all processes must agree.
    """

    total: int
    ids: list[int]
    host: list[str]
    pid: int
    facts: dict[str, Any]


def greeting(hello: Hello) -> dict[str, Any]:
    """The first message to the hub."""
    return {MARK: VERSION, "hello": hello._asdict()}


def parse(message: dict[str, Any]) -> Hello | None:
    """Parses a first message; returns None if it is a stranger's."""
    try:
        hello = Hello(**message["hello"])
        ids = [int(i) for i in hello.ids]
        host = [str(part) for part in hello.host]
        kept = hello._replace(total=int(hello.total), ids=ids, host=host)
    except (KeyError, TypeError, ValueError):
        return None
    good = MARK in message and isinstance(kept.facts, dict) and len(host) == 3 and ids
    return kept if good else None


def here() -> list[str]:
    """Identifies this host by its name, boot and network."""
    # Containers of one machine share name or boot, but not the network namespace.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:  # no Linux
        boot = network = ""
    return [socket.gethostname(), boot, network]


def objection(
    message: dict[str, Any], hello: Hello, hub: Hello, others: list[Hello]
) -> str | None:
    """Reports why a command cannot take part.

    Args:
        message: its first message.
        hello: the same, parsed.
        hub: process 0's own hello.
        others: the hellos of those that take part already, the hub's among them.

    Returns:
        One line; None if it can.
    """
    who = processes(hello.ids)
    says = "say" if len(hello.ids) > 1 else "says"
    if message[MARK] != VERSION:
        return (
            f"{who} and process 0 have different versions of syncalgos, whose "
            "processes cannot talk: install the same on all hosts"
        )
    if hello.total != hub.total:
        return (
            f"{who} {says} --num-processes {hello.total}, "
            f"but process 0 says {hub.total}"
        )
    if not all(0 <= i < hub.total for i in hello.ids):
        are = "are" if len(hello.ids) > 1 else "is"
        return f"{who} {are} not among {hub.total}: they are 0 to {hub.total - 1}"
    for other in others:
        if twice := sorted({*hello.ids} & {*other.ids}):
            pairs = " and ".join(f"pid {h.pid} on {h.host[0]}" for h in (other, hello))
            return f"{processes(twice)} was started twice: {pairs}"
    return _difference(hello, hub)


def _difference(hello: Hello, hub: Hello) -> str | None:
    """Reports the facts in which a command differs from the hub, in one line."""
    names = {**hub.facts, **hello.facts}
    pairs = [(n, hello.facts.get(n), hub.facts.get(n)) for n in names]
    differ = [_shown(*pair) for pair in pairs if pair[1] != pair[2]]
    if not differ:
        return None
    theirs, ours = (", ".join(pair[i] for pair in differ[:SHOWN]) for i in (0, 1))
    have = "have" if len(hello.ids) > 1 else "has"
    more = f" ({len(differ) - SHOWN} more differ)" if len(differ) > SHOWN else ""
    return f"{processes(hello.ids)} {have} {theirs}, but process 0 has {ours}{more}"


def _shown(name: str, *values: Any) -> list[str]:
    """Shows a fact of both; long values from shortly before they differ."""
    texts = ["" if v is None else _text(v) for v in values]
    start = 0
    if min(len(text) for text in texts) > LONGEST_VALUE:
        pairs = zip(*texts, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda p: len(set(p)) == 1, pairs))
        start = max(0, same - LONGEST_VALUE // 2)
    cut = [("…" if start else "") + text[start:] for text in texts]
    short = [c if len(c) <= LONGEST_VALUE else c[:LONGEST_VALUE] + "…" for c in cut]
    return [
        f"no {name}" if value is None else f"{name} {text}"
        for value, text in zip(values, short, strict=True)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def places(hellos: list[Hello]) -> tuple[int, list[tuple[int, int, int]]]:
    """Counts the hosts, and numbers the processes of each.

    Args:
        hellos: of all commands.

    Returns:
        The number of hosts; and for each process its number, its number on its host,
        and the number of processes on that host.
    """
    # Groups of `hierarchical` follow the hosts, not the processes: else two processes
    # on one host would give other numbers than one.
    hosts: dict[tuple[str, ...], list[int]] = {}
    for hello in hellos:
        hosts.setdefault(tuple(hello.host), []).extend(hello.ids)
    found = [
        (process, local, len(ids))
        for ids in hosts.values()
        for local, process in enumerate(sorted(ids))
    ]
    return len(hosts), sorted(found)


class Dialer:
    """Tries to connect until somebody answers; blocks only to look up names.

    Attributes:
        error: why the last attempt failed.
    """

    def __init__(self, host: str, port: int):
        self.error = "timed out"
        self._target = host, port
        self._sock: socket.socket | None = None
        self._tries = 0
        self._next = 0.0  # time of the next attempt
        self._until = 0.0  # end of the attempt that is under way

    def poll(self, now: float) -> socket.socket | None:
        """Returns the connection once there is one, else None."""
        try:
            if self._sock is None:
                return self._begin(now)
            if select.select([], [self._sock], [], 0)[1]:
                return self._connected(self._sock)
            if now > self._until:
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            return None
        # The user's text may be no name at all.
        except (OSError, UnicodeError) as error:
            self.error = getattr(error, "strerror", None) or str(error)
            self._next = now + PAUSE
            self.close()
            return None

    def close(self) -> None:
        """Gives up the attempt that is under way."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _begin(self, now: float) -> None:
        if now < self._next:
            return
        found = socket.getaddrinfo(*self._target, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[self._tries % len(found)]
        self._tries += 1
        self._next, self._until = now + PAUSE, now + ATTEMPT
        self._sock = socket.socket(family, kind, protocol)
        self._sock.setblocking(False)
        # The loop must go on: an attempt may take seconds.
        code = self._sock.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))

    def _connected(self, sock: socket.socket) -> socket.socket:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # Where nobody listens, a connection may meet itself, on a port of its own.
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED
        if code:
            raise OSError(code, os.strerror(code))
        self._sock = None
        return sock
