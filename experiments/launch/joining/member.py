"""A run's process that others start: by hand, or by a scheduler."""

import dataclasses
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import jax

from experiments import exit_codes
from experiments.cli import exits, signals
from experiments.cli.errors import BadRequest
from experiments.launch import gloo
from experiments.launch.joining import aborts, agreement, farewells
from experiments.launch.joining.agreement import Hello
from experiments.launch.joining.farewells import LINGERING, Farewell
from experiments.launch.joining.join import LOSS, Unconnected, join
from experiments.launch.membership import Membership
from experiments.launch.run_job import run_job
from experiments.launch.supervisor.group import processes
from experiments.training.config import RunConfig
from experiments.training.process_group import ProcessGroup

GRACE = 1.0  # seconds for others to end alike


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
        membership: who this process is.

    Returns:
        The exit code, unless the process ends at once because another one is gone.
    """
    with aborts.own_streams(membership.process == 0) as streams:
        member = JoinedMember(membership, config.init_timeout, streams, stopped)
        _end_at_second_signal()
        with aborts.catching_aborts(member.aborted):
            return member.run(config, argv, started)


def _end_at_second_signal() -> None:
    """Has a second signal end this process also while it waits in a collective."""
    # Python's handlers wait for the main thread to come back from C++, which may be
    # for ever; the numbers of signals come here at once.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        number = os.read(read, 1)[0]
        os.read(read, 1)
        # Where the main thread is free, it does the same, and says so.
        time.sleep(GRACE)
        signals.end(exit_codes.stopped_by(number))

    threading.Thread(target=wait, daemon=True).start()


class JoinedMember:
    """One of several processes that jax.distributed alone connects."""

    def __init__(
        self,
        membership: Membership,
        seconds: float,
        streams: aborts.Streams,
        stopped: exits.Stopped,
    ):
        self._membership = membership
        self._process = membership.process or 0
        self._seconds = seconds
        self._streams = streams
        self._stopped = stopped
        self._has_joined = False
        self._is_leaving = threading.Event()
        self._ending = threading.Lock()

    def run(self, config: RunConfig, argv: list[str], started: float) -> int:
        """Joins, trains and leaves; returns the exit code."""
        try:
            hellos = join(config, self._membership, self._streams.say)
            self._has_joined = True
            watch = threading.Thread(target=self._watch, daemon=True)
            watch.start()
            gpus = config.mesh_devices(self._membership.processes) or 1
            group = self._group(hellos, gpus)
            config = dataclasses.replace(config, out=config.out or Path(hellos[0].out))
            code = run_job(config, argv, started, self._stopped, group)
            self._is_leaving.set()
            watch.join()
            jax.distributed.shutdown()
            return code
        except Unconnected as error:
            self._end(exit_codes.UNCONNECTED, str(error))
        except BadRequest as error:
            line = f"error: {' '.join(str(error).split())}"
            self._refuse(error.code, line, line)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            if gloo.is_loss(error):
                self._lost(text)
            self._streams.errors.write(self._streams.noise())
            self._refuse(exit_codes.FAILED, text, traceback.format_exc().rstrip())

    def aborted(self) -> None:
        """Ends this process by a line where jax aborts it."""
        noise, (count, _, where) = self._streams.noise(), self._membership
        line = aborts.line_of(noise, where, count, self._seconds, LOSS)
        if line is None:
            self._streams.errors.write(noise)
        else:
            hint = "" if self._has_joined else gloo.tls_hint()
            self._end(self._code_of_loss, line + hint)

    @property
    def _code_of_loss(self) -> int:
        if not self._has_joined:
            return exit_codes.UNCONNECTED
        number = self._stopped()
        return exit_codes.stopped_by(number) if number else exit_codes.TERMINATED

    def _group(self, hellos: list[Hello], gpus: int) -> ProcessGroup:
        """Returns the processes as this one sees them, and takes its own GPUs."""
        hosts, where = agreement.places(hellos)
        local, sharing = where[self._process]
        if sharing > 1:
            gloo.take_devices(local, gpus)
        if self._process:
            count = self._membership.processes
            who = f"process {self._process} of {count}"
            self._streams.say(f"{who} has joined; process 0 shows how it goes")
        return ProcessGroup(
            process=self._process,
            processes=len(hellos),
            hosts=hosts,
            sharing=sharing,
            note=self._streams.say,
        )

    def _refuse(self, code: int, reason: str, text: str) -> NoReturn:
        """Ends this process, and so the run; the others are told why."""
        if self._has_joined:
            farewells.leave(self._process, Farewell(code, reason))
            self._linger()
        self._end(code, text)

    def _lost(self, error: str) -> NoReturn:
        """Ends this process because another one is gone."""
        farewells.leave(self._process, Farewell(0))
        count, _, where = self._membership
        try:
            known = farewells.gathered(count)
        except RuntimeError:
            self._end(self._code_of_loss, f"process 0 at {where} is gone")
        self._follow(known)
        self._linger()
        # Process 0 is there: its service has answered.
        silent = [i for i in range(1, count) if i not in known and i != self._process]
        # Those that were busy may not have noticed it yet.
        who = processes(silent) if silent else "another process"
        who = f"one of {who}" if len(silent) > 1 else who
        self._end(self._code_of_loss, f"{who} is gone ({error})")

    def _watch(self) -> None:
        """Ends this process once another one refused to go on; see `_refuse`."""
        # It may wait for the other one where neither gloo nor NCCL notices.
        while not self._is_leaving.wait(GRACE):
            try:
                if any(farewell.code for farewell in farewells.read().values()):
                    # All may refuse alike, and each shows its own line.
                    time.sleep(GRACE)
                    self._follow(farewells.read())
            # The main thread, or one of jax's, is about to notice.
            except RuntimeError:
                return

    def _follow(self, known: dict[int, Farewell]) -> None:
        """Ends this process as another one did that refused to go on, if one did."""
        refused = [(i, x) for i, x in sorted(known.items()) if x.code]
        for process, farewell in refused:
            if process != self._process:
                self._linger()
                self._end(farewell.code, f"process {process}: {farewell.reason}")

    def _linger(self) -> None:
        """Keeps jax's service up while the others read what it holds."""
        if self._process == 0:
            time.sleep(LINGERING)

    def _end(self, code: int, text: str) -> NoReturn:
        """Ends this process at once, without a shutdown that waits for others."""
        # Several threads may notice the same.
        self._ending.acquire()
        for line in text.splitlines():
            self._streams.say(line)
        signals.end(code)
