"""A run's process that others start: by hand, or by a scheduler."""

import jax

from experiments.cli import exits
from experiments.launch import gloo
from experiments.launch.membership import Membership
from experiments.launch.run_job import run_job
from experiments.training.config import RunConfig
from experiments.training.process_group import ProcessGroup


def run_joined(
    config: RunConfig,
    argv: list[str],
    started: float,
    stopped: exits.Stopped,
    membership: Membership,
) -> int:
    """Joins the other processes, and makes the run with them.

    Returns:
        The exit code.
    """
    process, processes = membership.process or 0, membership.processes
    where, seconds = membership.coordinator, config.init_timeout
    gloo.connect(where, process, processes, seconds, None)
    code = run_job(config, argv, started, stopped, ProcessGroup(process, processes))
    jax.distributed.shutdown()
    return code
