"""Commands of a run find each other, or report at once why not."""

import json
import os
import socket
import threading
import time

import pytest
from fake_member import commands, free_address, pids, until

from experiments.supervisor import addresses
from experiments.supervisor.hosts import rendezvous
from experiments.supervisor.hosts.rendezvous import Hello

DONE = {"*": ["at connect", "at prepare", "steps 3"]}
WAIT = {"*": ["at connect", "at prepare", "steps 3", "touch trained", "wait go"]}


@pytest.fixture
def start(tmp_path):
    with commands(tmp_path) as start:
        yield start


def refused(both):
    """The line with which all commands ended."""
    ended = [command.ended() for command in both]
    assert [code for code, _ in ended] == [4] * len(both)
    lines = {tuple(lines) for _, lines in ended}
    assert len(lines) == 1
    [line] = lines.pop()
    return line


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hosta:9999", ("hosta", 9999)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_address_has_a_host_and_a_port(text, expected):
    assert addresses.address(text) == expected
    assert addresses.joined_address(*expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "h:",
        ":9",
        "h:x",
        "h:0",
        "h:65536",
        "::1:9",
        "http://h:9",
        "h :9",
        "h:-1",
    ],
)
def test_address_that_is_none_is_told(text):
    with pytest.raises(ValueError) as error:
        addresses.address(text)
    assert str(error.value).endswith(f"got {text!r}") and "HOST:PORT" in str(
        error.value
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_commands_find_each_other_in_any_order(order, start, tmp_path):
    at = free_address()
    started = []
    for i in order:
        started.append(start(DONE, 3, ids=[i], at=at, init_timeout=20))
        time.sleep(0.3)
    assert [command.ended() for command in started] == [(0, [])] * 3
    assert sorted(i for i, _ in pids(tmp_path)) == [0, 1, 2]


def test_addresses_of_ipv6_are_found(start):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    at = "[::1]:" + free_address().partition(":")[2]
    both = [start(DONE, ids=[i], at=at, init_timeout=10) for i in (0, 1)]
    assert [command.ended() for command in both] == [(0, [])] * 2


# Nobody there, or somebody else


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "host, reason",
    [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", ""), ("a..b", "")],
)
def test_nobody_at_the_address_is_told(host, reason, start):
    at = f"{host}:{free_address().partition(':')[2]}"
    line = refused([start(DONE, ids=[1], at=at, init_timeout=1)])
    assert line.startswith(f"process 1 found no process 0 at {at} in 1 s (")
    assert line.endswith("): is it running, and is --coordinator its address?")
    assert reason in line


def test_those_that_are_missing_are_named_to_all_that_came(start):
    at = free_address()
    came = [start(DONE, 4, ids=[i], at=at, init_timeout=2) for i in (0, 1)]
    line = refused(came)
    assert line == f"process 0 at {at} waited 2 s for processes 2 and 3 of 4"


def test_port_in_use_is_told_at_once(start):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        line = refused([start(DONE, ids=[0], at=f"127.0.0.1:{port}")])
    assert line == f"process 0 cannot listen on port {port}: Address already in use"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "answer, expected",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no process 0 of this program"),
        (b"", "(what listens there does not answer)"),
        (None, "(connection closed)"),
    ],
    ids=["other words", "silence", "hanging up"],
)
def test_something_else_at_the_address_is_told(answer, expected, start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve():
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                if answer is None:
                    sock.close()
                    continue
                held.append(sock)
                sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        at = f"127.0.0.1:{server.getsockname()[1]}"
        line = refused([start(DONE, ids=[1], at=at, init_timeout=1.5)])
        server.shutdown(socket.SHUT_RDWR)
        for sock in held:
            sock.close()
    assert at in line and expected in line


# Disagreement


@pytest.mark.parametrize(
    "facts, expected",
    [
        (
            ({"--seed": 0}, {"--seed": 1}),
            "process 1 has --seed 1, but process 0 has --seed 0",
        ),
        (
            ({"--lr": None, "jax": "0.10.2"}, {"--lr": 0.5, "jax": "0.10.1"}),
            "process 1 has --lr 0.5, jax 0.10.1, but process 0 has no --lr, jax 0.10.2",
        ),
        (
            ({f"--{c}": 0 for c in "abcde"}, {f"--{c}": 1 for c in "abcde"}),
            "process 1 has --a 1, --b 1, --c 1, "
            "but process 0 has --a 0, --b 0, --c 0 (2 more differ)",
        ),
        (
            ({"--x": 100 * "x" + "a"}, {"--x": 100 * "x" + "b"}),
            f"process 1 has --x …{20 * 'x'}b, but process 0 has --x …{20 * 'x'}a",
        ),
    ],
    ids=["one", "two", "many", "long"],
)
def test_what_differs_is_named_to_all(facts, expected, start):
    at = free_address()
    both = [start(DONE, ids=[i], at=at, facts=facts[i]) for i in (0, 1)]
    assert refused(both) == expected


def test_counts_that_differ_are_named(start):
    at = free_address()
    both = [start(DONE, 2 + i, ids=[i], at=at) for i in (0, 1)]
    line = "process 1 says --num-processes 3, but process 0 says 2"
    assert refused(both) == line


def test_number_that_is_too_high_is_told(start):
    at = free_address()
    both = [start(DONE, 2, ids=[i], at=at) for i in (0, 2)]
    line = "process 2 is not among 2: they are 0 to 1"
    assert refused(both) == line


def test_process_that_was_started_twice_is_told(start):
    at = free_address()
    started = [start(DONE, 3, ids=[i], at=at) for i in (0, 1, 1)]
    line = refused(started)
    assert line.startswith("process 1 was started twice: pid ")
    for command in started[1:]:
        assert f"pid {command.process.pid} on {socket.gethostname()}" in line


def test_other_version_is_told(start):
    at = free_address()
    command = start(DONE, ids=[0], at=at)
    hello = Hello(2, [1], ["hostb", "", ""], 1, {})
    with dial(at) as sock:
        send(sock, rendezvous.greeting(hello) | {rendezvous.MARK: 0})
        told = json.loads(sock.makefile().readline())
    line = refused([command])
    assert told == {"end": 4, "lines": [line]}
    assert line.startswith("process 1 and process 0 have different versions")


# Strangers and late comers


def dial(at):
    """A connection, once somebody listens."""
    host, port = addresses.address(at)
    found = []

    def connected():
        try:
            found.append(socket.create_connection((host, port), 5))
        except ConnectionRefusedError:
            return False
        return True

    until(connected, "somebody listens")
    return found[0]


def send(sock, message):
    sock.sendall(json.dumps(message).encode() + b"\n")


def test_strangers_do_not_disturb(start, tmp_path):
    at = free_address()
    first = start(DONE, ids=[0], at=at)
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b"\x16\x03\x01\xff\n",
        b"[]\n",
        b"{}\n",
        b'{"hello": 1}\n',
        b'{"syncalgos": 1, "hello": {"total": "x"}}\n',
        2_000_000 * b"x",
        b"[" * 100_000 + b"\n",
    ]
    socks = [dial(at) for _ in words]
    for sock, data in zip(socks, words, strict=True):
        try:
            sock.sendall(data)
        except OSError:
            assert len(data) > 1_000_000  # it did not listen to the end
    second = start(DONE, ids=[1], at=at)
    assert [first.ended(), second.ended()] == [(0, [])] * 2
    for sock in socks:
        sock.close()


def test_late_duplicate_is_refused_alone(start, tmp_path):
    at = free_address()
    both = [start(WAIT, ids=[i], at=at) for i in (0, 1)]
    until(lambda: (tmp_path / "trained-1").exists(), "they train")
    line = refused([start(WAIT, ids=[1], at=at)])
    assert line.startswith("process 1 was started twice: pid ")
    (tmp_path / "go").touch()
    assert [command.ended() for command in both] == [(0, [])] * 2


def test_networks_of_one_machine_are_hosts_of_their_own():
    def hello(i, *host):
        return Hello(4, [i], list(host), 1, {})

    a, b = ("vm", "boot", "net1"), ("vm", "boot", "net2")
    hosts, where = rendezvous.places([hello(0, *a), hello(2, *b), hello(1, *a)])
    assert hosts == 2
    assert where == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert len(rendezvous.here()) == 3
    assert os.uname().nodename == rendezvous.here()[0]
