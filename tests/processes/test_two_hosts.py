"""docs/many-hosts.md's first recipe, its hosts being two network namespaces."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from support.commands import PROGRAM, ROOT, beneath, execute, together
from support.faults import by_hand, until

from experiments.processes.network import _address_towards, free_port

PORT = 9999
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def test_the_own_address_is_that_of_the_way_to_the_other():
    assert _address_towards("127.0.0.1", PORT) == "127.0.0.1"


@pytest.fixture
def hosts():
    """Prefixes that run a command on each of two hosts."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces take root, and the program ip")
    names = [f"two-hosts-{os.getpid()}-{i}" for i in (0, 1)]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr!r}")
        a, b = names
        ip(*f"link add wire netns {a} type veth peer wire netns {b}".split())
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def started_on(hosts, command, start, tmp_path):
    """The command on each of two hosts, joined by hand; they share no folder."""
    coordinator = f"{ADDRESSES[0]}:{PORT}"
    return [
        start(
            by_hand(coordinator, i, command),
            tmp_path / f"out-of-{i}",
            program=[*x, *PROGRAM],
        )
        for i, x in enumerate(hosts)
    ]


def listening(host):
    """The addresses at which sockets of a host listen, without their ports."""
    socket_words = subprocess.check_output(
        [*host, "ss", "-ltnH"], encoding="utf-8"
    ).split()
    return [
        x.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        for x in socket_words[3::5]
    ]


@pytest.mark.slow
def test_two_hosts_joined_by_hand_train_as_one_does(hosts, start, tmp_path):
    command = "--algo hierarchical --steps 32 --eval-every 16 --checkpoint-every 16"
    first_run, second_run = (
        x.ended() for x in started_on(hosts, command, start, tmp_path)
    )
    assert (first_run.code, second_run.code) == (0, 0), (first_run, second_run)
    alone = execute(command, tmp_path / "alone")
    assert first_run.summary["params_sha256"] == alone.summary["params_sha256"]
    assert first_run.summary["processes"] == 2
    for number, ended in enumerate((first_run, second_run)):
        names = sorted(x.name for x in (ended.out / "checkpoints").iterdir())
        assert names == [f"step-{step:08}.{number}-of-2.npz" for step in (16, 32)]


@pytest.mark.slow
def test_each_host_listens_in_their_network_and_ends_with_the_link(
    hosts, start, tmp_path
):
    command = "--steps 100000 --eval-every 100000 --checkpoint-every 16"
    commands_of_hosts = started_on(hosts, command, start, tmp_path)
    until(
        lambda: all(beneath(x.run_out, "step-*.npz") for x in commands_of_hosts),
        "checkpoints",
    )
    # In a network namespace of its own, all that listens is ours.
    listening_addresses = [listening(host) for host in hosts]
    subprocess.run([*hosts[0], *["ip", "link", "set", "wire", "down"]], check=True)
    for ended in (x.ended() for x in commands_of_hosts):
        assert ended.code in (75, -signal.SIGABRT), ended.stderr
        assert "is gone" in ended.stderr or "JAX distributed service" in ended.stderr
    for places, address, least in zip(
        listening_addresses, ADDRESSES, (2, 1), strict=True
    ):
        assert len(places) >= least  # process 0 has one more: jax's service
        assert {*places} == {address}


@pytest.mark.slow
def test_the_loop_of_the_page_runs_in_two_processes(tmp_path):
    page = (ROOT / "docs" / "many-hosts.md").read_text()
    [source] = re.findall(r"^```py\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "loop.py"
    path.write_text(source.replace("9998", str(free_port())))
    commands = [
        ([sys.executable, str(path), str(i)], {"PYTHONPATH": ROOT}) for i in (0, 1)
    ]
    printed = [text for _, text, _ in together(commands)]
    results = [text.splitlines()[-1] for text in printed]  # behind what gloo says
    assert re.fullmatch(r"\[.*\] \d.*", results[0])
    assert results[0] == results[1]
