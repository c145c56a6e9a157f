"""Starts the processes of a run on this machine, and starts them again after a loss.

Each process is the command that docs/many-hosts.md shows for a host, so the processes
join and tell each other why they end as they do across hosts.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from experiments import files
from experiments.command import stopping
from experiments.command.stopping import COMPLETED, FAILED, TERMINATED, UNCONNECTED, say
from experiments.command.words import without
from experiments.processes.network import LOCALHOST, free_port, listen
from experiments.training.config import RunConfig
from experiments.training.run_folder import default_out

VARIABLE = "SYNCALGOS_STARTED"  # for a process: the flags as the user gave them
PORTS = 3  # ports to try if other programs take them
TICK = 0.05  # seconds between two looks at the processes
GRACE = 10.0  # seconds for the others to end by themselves after a loss


def start_processes(config: RunConfig, argv: list[str]) -> int:
    """Starts all processes of a run, again after a loss; returns the exit code.

    Only a loss (75) leads to a restart: after a bad request, an error, a divergence or
    a stop, another attempt would end in the same way. So would one after an end that no
    kill explains, if the attempt before ended at the same step.

    Args:
        config: the config of the command line, with the number of processes.
        argv: its flags as given.
    """
    # The folder is made only seconds later; no other command has this process id.
    out = config.out or default_out(config.task, config.algo, os.getpid())
    words = [*without(argv, ("processes", "max_restarts", "out")), "--out", str(out)]
    again = [*without(words, ("overwrite", "resume")), "--resume"]
    received: list[int] = []
    with stopping.handling(lambda number, _: received.append(number)):
        code = COMPLETED
        earlier_step = None
        for restarts in range(config.max_restarts + 1):
            if restarts:
                say(f"restart {restarts} of {config.max_restarts}")
            flags = again if restarts else words
            code, is_killed = _attempt(flags, argv, config.processes, received)
            if code != TERMINATED or received:
                break
            reached_step = None if is_killed else _read_progress(out)
            if reached_step is not None and reached_step == earlier_step:
                say("it ended at the same step as before: no restart")
                code = FAILED
                break
            earlier_step = reached_step
        return stopping.decide(code)


def _read_progress(out: Path) -> tuple[list[str], int]:
    """Returns what tells how far a run has come: its checkpoints and evaluations."""
    steps = sorted(path.name for path in out.glob("checkpoints/step-*"))
    try:
        return steps, files.read_bytes(out / "metrics.jsonl").count(b"\n")
    except (OSError, files.Damaged):
        return steps, 0


def _attempt(
    words: list[str],
    argv: list[str],
    count: int,
    received: list[int],
    ports_left: int = PORTS,
) -> tuple[int, bool]:
    """Starts all processes; on another port if theirs is taken, while any is left.

    Returns:
        The exit code, and whether a process was killed.
    """
    port = free_port()
    command = [sys.executable, "-m", "experiments.run", *words]
    command += ["--coordinator", f"{LOCALHOST}:{port}", "--num-processes", str(count)]
    # Their stdin closes when this command ends in any way; Ctrl-C reaches only it.
    begin = partial(
        subprocess.Popen,
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, VARIABLE: json.dumps(argv)},
    )
    with ExitStack() as stack:
        children = []
        for number in range(count):
            process_command = [*command, "--process-id", str(number)]
            child = begin(
                process_command, stdout=subprocess.DEVNULL if number else None
            )
            children.append(stack.enter_context(child))
        code = watch(children, received)
    # Another program may have taken the port before process 0 listened there.
    may_retry = code == UNCONNECTED and ports_left > 1 and not received
    if may_retry and _is_taken(port):
        say(f"another program took port {port}: trying another port")
        return _attempt(words, argv, count, received, ports_left - 1)
    return code, any(child.returncode < 0 for child in children)


def watch(children: Sequence[subprocess.Popen[bytes]], received: list[int]) -> int:
    """Waits until all processes of a run have ended; returns its exit code.

    If one is lost, the others are killed: at once if a signal killed it, and otherwise
    once they have had time to notice the loss and to end by themselves. The lost one is
    named.

    Args:
        children: the processes, in their order.
        received: the signals that this command has received so far. The first is passed
            on, and a second ends all processes at once.
    """
    signal_number = 0
    deadline = math.inf
    codes = [child.poll() for child in children]
    while None in codes:
        current_time = time.monotonic()
        if received and not signal_number:
            signal_number = received[0]
            # Unlike SIGINT, it ends a process quietly that has no handler yet.
            for child in children:
                child.send_signal(signal.SIGTERM)
        if not {*codes} <= {None, *_expected_codes(signal_number)}:
            deadline = min(deadline, current_time + GRACE)
        if (
            received[1:]
            or _find_killing_signals(codes, signal_number)
            or codes[0] == UNCONNECTED
        ):
            deadline = current_time
        if current_time >= deadline:
            break
        time.sleep(TICK)
        codes = [child.poll() for child in children]
    expected = _expected_codes(signal_number)
    _kill([x for x, code in zip(children, codes, strict=True) if code not in expected])
    if received[1:] and None in codes:
        return stopping.stop_code(received[0])
    code, lines = verdict(codes, [child.pid for child in children], signal_number)
    for line in lines:
        say(line)
    return code


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills processes, and all that they have started."""
    # Process 0 last: it has jax's service, whose end the others would report.
    for child in reversed(children):
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()


