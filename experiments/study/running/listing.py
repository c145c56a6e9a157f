"""The missing runs of a study as commands, for job arrays and xargs."""

import shlex
from collections.abc import Iterator, Sequence

from experiments.cli.flags import PROGRAM
from experiments.study.grid import RunSet
from experiments.study.running.jobs import job_environment
from experiments.study.running.plan import Plan


def commands(plan: Plan, devices: int | None) -> Iterator[str]:
    """Yields the command of each missing run, with its folder within the study's.

    Args:
        plan: the plan, with the missing runs that are known so far.
        devices: CPU devices, and threads, of each run; None uses this machine's numbers
            everywhere.
    """
    for run in plan.waiting:
        # An interrupted run continues if it has a checkpoint.
        more = ["--out", str(run.folder), "--resume"]
        yield command(run.runs, run.seed, devices, more)


def command(
    runs: RunSet, seed: int, devices: int | None, more: Sequence[str] = ()
) -> str:
    """Returns the command of one run; `devices` as in `commands`."""
    environ = job_environment(devices)
    prefix = ["env", *(f"{k}={x}" for k, x in environ.items())] if environ else []
    words = [*PROGRAM.split(), *runs.argv, "--seed", str(seed), *more]
    return shlex.join([*prefix, *words])


def summary(plan: Plan) -> str:
    """Returns how many runs are listed, and how many more will follow."""
    listed = len(plan.waiting)
    missing = plan.total - plan.done
    text = f"{listed} of {plan.total} runs are listed"
    if missing > listed:
        text += (
            f"; {missing - listed} more depend on these trials: list again once they "
            "are done"
        )
    return text if missing else f"all {plan.total} runs are complete"
