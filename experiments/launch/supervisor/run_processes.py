"""Runs the processes of a run to their end: see `run_processes`."""

import time
from typing import Any

from experiments.exit_codes import decide, handling
from experiments.launch.supervisor.group import Log, Rules
from experiments.launch.supervisor.leader import Leader
from experiments.launch.supervisor.processes import Processes

TICK = 0.03  # seconds between two looks


def run_processes(
    processes: Processes, announced: dict[str, Any], rules: Rules, log: Log
) -> int:
    """Starts, watches and restarts processes until they end.

    No process is left behind in any case.

    Args:
        processes: on this machine, or on others; each calls
            `child_side.join_supervisor`.
        announced: the values that this command sends to all; JSON, below 100 kB.
        rules: limits on waiting and restarts.
        log: shows the user a line, which may hold any text.

    Returns:
        The exit code: that of the processes; 4 if they did not find each other; 75 if
        one was lost, or SIGTERM or SIGHUP came; 130 by Ctrl-C.
    """
    # In processes of their own: jax aborts in C++ when another one is lost, and hangs
    # when one never comes. Exit code, last line and signals stay with this command.
    leader = Leader(processes, announced, rules, log)
    # The loop looks at them after a tick at most.
    received: list[int] = []
    with handling(lambda number, _: received.append(number)):
        try:
            return decide(_loop(leader, processes, received))
        finally:
            processes.kill()
            processes.close()


def _loop(leader: Leader, processes: Processes, received: list[int]) -> int:
    """Looks after signals and processes until the leader has an exit code."""
    while leader.code is None:
        time.sleep(TICK)
        asked = [received.pop(0) for _ in received[:]]
        # Between the two, so that reports older than a signal are known when it counts.
        processes.poll(time.monotonic())
        while asked and leader.code is None:
            leader.signal(asked.pop(0))
        if leader.code is None:
            leader.tick(time.monotonic())
    return leader.code
