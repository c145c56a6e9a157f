"""One of several processes that jax.distributed alone connects."""

import dataclasses
import json
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import jax

from experiments import exit_codes
from experiments.cli import exits, signals
from experiments.cli.errors import BadRequest, in_one_line, named
from experiments.launch import gloo
from experiments.launch.joining.join import (
    Unconnected,
    difference,
    join,
    place_on_host,
)
from experiments.launch.membership import Membership
from experiments.training.config import RunConfig
from experiments.training.one_run import make
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
    has_starter: bool,
) -> int:
    """Joins the other processes, and makes the run with them.

    Args:
        config: from the command line.
        argv: its flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        stopped: looked at before each dispatch.
        membership: the number of this process, and of all processes.
        has_starter: whether a command of ours started all processes here. It ends them
            at a second signal, and they share its terminal.

    Returns:
        The exit code. The process may also end at once, because another process is gone
        or because jax aborts it in C++ (exit code 134) when its service misses one.
    """
    member = JoinedMember(membership, stopped, has_starter)
    if not has_starter:
        _end_at_second_signal()
    return member.run(config, argv, started)


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
    """This process among those of a run; an error in one of them ends all."""

    def __init__(
        self, membership: Membership, stopped: exits.Stopped, has_starter: bool
    ):
        self._membership = membership
        self._process = membership.process or 0
        self._has_starter = has_starter
        self._errors = exits.sole_output(self._process == 0)
        self._stopped = stopped
        self._ending = threading.Lock()

    def run(self, config: RunConfig, argv: list[str], started: float) -> int:
        """Joins, trains and leaves; returns the exit code."""
        try:
            return self._run(config, argv, started)
        except BadRequest as error:
            self._refuse(f"error: {in_one_line(error)}", error.code)
        except Exception as error:
            if gloo.tells_of_loss(error):
                self._lost(named(error))
            for line in traceback.format_exc().splitlines():
                self._say(line)
            self._refuse(named(error), exit_codes.FAILED)

    def _run(self, config: RunConfig, argv: list[str], started: float) -> int:
        try:
            hellos = join(config, self._membership, self._say)
        except Unconnected as error:
            self._say(str(error))
            signals.end(gloo.hinted(exit_codes.UNCONNECTED, self._say))
        if line := difference(hellos):
            # All together: otherwise jax would report the first that leaves as lost.
            jax.distributed.shutdown()
            self._end(exit_codes.UNCONNECTED, line)
        is_leaving = threading.Event()
        watch = threading.Thread(target=self._watch, args=(is_leaving,), daemon=True)
        watch.start()
        # Groups of `hierarchical` follow the hosts, not the processes: otherwise two
        # processes on one host would give other results than one process.
        hosts = [tuple(hello.host) for hello in hellos]
        local, sharing = place_on_host(hosts, self._process)
        gloo.take_devices(local, sharing, config.mesh_devices(len(hellos)))
        if self._process and not self._has_starter:
            who = f"process {self._process} of {len(hellos)}"
            self._say(f"{who} has joined; process 0 shows the progress")
        group = ProcessGroup(
            process=self._process,
            processes=len(hellos),
            hosts=len(set(hosts)),
            sharing=sharing,
            note=self._note,
        )
        config = dataclasses.replace(config, out=config.out or Path(hellos[0].out))
        code = make(config, argv, started, self._stopped, group)
        is_leaving.set()
        watch.join()
        jax.distributed.shutdown()
        return code

    def _refuse(self, text: str, code: int) -> NoReturn:
        """Ends this process, and thereby the run; tells the others why."""
        if (store := gloo.store()) is not None:
            with suppress(RuntimeError):  # the service itself is gone
                store.key_value_set(
                    f"refusal/{self._process}", json.dumps([code, text])
                )
            self._linger()
        self._end(code, text)

    def _lost(self, text: str) -> NoReturn:
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
        self._end(code, f"{who} is gone ({text})")

    def _end(self, code: int, text: str) -> NoReturn:
        """Ends this process at once, without a shutdown that waits for others."""
        # Several threads may notice the same failure.
        self._ending.acquire()
        # In one terminal, process 0 alone says what all processes know.
        if not (self._process and self._has_starter):
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
                self._end(code, f"process {process}: {reason}")

    def _linger(self) -> None:
        """Keeps jax's service running while the others read its messages."""
        if self._process == 0:
            time.sleep(LINGERING)

    def _note(self, text: str) -> None:
        """Shows the user a line that another process may show, too."""
        self._say(f"process {self._process}: {text}" if self._process else text)

    def _say(self, text: str) -> None:
        """Shows the user a line, from any process."""
        print(exits.printable(text), file=self._errors, flush=True)
