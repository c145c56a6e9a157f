"""A process of a run that was started elsewhere, by hand or by a scheduler."""

import dataclasses
import json
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import jax

from experiments import exit_codes
from experiments.cli import exits, signals
from experiments.launch import gloo
from experiments.launch.joining.join import Unconnected, difference, join, numbered
from experiments.launch.membership import Membership
from experiments.launch.run_job import run_job
from experiments.training.config import RunConfig
from experiments.training.process_group import ProcessGroup

GRACE = 1.0  # seconds for other processes to end for the same reason
# Seconds for all to notice a lost process, and to read messages in process 0's service.
LINGERING = 3.0


def run_joined(
    config: RunConfig,
    argv: list[str],
    started: float,
    stopped: exits.Stopped,
    membership: Membership,
) -> int:
    """Joins the other processes, and makes the run with them.

    Args:
        config: from the command line.
        argv: its flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        stopped: looked at before each dispatch.
        membership: the number of this process, and of all processes.

    Returns:
        The exit code. The process may also end at once, because another process is gone
        or because jax aborts it in C++ (exit code 134) when its service misses one.
    """
    member = JoinedMember(membership, stopped)
    _end_at_second_signal()
    program = partial(member.run, config, argv, started)
    return gloo.run_together(member, member.errors, program)


def _end_at_second_signal() -> None:
    """Makes a second signal end this process, even while it waits in a collective."""
    # Python's handlers run only when the main thread is back from C++, perhaps never;
    # the numbers of signals arrive in this pipe at once.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        number = os.read(read, 1)[0]
        os.read(read, 1)
        # If the main thread is free, it ends the process itself, with a message.
        time.sleep(GRACE)
        signals.end(exit_codes.stopped_by(number))

    threading.Thread(target=wait, daemon=True).start()


class JoinedMember:
    """One of several processes that jax.distributed alone connects."""

    def __init__(self, membership: Membership, stopped: exits.Stopped):
        self._membership = membership
        self._process = membership.process or 0
        self.errors = exits.sole_output(self._process == 0)
        self._stopped = stopped
        self._ending = threading.Lock()

    def run(self, config: RunConfig, argv: list[str], started: float) -> int:
        """Joins, trains and leaves; returns the exit code."""
        try:
            hellos = join(config, self._membership, self._say)
        except Unconnected as error:
            self._say(str(error))
            signals.end(gloo.hinted(exit_codes.UNCONNECTED, self._say))
        if line := difference(hellos):
            # All together: otherwise jax would report the first that leaves as lost.
            jax.distributed.shutdown()
            self.end(exit_codes.UNCONNECTED, line)
        is_leaving = threading.Event()
        watch = threading.Thread(target=self._watch, args=(is_leaving,), daemon=True)
        watch.start()
        # Groups of `hierarchical` follow the hosts, not the processes: otherwise two
        # processes on one host would give other results than one process.
        hosts = [tuple(hello.host) for hello in hellos]
        _, local, sharing = numbered(hosts)[self._process]
        gloo.take_devices(local, sharing, config.mesh_devices(len(hellos)))
        if self._process:
            who = f"process {self._process} of {len(hellos)}"
            self._say(f"{who} has joined; process 0 shows the progress")
        group = ProcessGroup(
            process=self._process,
            processes=len(hellos),
            hosts=len(set(hosts)),
            sharing=sharing,
            note=self._say,
        )
        config = dataclasses.replace(config, out=config.out or Path(hellos[0].out))
        code = run_job(config, argv, started, self._stopped, group)
        is_leaving.set()
        watch.join()
        jax.distributed.shutdown()
        return code

    def refuse(self, text: str, code: int) -> NoReturn:
        """Ends this process, and thereby the run; tells the others why."""
        if (store := gloo.store()) is not None:
            with suppress(RuntimeError):  # the service itself is gone
                store.key_value_set(
                    f"refusal/{self._process}", json.dumps([code, text])
                )
            self._linger()
        self.end(code, text)

    def lost(self, text: str) -> NoReturn:
        """Ends this process because another one is gone, or refused to continue."""
        count, process, where = self._membership
        others = [f"process {i}" for i in range(count) if i != process]
        who = others[0] if len(others) == 1 else "another process"
        time.sleep(GRACE)
        try:
            self._follow()
        except RuntimeError:
            who = f"process 0 at {where}"
        self._linger()
        number = self._stopped()
        code = exit_codes.stopped_by(number) if number else exit_codes.TERMINATED
        self.end(code, f"{who} is gone ({text})")

    def end(self, code: int, text: str) -> NoReturn:
        """Ends this process at once, without a shutdown that waits for others."""
        # Several threads may notice the same failure.
        self._ending.acquire()
        self._say(text)
        signals.end(code)

    def _watch(self, is_leaving: threading.Event) -> None:
        """Ends this process once another one has refused to continue."""
        # This process may wait for the other in a call in which gloo and NCCL do not
        # notice that it is gone.
        with suppress(RuntimeError):  # the main thread, or jax, is about to notice
            while not is_leaving.wait(GRACE):
                self._follow()

    def _follow(self) -> None:
        """Ends this process if another one has refused to continue.

        Raises:
            RuntimeError: process 0 is gone.
        """
        if not gloo.store().key_value_dir_get("refusal/"):
            return
        time.sleep(GRACE)  # if all refuse for the same reason, each shows its own line
        for key, words in sorted(gloo.store().key_value_dir_get("refusal/")):
            process = int(key.rpartition("/")[2])
            if process != self._process:
                code, reason = json.loads(words)
                self._linger()
                self.end(code, f"process {process}: {reason}")

    def _linger(self) -> None:
        """Keeps jax's service running while the others read its messages."""
        if self._process == 0:
            time.sleep(LINGERING)

    def _say(self, text: str) -> None:
        """Shows the user a line, from any process."""
        print(exits.printable(text), file=self.errors, flush=True)
