"""A run in several processes: who supervises them, and how each one joins."""

import dataclasses
import os
import re
import sys
import traceback
from pathlib import Path
from typing import TextIO

import jax

from experiments.cli import exits, terminal
from experiments.cli.errors import BadRequest
from experiments.launch import gloo
from experiments.launch.run_job import run_job
from experiments.supervisor.child_side import ChildSide
from experiments.supervisor.group import Group, Rules
from experiments.supervisor.run_processes import run_processes
from experiments.training import records
from experiments.training.config import RunConfig, parse
from experiments.training.prepared import versions
from experiments.training.process_group import ProcessGroup

# What jax says when another process is gone, in whatever kind of error.
_GONE = re.compile(
    "gloo|nccl|coordination|connection (reset|closed|refused)|broken pipe|"
    "socket closed|unavailable|deadline_exceeded|timed out",
    re.IGNORECASE,
)


def supervise(config: RunConfig, argv: list[str], group: Group) -> int:
    """Starts this command's processes, and watches them to their end.

    Returns:
        The exit code.
    """
    out = config.out or records.default_out(config.task, config.algo)
    facts = {
        f"--{name.replace('_', '-')}": records.plain(value)
        for name, value in config.values("run", "start").items()
    }
    return run_processes(
        group,
        [sys.executable, "-m", "experiments.run", *argv],
        facts | versions(),
        {"out": str(out)},
        Rules(init_timeout=config.init_timeout, max_restarts=config.max_restarts),
        terminal.say,
    )


def run_as_member(member: ChildSide, argv: list[str], started: float) -> int:
    """Runs a process that a supervisor has started.

    Returns:
        The exit code, where the process does not end at once.
    """
    errors = _take_streams(member)
    try:
        return _trained(member, argv, started)
    except BadRequest as error:
        member.refuse(f"error: {' '.join(str(error).split())}", exits.BAD_REQUEST)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        if _GONE.search(str(error)):
            member.lost(text)
        traceback.print_exc(file=errors)
        member.refuse(text, exits.FAILED)


def _trained(member: ChildSide, argv: list[str], started: float) -> int:
    config = parse(argv)
    is_restart = member.attempt > 0
    config = dataclasses.replace(
        config,
        out=config.out or Path(member.announced["out"]),
        resume=config.resume or is_restart,
        overwrite=config.overwrite and not is_restart,
    )
    member.report("connect")
    _connect(member)
    group = ProcessGroup(
        process=member.process,
        processes=member.processes,
        hosts=member.hosts,
        sharing=member.locals,
        announce=member.report,
        note=member.log if member.process else terminal.say,
    )

    if member.process and not member.local:
        member.log("has joined; process 0 shows how it goes")

    def program(stopped: exits.Stopped) -> int:
        member.report("prepare")
        return run_job(config, argv, started, stopped, group)

    code = exits.watched(program, is_supervised=True)
    if code in (exits.TERMINATED, exits.INTERRUPTED):
        member.stopped("SIGTERM" if code == exits.TERMINATED else "SIGINT")
    jax.distributed.shutdown()
    return code


def _connect(member: ChildSide) -> None:
    """Joins the other processes.

    jax's own handler of SIGTERM would take the place of ours, and its heartbeat is
    slower than the supervisor's.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    bind_address = gloo.listen_towards(member.jax_coordinator)
    jax.distributed.initialize(
        member.jax_coordinator,
        member.processes,
        member.process,
        local_device_ids=[member.local] if member.locals > 1 else None,
        initialization_timeout=round(member.init_timeout),
        coordinator_bind_address=bind_address,
    )


def _take_streams(member: ChildSide) -> TextIO:
    """Keeps stdout for the summary, and others than process 0 from speaking.

    gloo tells on the process's stdout to whom it is connected.

    Returns:
        Where a traceback goes.
    """
    errors = exits.unfailing(2, sys.stderr.encoding)
    sys.stdout = exits.unfailing(os.dup(1), sys.stdout.encoding)
    sys.stderr = errors
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if member.process > 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return errors
