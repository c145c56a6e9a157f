"""Checks the settings of a run, alone and beside each other."""

from argparse import Namespace
from typing import Any

from experiments.cli.library import checks
from experiments.training.config import SETTINGS


def check(s: Namespace) -> None:
    """Raises a ValueError for a setting out of its range, or two that do not fit."""
    for name, setting in SETTINGS.items():
        setting.check(getattr(s, name))
    if s.partition != "iid":
        from experiments.pipeline import partition  # imports NumPy

        partition.check(s.partition)
    if (s.resume or s.resume_center) and s.overwrite:
        raise ValueError(
            "--resume goes on with a run, --overwrite begins it anew: say one of them"
        )
    if s.batch_size is not None:
        checks.global_batch(s.batch_size, s.workers, s.accumulate)
    if s.steps is not None:
        check_length(s)


def check_length(s: Namespace) -> None:
    """Raises a ValueError for a phase that the run's steps do not hold."""
    if (s.warmup_steps or 0) > s.steps:
        raise ValueError(f"--warmup-steps {s.warmup_steps} is above --steps {s.steps}")
    if late := never_reached("--sync-until", s.sync_until, s.steps):
        raise ValueError(late)


def never_reached(flag: str, step: Any, steps: int) -> str:
    """Says that a run is over before its algorithm begins.

    Args:
        flag: that sets the step.
        step: from which on the algorithm acts; anything else than an int is none.
        steps: of the run.

    Returns:
        One line, or "" where it acts.
    """
    if type(step) is not int or step < steps:
        return ""
    return (
        f"{flag} {step} is not below --steps {steps}: all steps would be synchronous, "
        "as by --algo sync_sgd"
    )
