"""Processes listen only where the user asks for."""

import ipaddress
import signal
import socket

import pytest
from support.commands import free_address
from support.faults import by_hand, listening, tagged, until

from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import find_steps
from experiments.processes import network
from experiments.processes.network import find_own_address, free_port, listen

LOOPBACK = "127.0.0.1"
NOWHERE = "203.0.113.7"  # kept for documents
LONG = (
    "--task support.tiny_tasks:drawing --workers 2 --algo bmuf "
    "--period 4 --steps 40000 "
)
LONG += "--checkpoint-every 4 --eval-every 40000"


def test_address_that_a_name_means_here():
    assert find_own_address(LOOPBACK) == LOOPBACK
    assert find_own_address("127.0.0.2") == "127.0.0.2"
    assert find_own_address("localhost") in (LOOPBACK, "::1")
    assert find_own_address("0.0.0.0") == "0.0.0.0"
    for host in (NOWHERE, "no-such-host.invalid", "a..b"):
        assert find_own_address(host) is None
    mine = find_own_address(socket.gethostname())
    assert mine is None or not ipaddress.ip_address(mine).is_loopback


def test_port_is_free_at_the_address():
    with (
        listen(LOOPBACK, 0) as listener,
        listen("127.0.0.2", listener.getsockname()[1]),
    ):
        assert free_port() != listener.getsockname()[1]
        with pytest.raises(OSError):
            listen(LOOPBACK, listener.getsockname()[1])


def test_address_has_a_host_and_a_port():
    texts = {"hosta:9999": "hosta", "10.0.0.1:9999": "10.0.0.1", "[::1]:9999": "::1"}
    for text, host in texts.items():
        assert network.address(text) == (host, 9999)
        assert network.join_address(host, 9999) == text


NONE = "h h: :9 h:x h:0 h:65536 ::1:9 http://h:9 h:-1"


@pytest.mark.parametrize("text", ["", "h :9", *NONE.split()])
def test_address_that_is_none_is_told(text):
    with pytest.raises(ValueError, match="HOST:PORT") as error:
        network.address(text)
    assert str(error.value).endswith(f"got {text!r}")


@pytest.mark.slow
def test_processes_of_one_machine_listen_to_it_alone(start):
    command = start(f"{LONG} --processes 2")
    until(lambda: find_steps(command.run_out / FOLDER), "a checkpoint")
    addresses = listening(tagged(command.tag))
    command.kill(signal.SIGTERM)
    assert command.ended().code == 75
    assert len(addresses) >= 3  # jax's service, and gloo in both
    assert {*addresses} == {LOOPBACK}


@pytest.mark.long
def test_name_that_means_nothing_here_serves_all_the_same(start):
    """Processes of one machine that has its own name in /etc/hosts."""
    name = socket.gethostname()
    if find_own_address(name) is not None:
        pytest.skip("this machine's name means an address of it")
    coordinator = free_address().replace(LOOPBACK, name)
    words = f"{LONG} --steps 16"
    commands = [start(by_hand(coordinator, number, words)) for number in (0, 1)]
    ended = [command.ended() for command in commands]
    assert [x.code for x in ended] == [0, 0], ended
    assert f"{name} is not an address of this machine" in ended[0].stderr
    assert ended[0].summary["steps"] == 16
