"""The settings of every run: what --help, completion and the checks know of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli.library import checks
from experiments.cli.words import indices, number, whole


class Setting(NamedTuple):
    """A flag of every run.

    Attributes:
        name: of the flag, without dashes.
        read: from a word to a value; None is a switch, which takes no word.
        text: what it means.
        default: None where something else decides.
        otherwise: what that is, in words.
        placeholder: what --help shows for the word; "" follows from `read`.
        choices: the words that there are; () leaves them open.
        least: the lowest number.
        above: what a number must be above.
        below: what a number must be below.
        is_repeated: whether the flag may come several times; the value is a list.
    """

    name: str
    read: Callable[[str], Any] | None
    text: str
    default: Any = None
    otherwise: str = ""
    placeholder: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    above: float | None = None
    below: float | None = None
    is_repeated: bool = False

    @property
    def parameter(self) -> str:
        """Its name in Python."""
        return self.name.replace("-", "_")

    @property
    def shown(self) -> str:
        """The placeholder that --help shows for the word."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return self.placeholder or PLACEHOLDERS.get(self.read, "NAME")

    @property
    def help(self) -> str:
        """The meaning and the default, as --help shows them."""
        default = self.otherwise if self.default is None else self.default
        is_shown = self.read is not None and default != ""
        return self.text + (f" (default: {default})" if is_shown else "")

    def check(self, value: Any, label: str = "") -> None:
        """Raises a ValueError for what the setting cannot be; None it always can.

        Args:
            value: of the setting.
            label: what an error calls it; "" is the flag.
        """
        label = label or f"--{self.name}"
        if value is None:
            return
        if self.choices:
            checks.one_of(label, value, self.choices)
        elif self.read is whole:
            checks.whole(label, value, least=self.least or 0)
        elif self.read is number:
            checks.real(
                label, value, least=self.least, above=self.above, below=self.below
            )


PLACEHOLDERS = {whole: "N", number: "X", Path: "PATH"}

TASKS = "the task's"
PAPER = "paper"  # the preset of an algorithm's own flags

TRAINING = [
    Setting("steps", whole, "local steps of each worker", otherwise=TASKS, least=1),
    Setting(
        "batch-size", whole, "global batch of all workers", otherwise=TASKS, least=1
    ),
    Setting(
        "lr", number, "learning rate of the inner optimizer", otherwise=TASKS, above=0
    ),
    Setting(
        "optimizer",
        str,
        "inner optimizer: sgd, adam, adamw, muon, … of optax",
        otherwise=TASKS,
    ),
    Setting(
        "momentum",
        number,
        "momentum of an inner optimizer that has one",
        otherwise=TASKS,
        least=0,
        below=1,
    ),
    Setting(
        "weight-decay",
        number,
        "weight decay",
        otherwise="the task's, or the optimizer's",
        least=0,
    ),
    Setting(
        "clip-norm",
        number,
        "clip gradients to this global norm",
        otherwise=TASKS,
        above=0,
    ),
    Setting(
        "schedule",
        str,
        "the learning rate over the run",
        otherwise=TASKS,
        choices=("constant", "cosine", "step", "plateau"),
    ),
    Setting(
        "warmup-steps",
        whole,
        "local steps over which the learning rate rises",
        otherwise=TASKS,
        least=0,
    ),
    Setting(
        "accumulate",
        whole,
        "microbatches into which a worker's batch is split",
        1,
        least=1,
    ),
    Setting(
        "seed", whole, "of the model, the batches and all that is drawn", 0, least=0
    ),
    Setting(
        "eval-every", whole, "steps between evaluations", otherwise="a tenth", least=1
    ),
    Setting(
        "dispatch-steps", whole, "local steps per dispatch", otherwise=TASKS, least=1
    ),
]
WORKERS = [
    Setting(
        "preset",
        str,
        "take an algorithm's own flags from its paper, where that says otherwise",
        choices=(PAPER,),
    ),
    Setting(
        "workers", whole, "how many workers train; they share the devices", 8, least=1
    ),
    Setting(
        "backend",
        str,
        "how workers are mapped; vmap runs on one device",
        "pmap",
        choices=("pmap", "shard_map", "vmap"),
    ),
    Setting(
        "devices",
        indices,
        "device indices, such as 0,2,1",
        otherwise="all that fit",
        placeholder="I,J,…",
    ),
    Setting(
        "lanes", whole, "workers of a device", otherwise="as few as possible", least=1
    ),
    Setting(
        "lane-form",
        str,
        "how a device runs them",
        otherwise="the fastest",
        choices=("vectorized", "sequential", "merged"),
    ),
    Setting(
        "sync-until", whole, "train synchronously for this many steps first", 0, least=0
    ),
    Setting(
        "opt-state-at-sync",
        str,
        "what becomes of the inner optimizer's state",
        "keep",
        choices=("keep", "reset", "average"),
    ),
    Setting(
        "ema", number, "ship a moving average of params; its decay", above=0, below=1
    ),
    Setting(
        "displacements",
        None,
        "measure how far, and how alike, workers go between syncs (a copy of params)",
        False,
    ),
]
DATA = [
    Setting(
        "data-dir", Path, "folder of data sets", otherwise="$SYNCALGOS_DATA, or a cache"
    ),
    Setting(
        "partition",
        str,
        "a worker's examples: iid, label, speaker, dirichlet:A",
        "iid",
        placeholder="KIND",
    ),
    Setting(
        "validation",
        number,
        "test on this share of the training data instead",
        above=0,
        below=1,
    ),
    Setting(
        "feed",
        str,
        "where training data comes from",
        otherwise="device, if it fits",
        choices=("device", "host"),
    ),
]
FILES = [
    Setting("out", Path, "folder for the run's files", otherwise="a new one in runs/"),
    Setting("overwrite", None, "replace the run's files in --out", False),
    Setting("export", Path, "write the trained model to this .safetensors file"),
    Setting(
        "checkpoint-every", whole, "local steps between checkpoints in --out", least=1
    ),
    Setting("keep-checkpoints", whole, "how many of the newest are kept", 3, least=1),
    Setting(
        "resume",
        None,
        "go on from the newest checkpoint in --out, if there is one",
        False,
    ),
    Setting(
        "resume-center",
        None,
        "the same; with another number of workers, from its center model",
        False,
    ),
]
PROCESSES = [
    Setting("processes", whole, "train in so many processes, started here", 1, least=1),
    Setting(
        "coordinator",
        str,
        "where process 0 is, to join processes that are started one by one",
        placeholder="HOST:PORT",
    ),
    Setting(
        "process-id", whole, "with --coordinator: which this one is, from 0", least=0
    ),
    Setting("num-processes", whole, "with --coordinator: how many there are", least=1),
    Setting(
        "distributed",
        str,
        "auto joins as Slurm, Open MPI or Kubernetes has started the processes",
        "none",
        choices=("none", "auto"),
    ),
    Setting(
        "init-timeout",
        number,
        "seconds for all processes to find each other",
        60.0,
        above=0,
    ),
    Setting(
        "max-restarts",
        whole,
        "how many lost processes a run survives by restarts",
        0,
        least=0,
    ),
]
GROUPS: dict[str, list[Setting]] = {
    "training": TRAINING,
    "workers": WORKERS,
    "data": DATA,
    "files": FILES,
    "processes": PROCESSES,
}
SETTINGS: dict[str, Setting] = {
    each.parameter: each for group in GROUPS.values() for each in group
}
