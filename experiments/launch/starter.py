"""Starts the processes of a run on this machine, and starts them again after a loss.

Each process is the command that `docs/many-hosts.md` shows for a host: they find each
other by jax.distributed, and whatever one of them says, all know.
"""

import json
import os
import subprocess
import sys
import threading
import time

from experiments.cli.exits import Stopped, say
from experiments.cli.signals import end
from experiments.cli.words import without
from experiments.exit_codes import (
    BAD_REQUEST,
    DIVERGED,
    DONE,
    FAILED,
    TERMINATED,
    UNCONNECTED,
    signal_name,
    stopped_by,
)
from experiments.launch.addresses import free_port
from experiments.training.config import RunConfig
from experiments.training.records import default_out

VARIABLE = "SYNCALGOS_STARTED"  # the flags as the user gave them
TICK = 0.05  # seconds between two looks
GRACE = 10.0  # seconds for the others to end by themselves after a loss
TOLD = (FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED)  # another attempt ends alike


def start(config: RunConfig, argv: list[str], stopped: Stopped) -> int:
    """Starts all processes, again after a loss if asked to; returns the exit code."""
    out = config.out or default_out(config.task, config.algo)
    words = [*without(argv, ("processes", "max_restarts", "out")), "--out", str(out)]
    for attempt in range(config.max_restarts + 1):
        if attempt:
            say(f"restart {attempt} of {config.max_restarts}")
            words = [*without(words, ("overwrite", "resume")), "--resume"]
        code = _attempt(words, argv, config.processes, stopped)
        if code != TERMINATED or stopped():
            break
    return code


def _attempt(words: list[str], argv: list[str], count: int, stopped: Stopped) -> int:
    """Starts all processes once, and waits for their end."""
    program = [sys.executable, "-m", "experiments.run", *words]
    program += ["--coordinator", f"127.0.0.1:{free_port()}"]
    program += ["--num-processes", str(count), "--process-id"]
    children = [
        subprocess.Popen(
            [*program, str(number)],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            stdout=subprocess.DEVNULL if number else None,
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process
            env={**os.environ, VARIABLE: json.dumps(argv)},
        )
        for number in range(count)
    ]
    asked, noticed = 0, 0.0
    while None in [child.poll() for child in children]:
        time.sleep(TICK)
        if not asked and (asked := stopped()):
            for child in children:
                child.send_signal(asked)
        lost = [i for i, x in enumerate(children) if x.returncode not in (None, DONE)]
        if lost and not noticed:
            noticed = time.monotonic()
            if (code := children[lost[0]].returncode) < 0 and not asked:
                who = f"process {lost[0]} (pid {children[lost[0]].pid})"
                say(f"{who} was killed by {signal_name(-code)}")
        if noticed and time.monotonic() - noticed > GRACE:
            for child in reversed(children):  # process 0 has jax's service
                child.kill()
    codes = [child.returncode for child in children if child.returncode]
    if told := [code for code in codes if code in TOLD]:
        return told[0]
    return DONE if not codes else stopped_by(asked) if asked else TERMINATED


def given_to_starter() -> list[str] | None:
    """Returns the flags that a starter was given, if one started this process.

    This process then ends with the starter.
    """
    if (words := os.environ.pop(VARIABLE, None)) is None:
        return None

    def wait() -> None:
        while os.read(0, 4096):  # nothing is sent: it returns when the pipe closes
            pass
        end(TERMINATED)

    threading.Thread(target=wait, daemon=True).start()
    return json.loads(words)
