"""What the settings of a run may be."""

from argparse import Namespace
from collections.abc import Callable

import optax

from experiments import loading, optimizers, partition
from syncalgos import Strategy, average, checks, reset
from syncalgos.layout import BACKENDS

# --opt-state-at-sync: what becomes of the inner optimizer's state.
AT_SYNC: dict[str, Callable[[optax.GradientTransformation], Strategy]] = {
    "keep": lambda optimizer: Strategy(),
    "reset": reset,
    "average": lambda optimizer: average("opt_state"),
}


def check(s: Namespace) -> None:
    """Raises a ValueError for a setting that is unknown or out of range."""
    checks.one_of("backend", s.backend, BACKENDS)
    checks.one_of("--opt-state-at-sync", s.opt_state_at_sync, AT_SYNC)
    names = {
        "schedule": optimizers.SCHEDULES,
        "optimizer": sorted(optimizers.known()),
        "feed": loading.FEEDS,
    }
    for flag, known in names.items():
        if (value := getattr(s, flag)) is not None:
            checks.one_of(flag, value, known)
    checks.whole("--workers", s.workers, least=1)
    checks.whole("--accumulate", s.accumulate, least=1)
    positive = ("steps", "batch_size", "eval_every", "dispatch_steps")
    for flag in (*positive, "checkpoint_every", "keep_checkpoints", "processes"):
        if (value := getattr(s, flag)) is not None:
            checks.whole(f"--{flag.replace('_', '-')}", value, least=1)
    for flag in ("warmup_steps", "sync_until", "seed", "max_restarts"):
        if (value := getattr(s, flag)) is not None:
            checks.whole(f"--{flag.replace('_', '-')}", value, least=0)
    bounds = {
        "lr": {"above": 0},
        "momentum": {"least": 0, "below": 1},
        "weight_decay": {"least": 0},
        "clip_norm": {"above": 0},
        "validation": {"above": 0, "below": 1},
        "init_timeout": {"above": 0},
    }
    for flag, bound in bounds.items():
        if (value := getattr(s, flag)) is not None:
            checks.real(f"--{flag.replace('_', '-')}", value, **bound)
    partition.check(s.partition)
    if (s.resume or s.resume_center) and s.overwrite:
        raise ValueError(
            "--resume goes on with a run, --overwrite begins it anew: say one of them"
        )
