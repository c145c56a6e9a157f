"""Runs the processes of a run to their end: see `run_processes`."""

import json
import os
import selectors
import socket
import time
from typing import Any

from experiments.exit_codes import UNCONNECTED, handling
from experiments.supervisor.addresses import address, is_address, listen, own_address
from experiments.supervisor.group import Group, Log, Rules
from experiments.supervisor.hosts.guests import Guests
from experiments.supervisor.hosts.hub import Hub
from experiments.supervisor.hosts.rendezvous import Hello, here
from experiments.supervisor.hosts.spoke import Spoke
from experiments.supervisor.local_processes import LocalProcesses

TICK = 0.03  # seconds between two looks


def run_processes(
    group: Group,
    command: list[str],
    facts: dict[str, Any],
    announced: dict[str, Any],
    rules: Rules,
    log: Log,
) -> int:
    """Starts, watches and restarts processes until they end, on all hosts.

    The command of process 0 decides for all. No process is left behind in any case.

    Args:
        group: the processes, and those that this command starts.
        command: argv of one process, which calls `child_side.join_supervisor`.
        facts: the values on which all commands must agree, by the name that the user
            knows, such as "--seed" or "jax"; JSON values, None where there is none.
        announced: the values that process 0's command sends to all; JSON, below 100 kB.
        rules: limits on waiting and restarts.
        log: shows the user a line, which may hold any text.

    Returns:
        The exit code, the same for all commands: that of the processes; 4 if they did
        not find each other, or disagree; 75 if one was lost or SIGTERM came, 130 by
        Ctrl-C.
    """
    # As the other commands receive them: JSON makes lists of tuples.
    facts = json.loads(json.dumps(facts))
    hello = Hello(group.count, list(group.ids), here(), os.getpid(), facts)
    # In processes of their own: jax aborts in C++ when another one is lost, and hangs
    # when one never comes. Exit code, last line and signals stay with this command.
    local = LocalProcesses(group, command, rules, log)
    selector = selectors.DefaultSelector()
    role = _role(hello, announced, local, selector)
    if role is None:
        return UNCONNECTED
    # The loop looks at them after a tick at most.
    received: list[int] = []
    with handling(lambda number, _: received.append(number)):
        try:
            return _loop(role, local, selector, received)
        finally:
            local.kill()
            role.close()
            selector.close()


def _role(
    hello: Hello,
    announced: dict[str, Any],
    local: LocalProcesses,
    selector: selectors.BaseSelector,
) -> Hub | Spoke | None:
    """Makes this command decide or obey; returns None if it cannot listen."""
    coordinator = local.group.coordinator
    if coordinator is None:
        return Hub(hello, None, announced, local, None)
    if 0 not in local.group.ids:
        return Spoke(hello, coordinator, local, selector)
    listener = _listen_for_commands(*address(coordinator), local.log)
    if listener is None:
        return None
    guests = Guests(hello, local.rules.loss, selector, listener)
    return Hub(hello, coordinator, announced, local, guests)


def _listen_for_commands(host: str, port: int, log: Log) -> socket.socket | None:
    """Listens at process 0's address; returns None, with a line, where it cannot."""
    own = own_address(host)
    if own is None and is_address(host):
        log(
            f"process 0 cannot listen at {host}, which is no address of this machine: "
            "give one of its own as --coordinator"
        )
        return None
    # Such as a load balancer's name, or one that DNS does not know yet.
    if own is None:
        log(
            f"{host} means no address here by which others reach this machine: process "
            "0 listens at all of them; give one as --coordinator to listen there alone"
        )
    try:
        return listen(own, port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        log(f"process 0 cannot listen on port {port}: {reason}")
        return None


def _loop(
    role: Hub | Spoke,
    local: LocalProcesses,
    selector: selectors.BaseSelector,
    received: list[int],
) -> int:
    """Serves sockets, signals and processes until the role has an exit code."""
    while role.code is None:
        for key, _ in selector.select(TICK):
            key.data()
        asked = [received.pop(0) for _ in received[:]]
        # Between the two, so that reports older than a signal are known when it counts.
        local.poll(time.monotonic())
        while asked and role.code is None:
            role.signal(asked.pop(0))
        if role.code is None:
            role.tick(time.monotonic())
    return role.code
