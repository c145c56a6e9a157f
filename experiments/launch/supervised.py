"""A run in processes that one command starts and supervises, here or on a cluster."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import jax

from experiments import exit_codes
from experiments.cli import exits, terminal
from experiments.launch import gloo
from experiments.launch.run_job import run_job
from experiments.launch.supervisor.child_side import ChildSide
from experiments.launch.supervisor.leader import run_processes
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.local_processes import LocalProcesses
from experiments.training import records
from experiments.training.config import RunConfig, parse
from experiments.training.process_group import ProcessGroup


def supervise(config: RunConfig, argv: list[str], count: int) -> int:
    """Starts this command's processes and watches them to their end.

    The supervisor is a separate process, because jax aborts in C++ when a process is
    lost, and hangs when one never starts.

    Returns:
        The exit code.
    """
    # The processes create the folder only seconds later, so a default name contains the
    # process id: no other command can choose the same name until then.
    out = config.out or records.default_out(config.task, config.algo, os.getpid())
    limits = Limits(init_timeout=config.init_timeout, max_restarts=config.max_restarts)
    if config.scheduler is None:
        command = [sys.executable, "-m", "experiments.run", *argv]
        processes = LocalProcesses(count, command, limits, terminal.say)
    else:
        # Imported late: it imports Dask, which only --scheduler needs.
        from experiments.launch.cluster.cluster_processes import ClusterProcesses

        out = out.absolute()
        processes = ClusterProcesses(config, argv, out, limits, terminal.say)
    tls = gloo.tls_variables()
    announced = {"out": str(out), "folder": os.getcwd(), "environ": tls}
    code = run_processes(processes, announced, limits, terminal.say)
    return gloo.hinted(code, terminal.say)


def run_as_member(member: ChildSide, argv: list[str], started: float) -> NoReturn:
    """Runs one of the processes of a run, under its supervisor, and ends it."""
    errors = exits.sole_output(member.process == 0)
    program = partial(_trained, member, argv, started)
    member.leave(gloo.run_together(member, errors, program))


def _trained(member: ChildSide, argv: list[str], started: float) -> int:
    config = parse(argv)
    gloo.check_tls()
    # A restart continues from the checkpoints of its run, and must not erase them.
    is_restart = member.attempt > 0
    config = dataclasses.replace(
        located(config, member.announced),
        resume=config.resume or is_restart,
        overwrite=config.overwrite and not is_restart,
    )
    member.report("connect")
    where, count = member.jax_coordinator, member.processes
    gloo.connect(where, member.process, count, member.init_timeout)
    gloo.take_devices(member.local, member.locals, config.mesh_devices(count))
    group = ProcessGroup(
        process=member.process,
        processes=count,
        hosts=member.hosts,
        sharing=member.locals,
        announce=member.report,
        decided=member.decided,
        note=member.log if member.process else terminal.say,
    )
    if member.process and not member.local:
        member.log("has joined; process 0 shows the progress")

    def program(stopped: exits.Stopped) -> int:
        member.report("prepare")
        return run_job(config, argv, started, stopped, group)

    code = exits.watched(program, is_supervised=True)
    if code in (exit_codes.TERMINATED, exit_codes.INTERRUPTED):
        member.stopped()
    jax.distributed.shutdown()
    return code


def located(config: RunConfig, announced: Mapping[str, str]) -> RunConfig:
    """Returns the config with the paths as the command resolves them.

    Args:
        config: the config of a process, which may run on another machine.
        announced: "out", the run's folder, and "folder", the command's working folder,
            to which relative paths refer.
    """
    top = Path(announced.get("folder", ""))
    names = "data_dir", "export", "init_from"
    paths = {name: getattr(config, name) for name in names}
    given = {name: top / path for name, path in paths.items() if path is not None}
    return dataclasses.replace(config, out=Path(announced["out"]), **given)