def verdict(
    codes: Sequence[int | None], pids: Sequence[int], signal_number: int
) -> tuple[int, list[str]]:
    """Returns the exit code of a run, and a line about each process that was lost.

    Args:
        codes: how each process ended; None if it had to be killed.
        pids: their process ids.
        asked: the signal that asked the run to stop, or 0.
    """
    stop_code = stopping.stop_code(signal_number) if signal_number else TERMINATED
    signals = _find_killing_signals(codes, signal_number)
    error_codes = [code for code in codes if code and 0 < code != TERMINATED]
    frozen_processes = [i for i, code in enumerate(codes) if code is None]
    if not signals and error_codes:
        return error_codes[0], []  # the processes have said why
    if not signals and frozen_processes:
        return stop_code, [
            f"process {i} (pid {pids[i]}) did not end by itself after the others: it "
            "may be stopped or frozen"
            for i in frozen_processes
        ]
    if not signals:
        # jax aborts a process that has lost another one: it is named if no other is.
        signals = {
            i: signal.SIGABRT for i, code in enumerate(codes) if code == -signal.SIGABRT
        }
    return stop_code if any(codes) else COMPLETED, [
        f"process {i} (pid {pids[i]}) was killed by {stopping.signal_name(number)}"
        for i, number in signals.items()
    ]


def _expected_codes(signal_number: int) -> tuple[int, ...]:
    """Returns exit codes that do not tell of a loss."""
    return (
        COMPLETED,
        stopping.DIVERGED,
        *((TERMINATED, -signal.SIGTERM) if signal_number else ()),
    )


def _find_killing_signals(
    codes: Sequence[int | None], signal_number: int
) -> dict[int, int]:
    """Returns the signals that killed processes, without those that follow a loss."""
    # jax aborts a process that has lost another one.
    expected = (-signal.SIGABRT, *_expected_codes(signal_number))
    return {i: -x for i, x in enumerate(codes) if x and x < 0 and x not in expected}


def _is_taken(port: int) -> bool:
    """Whether a program listens at a port."""
    try:
        listen(LOCALHOST, port).close()
    except OSError:
        return True
    return False


def find_starter_argv() -> list[str] | None:
    """Returns the flags that a starter was given, if one started this process.

    From then on this process ends with its starter. Call it once, early.
    """
    # Removed, so that programs started by this process do not inherit it.
    argv_json = os.environ.pop(VARIABLE, None)
    if argv_json is None:
        return None
    threading.Thread(target=_end_with_starter, daemon=True).start()
    return json.loads(argv_json)


def _end_with_starter() -> None:
    """Ends this process and those it started when its stdin closes."""
    while os.read(0, 4096):
        pass
    with suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(TERMINATED)
