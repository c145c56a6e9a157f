"""The config of a run: each field is a flag, and its only description is here.

`SETTINGS` has the descriptions of the fields by name, in their order:

    SETTINGS["lr"].check(0.1)       # raises a ValueError if out of range
    parse(["--algo", "bmuf"]).lr    # None: the task decides

Nothing here imports jax, so that --help and errors come at once.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.command import factories, flags
from experiments.command.factories import ALGORITHM, TASK
from experiments.command.settings import (
    FlagGroup,
    convert_values,
    count,
    flag,
    read_settings,
    to_plain_value,
)
from experiments.tasks import Schedule
from experiments.training import trackers
from syncalgos import checks

TASKS = "the task's"
FILES = FlagGroup("files", "start")
PROCESSES = FlagGroup("processes", "start")
YOUR_OWN = "or your own as package.module:factory"
BASIC = (  # the flags that are needed most
    *("algo", "task", "steps", "batch_size", "lr"),
    *("optimizer", "seed", "workers", "out", "track"),
)
MOST_STEPS = 10**8  # a record of what each step sends takes 70 bytes
MOST_PROCESSES = 10_000  # all are started before one can report an error
MOST_SECONDS = 1e6  # above, milliseconds overflow in C


@dataclass(frozen=True)
class RunConfig:
    """The config of a run, as given by the user.

    None leaves a field to the task or the algorithm: `defaults.resolved` fills it in.

    Attributes:
        arguments: values of the algorithm's own flags, by parameter.
        task_arguments: values of the task's own flags, by parameter.
    """

    algo: str = flag(
        f"how the workers synchronize: {', '.join(ALGORITHM.files)}, {YOUR_OWN}", "bmuf"
    )
    task: str = flag(
        f"the model and data: {', '.join(TASK.files)}, {YOUR_OWN}", "digits"
    )

    steps: int | None = count(
        "local steps of each worker",
        otherwise=TASKS,
        group=FlagGroup("training"),
        below=MOST_STEPS,
    )
    batch_size: int | None = count(
        "global batch size, divided among the workers", otherwise=TASKS
    )
    lr: float | None = flag("inner optimizer's learning rate", otherwise=TASKS, above=0)
    optimizer: str | None = flag(
        "inner optimizer of optax: sgd, adam, adamw, muon, …", otherwise=TASKS
    )
    momentum: float | None = flag(
        "momentum of the inner optimizer", otherwise=TASKS, least=0, below=1
    )
    b1: float | None = flag(
        "Adam's first-moment decay", otherwise="the optimizer's", least=0, below=1
    )
    b2: float | None = flag(
        "Adam's second-moment decay", otherwise="the optimizer's", least=0, below=1
    )
    weight_decay: float | None = flag(
        "weight decay", otherwise=f"{TASKS}, or the optimizer's", least=0
    )
    clip_norm: float | None = flag(
        "clip gradients to this global norm", otherwise=TASKS, above=0
    )
    schedule: Schedule | None = flag(
        "how the learning rate changes during the run", otherwise=TASKS
    )
    warmup_steps: int | None = flag(
        "local steps of learning-rate warmup", otherwise=TASKS, least=0
    )
    accumulate: int = count("microbatches into which each worker's batch is split", 1)
    seed: int = flag("seed of the model, the batch order and random draws", 0, least=0)
    init_from: Path | None = flag(
        "start from this model, a .safetensors file written by --export",
        otherwise="a new one",
    )
    eval_every: int | None = count(
        "local steps between evaluations", otherwise="a tenth of the run", scope="start"
    )
    dispatch_steps: int | None = count(
        "local steps per compiled call", otherwise=TASKS, scope="start"
    )

    preset: str | None = flag(
        "paper: take the defaults of the algorithm's own flags from its paper",
        group=FlagGroup("workers"),
        choices=(flags.PAPER,),
        scope="start",
    )
    workers: int = count("number of workers; they share the devices", 8)
    backend: Literal["auto", "pmap", "shard_map", "vmap"] = flag(
        "how workers are mapped to devices; auto uses pmap, or shard_map with several "
        "processes or --mesh; vmap uses one device",
        "auto",
        scope="start",
    )
    mesh: Mapping[str, int] | None = flag(
        "axes of the devices that share one worker's model, such as fsdp=2,tensor=2",
        otherwise="one device",
        scope="start",
    )
    devices: tuple[int, ...] | None = flag(
        "indices of the devices to use, such as 0,2,1",
        otherwise="all that fit",
        metavar="I,J,…",
        scope="start",
    )
    sync_until: int = flag("train synchronously for this many steps first", 0, least=0)
    opt_state_at_sync: Literal["keep", "reset", "average"] = flag(
        "what happens to the inner optimizer's state at a sync", "keep"
    )
    displacements: bool = flag(
        "measure how far workers move in a round, and how similar their directions "
        "are (keeps a copy of the params)",
        False,
    )

    data_dir: Path | None = flag(
        "folder of the data sets",
        otherwise="$SYNCALGOS_DATA, or a cache",
        group=FlagGroup("data"),
        scope="process",
    )
    partition: str = flag(
        "how workers divide the examples: iid, label, speaker, dirichlet:A",
        "iid",
        metavar="KIND",
    )
    validation: float | None = flag(
        "evaluate on this share of the training data instead of the test data",
        above=0,
        below=1,
    )

    out: Path | None = flag(
        "folder for the run's files",
        otherwise="a new one in runs/",
        group=FILES,
        scope="process",
    )
    overwrite: bool = flag("replace the run's files in --out", False)
    export: Path | None = flag(
        "write the trained model to this .safetensors file", scope="process"
    )
    track: tuple[str, ...] = flag(
        f"log the run to {', '.join(trackers.KINDS)}; may be repeated",
        (),
        otherwise="none",
        scope="process",
    )
    checkpoint_every: int | None = count("local steps between checkpoints in --out")
    keep: Literal["last", "best"] = flag(
        "best: --export writes the model of the evaluation with the best accuracy (or "
        "loss, if there is no accuracy), and its checkpoint is kept as well",
        "last",
        scope="process",
    )
    resume: bool = flag(
        "continue from the newest checkpoint in --out, if there is one", False
    )
    resume_center: bool = flag(
        "like --resume, but with a different number of workers, which all start from "
        "the center",
        False,
    )

    processes: int = count(
        "number of processes to train in, started here",
        1,
        group=PROCESSES,
        below=MOST_PROCESSES,
    )
    coordinator: str | None = flag(
        "address of process 0, if you start each process yourself",
        metavar="HOST:PORT",
        scope="process",
    )
    process_id: int | None = flag(
        "with --coordinator: the number of this process, from 0",
        least=0,
        scope="process",
    )
    num_processes: int | None = count("with --coordinator: the number of processes")
    distributed: Literal["none", "auto"] = flag(
        "auto joins the processes that torchrun, Kubeflow, SkyPilot, Slurm, Open MPI "
        "or Kubernetes started",
        "none",
    )
    init_timeout: float = flag(
        "seconds to wait for all processes to find each other",
        60.0,
        above=0,
        below=MOST_SECONDS,
        scope="process",
    )
    max_restarts: int = flag(
        "how many times the run restarts after losing a process; with --coordinator or "
        "--distributed, whatever started the processes must restart them",
        0,
        least=0,
        scope="process",
    )

    arguments: Mapping[str, Any] = field(default_factory=dict)
    task_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises a ValueError if a field is out of range, or two fields conflict."""
        convert_values(SETTINGS, self)
        trackers.check_names(self.track)
        if {*self.arguments} & {*factories.SPELLED}:
            spelled = factories.describe_factory(factories.ALGORITHM, self.algo).spelled
            by_flag = {spelled.get(k, k): x for k, x in self.arguments.items()}
            object.__setattr__(self, "arguments", by_flag)
        for name in ("arguments", "task_arguments"):
            object.__setattr__(self, name, to_plain_value(getattr(self, name)))
        self._check_placement()
        if self.partition != "iid":
            from experiments.data import sampling  # imports NumPy

            sampling.find_alpha(self.partition)
        if (self.resume or self.resume_center) and self.overwrite:
            raise ValueError(
                "--resume continues a run, --overwrite starts it anew: use one of them"
            )
        if self.batch_size is not None:
            checks.global_batch(self.batch_size, self.workers, self.accumulate)
        if self.steps is not None and (self.warmup_steps or 0) > self.steps:
            raise ValueError(
                f"--warmup-steps {self.warmup_steps} is above --steps {self.steps}"
            )
        late = never_reached("--sync-until", self.sync_until, self.steps)
        if late:
            raise ValueError(late)

    def _check_placement(self) -> None:
        """Raises a ValueError for flags that contradict --mesh."""
        if self.mesh is None:
            return
        if self.backend not in ("auto", "shard_map"):
            raise ValueError(
                f"--backend {self.backend} supports only workers of one device: --mesh "
                "needs --backend shard_map"
            )
        if self.devices is not None:
            raise ValueError(
                "--mesh always takes the first devices: leave out --devices"
            )

    @property
    def worker_devices(self) -> int:
        """The number of devices of a worker."""
        return math.prod((self.mesh or {}).values())

    def mesh_devices(self, processes: int = 1) -> int:
        """Returns how many devices each process needs for --mesh; 0 without it."""
        if self.mesh is None:
            return 0
        return -(-self.workers * self.worker_devices // processes)

    def values(self, *scopes: str) -> dict[str, Any]:
        """Returns the fields of these scopes and the factories' own flags, by name."""
        common = {k: getattr(self, k) for k, x in SETTINGS.items() if x.scope in scopes}
        return {**common, **self.arguments, **self.task_arguments}


@dataclass(frozen=True, kw_only=True)
class Settings(RunConfig):
    """The settings of a run: its config, with every default filled in."""

    steps: int = field()
    batch_size: int = field()
    lr: float = field()
    optimizer: str = field()
    schedule: Schedule = field()
    warmup_steps: int = field()
    eval_every: int = field()
    dispatch_steps: int = field()

    def at(self, numbers: Mapping[str, Any]) -> "Settings":
        """Returns these settings with other numbers, which may be traced.

        Args:
            numbers: values by field, not checked; "arguments" has those arguments that
                differ.
        """
        other = copy.copy(self)
        arguments = {**self.arguments, **numbers.get("arguments", {})}
        vars(other).update(numbers, arguments=arguments)
        return other

    @property
    def evaluations(self) -> list[int]:
        """The local steps after which the run is evaluated, including the last."""
        return _multiples(self.eval_every, self.steps)

    @property
    def checkpoints(self) -> list[int]:
        """The local steps after which the run saves a checkpoint, if it is asked to."""
        every = self.checkpoint_every
        return [] if every is None else _multiples(every, self.steps)


SETTINGS = read_settings(RunConfig)


def parse(
    argv: Sequence[str], own_factories: Sequence[factories.Factory] | None = None
) -> RunConfig:
    """Reads a run's command line; --help, --list and --version print and exit.

    Args:
        argv: the flags.
        own_factories: the algorithm and the task, if Python code passed one of them.

    Raises:
        BadRequest: one line says what was wrong and what is possible.
    """
    return flags.parse_flags(argv, RunConfig, BASIC, own_factories)


def _multiples(period: int, steps: int) -> list[int]:
    """Returns the multiples of a period below the steps, then the steps."""
    return [*range(period, steps, period), steps]


def never_reached(flag: str, step: Any, steps: int | None) -> str:
    """Returns an error if a run ends before its algorithm begins.

    Args:
        flag: the flag that sets the step.
        step: the first step at which the algorithm acts; ignored if not an int.
        steps: the length of the run; None while it is not known.

    Returns:
        One line, or "" if the algorithm acts.
    """
    if type(step) is not int or steps is None or step < steps:
        return ""
    return (
        f"{flag} {step} is not below --steps {steps}: all steps would be synchronous, "
        "as with --algo sync_sgd"
    )
