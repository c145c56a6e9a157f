"""Runs the processes of a run on a Dask cluster, from the command to its exit code."""

from collections.abc import Mapping
from pathlib import Path

from experiments import exit_codes
from experiments.cli import terminal
from experiments.launch import gloo
from experiments.launch.cluster.cluster_processes import ClusterProcesses
from experiments.launch.cluster.connection import Unreachable, connect
from experiments.launch.cluster.seating import Request
from experiments.launch.cluster.workers import expected
from experiments.launch.supervisor.group import Rules
from experiments.launch.supervisor.run_processes import run_processes
from experiments.training.config import RunConfig


def run_on_cluster(
    config: RunConfig,
    argv: list[str],
    out: Path,
    rules: Rules,
    versions: Mapping[str, str],
) -> int:
    """Starts a run's processes on a cluster's workers and watches them to their end.

    Args:
        config: with a scheduler.
        argv: its flags as given.
        out: the run's folder.
        rules: limits on waiting and restarts.
        versions: of Python and the packages here, as `prepared.versions` has them.

    Returns:
        The exit code.

    Raises:
        BadRequest: Dask is not installed, or the address has another form.
    """
    assert config.scheduler is not None  # as the caller has checked
    try:
        client = connect(config.scheduler, rules.init_timeout)
    except Unreachable as error:
        terminal.say(str(error))
        return exit_codes.UNCONNECTED
    request = Request(
        config.scheduler,
        config.processes,
        argv,
        out.absolute(),
        expected(versions, (config.algo, config.task)),
    )
    processes = ClusterProcesses(client, request, rules, terminal.say)
    announced = {
        "out": str(request.out),
        "folder": str(Path.cwd()),
        "environ": gloo.tls_variables(),
    }
    code = run_processes(processes, announced, rules, terminal.say)
    return gloo.hinted(code, terminal.say)
