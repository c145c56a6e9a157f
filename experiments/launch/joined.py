"""A run's process that others start: by hand, or by a scheduler."""

import dataclasses
import json
import os
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jax

from experiments import exit_codes
from experiments.cli import exits, signals
from experiments.cli.errors import BadRequest
from experiments.launch import aborts, agreement, gloo
from experiments.launch.addresses import (
    address,
    is_address,
    listen,
    own_address,
    reach,
)
from experiments.launch.agreement import Hello
from experiments.launch.membership import Membership
from experiments.launch.run_job import run_job
from experiments.supervisor.group import processes
from experiments.training import records
from experiments.training.config import RunConfig
from experiments.training.prepared import versions
from experiments.training.process_group import ProcessGroup

PAUSE = 0.25  # seconds between two looks
SLACK = 5.0  # seconds for jax's service to give up by itself, which names the missing
# Seconds for all to notice who is gone, and to read what process 0's service holds.
LINGERING = 3.0


class Unconnected(Exception):
    """The processes do not find each other, or differ; the message is one line."""


def run_joined(
    config: RunConfig,
    argv: list[str],
    started: float,
    stopped: exits.Stopped,
    membership: Membership,
) -> int:
    """Joins the other processes, and makes the run with them.

    Returns:
        The exit code, unless the process ends at once because another one is gone.
    """
    with aborts.own_streams(membership.process == 0) as streams:
        member = JoinedMember(membership, config.init_timeout, streams, stopped)
        with aborts.catching_aborts(member.aborted):
            return member.run(config, argv, started)


