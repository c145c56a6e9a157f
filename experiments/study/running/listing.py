"""The missing runs of a study as commands, for job arrays and xargs."""

import shlex
from collections.abc import Iterator

from experiments.cli.flags import PROGRAM
from experiments.study.running.plan import Plan
from experiments.training.components import environment


def commands(plan: Plan, devices: int | None) -> Iterator[str]:
    """Yields the command of each missing run.

    Args:
        plan: the missing runs that are known so far.
        devices: CPU devices, and threads, of each run; None sets nothing.
    """
    given = {} if devices is None else environment(devices, devices)
    prefix = ["env", *(f"{k}={x}" for k, x in given.items())] if given else []
    for run in plan.waiting():
        # A run that was cut short goes on, if it has a checkpoint.
        own = ["--seed", str(run.seed), "--out", str(run.folder), "--resume"]
        yield shlex.join([*prefix, *PROGRAM.split(), *run.argv, *own])


def summary(plan: Plan) -> str:
    """Returns how many runs are listed, and how many are not known yet."""
    listed = sum(1 for _ in plan.waiting())
    missing = plan.total - plan.done
    text = f"{listed} of {plan.total} runs are listed"
    if missing > listed:
        text += (
            f", {missing - listed} more follow from these trials: list again once they "
            "are done"
        )
    return text if missing else f"all {plan.total} runs are there"
