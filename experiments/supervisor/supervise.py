"""Starts, watches and restarts the processes of a run: see `supervise`."""

import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from experiments.cli.exits import UNCONNECTED, handling, say
from experiments.supervisor.addresses import address, is_address, listen, own_address
from experiments.supervisor.group import Group, Rules
from experiments.supervisor.hosts.guests import Guests
from experiments.supervisor.hosts.hub import Hub
from experiments.supervisor.hosts.rendezvous import Hello, here
from experiments.supervisor.hosts.spoke import Spoke
from experiments.supervisor.local_processes import Crew

TICK = 0.03  # seconds


def supervise(
    group: Group,
    command: list[str],
    facts: dict[str, Any],
    announced: dict[str, Any],
    rules: Rules,
) -> int:
    """Runs processes to their end, here and with other commands on other hosts.

    The command of process 0 decides for all. Whatever happens, no process is left.

    Args:
        group: the processes, and those that this command starts.
        command: argv that starts one; it calls `member.joined`.
        facts: what all commands must agree on, by the name that the user knows, such
            as "--seed" or "jax"; JSON values, None where there is none.
        announced: what process 0's command tells all processes; JSON, below 100 kB.
        rules: how long to wait, and how often to start again.

    Returns:
        The exit code, alike for all commands: that of the processes; 4 if they did not
        find each other, or disagree; 75 if one was lost or SIGTERM came, 130 by Ctrl-C.
    """
    facts = json.loads(json.dumps(facts))
    hello = Hello(group.count, list(group.ids), here(), os.getpid(), facts)
    selector = selectors.DefaultSelector()
    crew = Crew(group, command, rules, selector)
    if group.coordinator is not None and 0 not in group.ids:
        role = Spoke(hello, group.coordinator, rules, crew, selector)
    else:
        guests = None
        if group.coordinator is not None:
            listener = _listener(*address(group.coordinator))
            if listener is None:
                return UNCONNECTED
            guests = Guests(hello, rules.loss, selector, listener)
        role = Hub(hello, group.coordinator, announced, rules, crew, guests)
    with _signals() as received:
        try:
            return _loop(role, selector, received)
        finally:
            crew.kill()
            role.close()
            selector.close()


def _listener(host: str, port: int) -> socket.socket | None:
    """Listens where process 0 is to be found; None, with a line, where it cannot."""
    own = own_address(host)
    if own is None and is_address(host):
        say(
            f"process 0 cannot listen at {host}, which is no address of this machine: "
            "give one of its own as --coordinator"
        )
        return None
    if own is None:
        say(
            f"{host} means no address here by which others reach this machine: process "
            "0 listens at all of them; give one as --coordinator to listen there alone"
        )
    try:
        return listen(own, port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        say(f"process 0 cannot listen on port {port}: {reason}")
        return None


def _loop(
    role: Hub | Spoke, selector: selectors.BaseSelector, received: list[int]
) -> int:
    due = 0.0
    while role.code is None:
        for key, _ in selector.select(TICK):
            key.data()
        while received and role.code is None:
            role.signal(received.pop(0))
        now = time.monotonic()
        if role.code is None and now >= due:  # reports may come more often
            role.tick(now)
            due = now + TICK
    return role.code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, as the loop is never long in coming round."""
    received: list[int] = []
    with handling(lambda number, _: received.append(number)):
        yield received
