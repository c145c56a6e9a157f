"""Checks that a resumed run is the run that was started."""

from pathlib import Path
from typing import Any

from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK
from experiments.training import files
from experiments.training.config import SETTINGS, RunConfig

# Flags of 0.3 that are gone; no numbers depended on them.
GONE = {"feed", "keep_checkpoints", "lane_form", "lanes", "scheduler", "sync_memory"}


def check_config(out: Path, config: RunConfig) -> None:
    """Raises a BadRequest if the config.json is damaged or belongs to another run."""
    path = out / "config.json"
    if not path.exists():
        return
    try:
        found = files.read(path)
        with files.using(path):
            before = {
                name: value
                for name, value in found["settings"].items()
                if name not in GONE
                and (name not in SETTINGS or SETTINGS[name].scope == "run")
            }
            before |= {**found["arguments"], **found["task_arguments"]}
    except files.Damaged as error:
        raise BadRequest(
            f"--resume: {error}; no file was removed: --overwrite starts anew"
        ) from error
    check_settings(before, config, same=True)


def check_settings(before: dict[str, Any], config: RunConfig, same: bool) -> None:
    """Raises a BadRequest if the earlier run differs from the run to resume.

    Args:
        before: the earlier run's values that affect its results, by flag, as in JSON.
        config: the config of the run to resume.
        same: whether both have the same number of workers.
    """
    now = files.plain(config.values("run"))
    # A run started before a flag existed used the flag's default.
    common = {x.parameter: x.default for x in SETTINGS.values() if x.scope == "run"}
    algorithm = factories.describe(ALGORITHM, config.algo)
    common |= algorithm.defaults | factories.defaults(TASK, config.task)
    before = files.plain(common) | before
    # A flag that is gone had no effect unless it was set.
    before = {k: x for k, x in before.items() if k in now or x not in (None, False)}
    free = set() if same else {"workers", "batch_size", "accumulate"}
    if config.schedule == "constant":  # a longer run starts like a shorter one
        free.add("steps")
    # Other tasks, algorithms and versions have other flags: name these first.
    first = "task", "algo"
    names = sorted({*now, *before} - free, key=lambda x: (x not in first, x in now, x))
    for name in names:
        if now.get(name) != before.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise BadRequest(
                f"--resume: the run was made with {flag} {before.get(name)}, not "
                f"{now.get(name)}"
            )
