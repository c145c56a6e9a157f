"""The config of a run: each field is a flag, and is described here alone.

`RunConfig` is frozen: what follows from the task and the workers makes another one (see
`components.resolved`). `SETTINGS` has its fields' descriptions by name, in their order:

    SETTINGS["lr"].check(0.1)       # raises a ValueError where out of range
    SETTINGS["seed"].study          # what a study offers in its place; "" if nothing
    parse(["--algo", "bmuf"]).lr    # None: the task decides

Nothing here imports jax, so that --help and refusals take no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from experiments.cli import flags
from experiments.cli.factories import ALGORITHM, TASK
from experiments.cli.library import checks
from experiments.cli.settings import Group, Setting, checked, flag, settings_of

TASKS = "the task's"
FILES = Group(
    "files", "start", "nothing: the same command makes what is missing of a study"
)
PROCESSES = Group("processes", "start", "nothing: a study runs in one process")
OWN = "or your own as package.module:factory"

# Earlier names of the ways to run a device's workers; checkpoints still have them.
LANE_FORMS = {"together": "vectorized", "in-turn": "sequential", "joined": "merged"}


@dataclass(frozen=True)
class RunConfig:
    """The config of a run.

    A field whose default is None, and whose type has no None, is filled in by the task
    before anything is trained; code that trains relies on its type.

    Attributes:
        arguments: the algorithm's own flags, by parameter.
        task_arguments: the task's own flags, by parameter.
    """

    algo: str = flag(
        f"how the workers agree: {', '.join(ALGORITHM.files)}, {OWN}",
        "bmuf",
        study="--algos",
    )
    task: str = flag(
        f"what is trained on what: {', '.join(TASK.files)}, {OWN}",
        "digits",
        study="--task of the study, outside of --algos",
    )

    steps: int = flag(
        "local steps of each worker", None, TASKS, Group("training"), least=1
    )
    batch_size: int = flag("global batch of all workers", None, TASKS, least=1)
    lr: float = flag("learning rate of the inner optimizer", None, TASKS, above=0)
    optimizer: str = flag(
        "inner optimizer: sgd, adam, adamw, muon, … of optax", None, TASKS
    )
    momentum: float | None = flag(
        "momentum of an inner optimizer that has one", None, TASKS, least=0, below=1
    )
    weight_decay: float | None = flag(
        "weight decay", None, "the task's, or the optimizer's", least=0
    )
    clip_norm: float | None = flag(
        "clip gradients to this global norm", None, TASKS, above=0
    )
    schedule: Literal["constant", "cosine", "step", "plateau"] = flag(
        "the learning rate over the run", None, TASKS
    )
    warmup_steps: int = flag(
        "local steps over which the learning rate rises", None, TASKS, least=0
    )
    accumulate: int = flag(
        "microbatches into which a worker's batch is split", 1, least=1
    )
    seed: int = flag(
        "of the model, the batches and all that is drawn", 0, least=0, study="--seeds"
    )
    eval_every: int = flag(
        "steps between evaluations", None, "a tenth", least=1, scope="start"
    )
    dispatch_steps: int = flag(
        "local steps per dispatch", None, TASKS, least=1, scope="start"
    )

    preset: str | None = flag(
        "take an algorithm's own flags from its paper, where that says otherwise",
        group=Group("workers"),
        choices=(flags.PAPER,),
        scope="start",
    )
    workers: int = flag("how many workers train; they share the devices", 8, least=1)
    backend: Literal["pmap", "shard_map", "vmap"] = flag(
        "how workers are mapped; vmap runs on one device", "pmap", scope="start"
    )
    devices: tuple[int, ...] | None = flag(
        "device indices, such as 0,2,1",
        None,
        "all that fit",
        metavar="I,J,…",
        scope="start",
    )
    lanes: int | None = flag(
        "workers of a device", None, "as few as possible", least=1, scope="start"
    )
    lane_form: Literal["vectorized", "sequential", "merged"] | None = flag(
        "how a device runs them",
        None,
        "the fastest",
        spellings=LANE_FORMS,
        scope="start",
    )
    sync_until: int = flag("train synchronously for this many steps first", 0, least=0)
    opt_state_at_sync: Literal["keep", "reset", "average"] = flag(
        "what becomes of the inner optimizer's state", "keep"
    )
    ema: float | None = flag(
        "ship a moving average of params; its decay", above=0, below=1
    )
    displacements: bool = flag(
        "measure how far, and how alike, workers go between syncs (a copy of params)",
        False,
        study="nothing: it is always on",
    )

    data_dir: Path | None = flag(
        "folder of data sets",
        None,
        "$SYNCALGOS_DATA, or a cache",
        Group("data"),
        scope="process",
    )
    partition: str = flag(
        "a worker's examples: iid, label, speaker, dirichlet:A", "iid", metavar="KIND"
    )
    validation: float | None = flag(
        "test on this share of the training data instead",
        above=0,
        below=1,
        study="--tune-share",
    )
    feed: Literal["device", "host"] = flag(
        "where training data comes from", None, "device, if it fits", scope="start"
    )

    out: Path | None = flag(
        "folder for the run's files",
        None,
        "a new one in runs/",
        FILES,
        scope="process",
        study="--out of the study, outside of --algos",
    )
    overwrite: bool = flag(
        "replace the run's files in --out",
        False,
        study="--overwrite of the study, outside of --algos",
    )
    export: Path | None = flag(
        "write the trained model to this .safetensors file",
        scope="process",
        study="experiments.run --export with the report's command",
    )
    checkpoint_every: int | None = flag(
        "local steps between checkpoints in --out", least=1
    )
    keep_checkpoints: int = flag(
        "how many of the newest are kept", 3, least=1, scope="process"
    )
    resume: bool = flag(
        "go on from the newest checkpoint in --out, if there is one", False
    )
    resume_center: bool = flag(
        "the same; with another number of workers, from its center model", False
    )

    processes: int = flag(
        "train in so many processes, started here", 1, "", PROCESSES, least=1
    )
    coordinator: str | None = flag(
        "where process 0 is, to join processes that are started one by one",
        metavar="HOST:PORT",
        scope="process",
    )
    process_id: int | None = flag(
        "with --coordinator: which this one is, from 0", least=0, scope="process"
    )
    num_processes: int | None = flag("with --coordinator: how many there are", least=1)
    distributed: Literal["none", "auto"] = flag(
        "auto joins as Slurm, Open MPI or Kubernetes has started the processes", "none"
    )
    init_timeout: float = flag(
        "seconds for all processes to find each other", 60.0, above=0, scope="process"
    )
    max_restarts: int = flag(
        "how many lost processes a run survives by restarts",
        0,
        least=0,
        scope="process",
    )

    arguments: Mapping[str, Any] = field(default_factory=dict)
    task_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises a ValueError for a field out of its range, or two that do not fit."""
        for name in ("arguments", "task_arguments"):  # frozen, like the rest
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        checked(SETTINGS, self)
        if self.partition != "iid":
            from experiments.pipeline import partition  # imports NumPy

            partition.check(self.partition)
        if (self.resume or self.resume_center) and self.overwrite:
            raise ValueError(
                "--resume goes on with a run, --overwrite begins it anew: say one of "
                "them"
            )
        if self.batch_size is not None:
            checks.global_batch(self.batch_size, self.workers, self.accumulate)
        if self.steps is not None and (self.warmup_steps or 0) > self.steps:
            raise ValueError(
                f"--warmup-steps {self.warmup_steps} is above --steps {self.steps}"
            )
        if late := never_reached("--sync-until", self.sync_until, self.steps):
            raise ValueError(late)

    @property
    def evaluations(self) -> list[int]:
        """The local steps after which the run is evaluated, its end included."""
        return _multiples(self.eval_every, self.steps)

    @property
    def checkpoints(self) -> list[int]:
        """The local steps after which the run saves a checkpoint, if it is asked to."""
        every = self.checkpoint_every
        return [] if every is None else _multiples(every, self.steps)

    def values(self, *scopes: str) -> dict[str, Any]:
        """Returns the fields of these scopes and the factories' own flags, by name."""
        kept = [x.parameter for x in SETTINGS.values() if x.scope in scopes]
        common = {name: getattr(self, name) for name in kept}
        return {**common, **self.arguments, **self.task_arguments}


SETTINGS: dict[str, Setting] = settings_of(RunConfig)


def parse(argv: Sequence[str]) -> RunConfig:
    """Reads a run's command line; --help, --list and --version print and exit.

    Raises:
        BadRequest: with one line that says what was wrong and what is possible.
    """
    return flags.parse(argv, RunConfig)


def _multiples(period: int, steps: int) -> list[int]:
    """Returns the multiples of a period below the steps, then the steps."""
    return [*range(period, steps, period), steps]


def never_reached(flag: str, step: Any, steps: int | None) -> str:
    """Says that a run is over before its algorithm begins.

    Args:
        flag: the one that sets the step.
        step: the first at which the algorithm acts; anything but an int is none.
        steps: of the run; None while they are not known.

    Returns:
        One line, or "" if the algorithm acts.
    """
    if type(step) is not int or steps is None or step < steps:
        return ""
    return (
        f"{flag} {step} is not below --steps {steps}: all steps would be synchronous, "
        "as by --algo sync_sgd"
    )