class JoinedMember:
    """One of several processes that jax.distributed alone connects."""

    def __init__(
        self,
        membership: Membership,
        seconds: float,
        streams: aborts.Streams,
        stopped: exits.Stopped,
    ):
        self._process = membership.process or 0
        self._count = membership.processes
        self._where = membership.coordinator
        self._seconds = seconds
        self._streams = streams
        self._stopped = stopped
        self._has_joined = False
        self._ending = threading.Lock()

    def run(self, config: RunConfig, argv: list[str], started: float) -> int:
        """Joins, trains and leaves; returns the exit code."""
        try:
            hellos = self._join(config)
            group = self._group(hellos)
            config = dataclasses.replace(config, out=config.out or Path(hellos[0].out))
            code = run_job(config, argv, started, self._stopped, group)
            jax.distributed.shutdown()
            return code
        except Unconnected as error:
            self._end(exit_codes.UNCONNECTED, str(error))
        except BadRequest as error:
            line = f"error: {' '.join(str(error).split())}"
            self._refuse(exit_codes.BAD_REQUEST, line, line)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            if aborts.is_loss(error):
                self._lost(text)
            self._streams.errors.write(self._streams.noise())
            self._refuse(exit_codes.FAILED, text, traceback.format_exc().rstrip())

    def aborted(self) -> None:
        """Ends this process by a line where jax aborts it."""
        noise = self._streams.noise()
        line = aborts.line_of(noise, self._where, self._count, self._seconds)
        if line is None:
            self._streams.errors.write(noise)
        else:
            self._end(self._code_of_loss, line)

    @property
    def _code_of_loss(self) -> int:
        if not self._has_joined:
            return exit_codes.UNCONNECTED
        number = self._stopped()
        return exit_codes.stopped_by(number) if number else exit_codes.TERMINATED

    # Joining

    def _join(self, config: RunConfig) -> list[Hello]:
        """Joins the other processes; returns the introductions of all.

        Raises:
            Unconnected: they are not there, or differ.
        """
        since = time.monotonic()
        host, port = address(self._where)
        if self._process:
            self._find(host, port)
        else:
            self._check_port(host, port)
        self._connect(since + self._seconds + SLACK)
        hellos = self._exchange(config)
        line = agreement.difference(hellos)
        if line is not None:
            # Together: else jax would report the first that leaves as lost.
            jax.distributed.shutdown()
            raise Unconnected(line)
        self._has_joined = True
        if self._process:
            self._streams.say(
                f"process {self._process} of {self._count} has joined; process 0 "
                "shows how it goes"
            )
        return hellos

    def _find(self, host: str, port: int) -> None:
        """Waits until process 0 listens."""
        # jax aborts in C++ where nobody does, and reports no reason.
        reason = reach(host, port, self._seconds)
        if reason is not None:
            raise Unconnected(
                f"process {self._process} found no process 0 at {self._where} in "
                f"{self._seconds:g} s ({reason}): is it running, and is --coordinator "
                "its address?"
            )

    def _check_port(self, host: str, port: int) -> None:
        """Checks that process 0 can listen at its address."""
        own = own_address(host)
        if own is None and is_address(host):
            raise Unconnected(
                f"process 0 cannot listen at {host}, which is no address of this "
                "machine: give one of its own as --coordinator"
            )
        # Such as a load balancer's name, or one that DNS does not know yet.
        if own is None:
            self._streams.say(
                f"{host} means no address here by which others reach this machine: "
                "process 0 listens at all of them; give one as --coordinator to listen "
                "there alone"
            )
        try:
            # gRPC would share the port with another process 0 without a word.
            listen(own, port).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise Unconnected(
                f"process 0 cannot listen on port {port}: {reason}"
            ) from error

    def _connect(self, deadline: float) -> None:
        """Starts jax among the other processes."""
        failed: list[Exception] = []

        def connect() -> None:
            try:
                gloo.connect(
                    self._where,
                    self._process,
                    self._count,
                    self._seconds,
                    loss=aborts.LOSS,
                )
            except (RuntimeError, OSError) as error:
                failed.append(error)

        # In a thread: signals are handled once jax returns to the main one.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(PAUSE)
        if failed:
            raise Unconnected(f"{self._where}: {str(failed[0]).partition(chr(10))[0]}")
        if thread.is_alive():
            raise Unconnected(
                f"process {self._process} found no process 0 of this program at "
                f"{self._where} in {self._seconds:g} s"
            )

    def _exchange(self, config: RunConfig) -> list[Hello]:
        """Sends this process's introduction to all, and returns theirs."""
        facts = {
            f"--{name.replace('_', '-')}": records.plain(value)
            for name, value in config.values("run", "start").items()
        }
        facts["--num-processes"] = self._count
        out = config.out or records.default_out(config.task, config.algo)
        own = Hello(self._process, agreement.here(), facts | versions(), str(out))
        # Not by a collective, which takes devices of all, and hangs where their number
        # is in doubt.
        store, milliseconds = gloo.store(), max(1, round(self._seconds * 1000))
        store.key_value_set(f"hello/{self._process}", json.dumps(own._asdict()))
        texts = [
            store.blocking_key_value_get(f"hello/{i}", milliseconds)
            for i in range(self._count)
        ]
        return [Hello(**json.loads(text)) for text in texts]

    def _group(self, hellos: list[Hello]) -> ProcessGroup:
        """Returns the processes as this one sees them, and takes its own GPU."""
        hosts, where = agreement.places(hellos)
        local, sharing = where[self._process]
        if sharing > 1:
            gloo.take_device(local)
        return ProcessGroup(
            process=self._process,
            processes=self._count,
            hosts=hosts,
            sharing=sharing,
            note=self._streams.say,
        )

    # Ends

    def _refuse(self, code: int, reason: str, text: str) -> NoReturn:
        """Ends this process, and so the run; the others are told why."""
        if self._has_joined:
            self._bid_farewell({"code": code, "reason": reason})
            if self._process == 0:
                time.sleep(LINGERING)
        self._end(code, text)

    def _lost(self, error: str) -> NoReturn:
        """Ends this process because another one is gone."""
        self._bid_farewell({"code": 0})
        try:
            known = self._farewells()
        except RuntimeError:
            self._end(self._code_of_loss, f"process 0 at {self._where} is gone")
        if self._process == 0:
            time.sleep(LINGERING)
        for process, farewell in sorted(known.items()):
            if farewell["code"]:
                self._end(farewell["code"], f"process {process}: {farewell['reason']}")
        silent = [i for i in range(self._count) if i not in known]
        # Those that were busy may not have noticed it yet.
        who = processes(silent) if silent else "another process"
        who = f"one of {who}" if len(silent) > 1 else who
        self._end(self._code_of_loss, f"{who} is gone ({error})")

    def _farewells(self) -> dict[int, Any]:
        """Waits for the last words of all but one, for a while; a RuntimeError if the
        service is gone."""
        deadline, known = time.monotonic() + LINGERING, {}
        while len(known) < self._count - 1 and time.monotonic() < deadline:
            time.sleep(PAUSE)
            found = gloo.store().key_value_dir_get("farewell/")
            known = {int(key.rpartition("/")[2]): json.loads(x) for key, x in found}
        return known

    def _bid_farewell(self, words: dict[str, Any]) -> None:
        """Leaves last words with process 0's service, if it is there."""
        # The service may be what is gone.
        with suppress(RuntimeError):
            key = f"farewell/{self._process}"
            gloo.store().key_value_set(key, json.dumps(words))

    def _end(self, code: int, text: str) -> NoReturn:
        """Ends this process at once, without a shutdown that waits for others."""
        # jax's threads may notice the same.
        self._ending.acquire()
        for line in text.splitlines():
            self._streams.say(line)
        signals.end(code)
