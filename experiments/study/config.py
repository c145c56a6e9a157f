"""The flags of a study, and all checks that need no jax."""

import argparse
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from experiments.command import flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import ALGORITHM, OWN
from experiments.command.flags import PAPER
from experiments.command.settings import (
    Group,
    Setting,
    checked,
    count,
    flag,
    settings_of,
)
from experiments.command.words import (
    Words,
    as_words,
    cleaned,
    flag_groups,
    parameter,
)
from experiments.study import presets
from experiments.study.command_line import (
    VariantWords,
    parse_axis,
    parse_variants,
    read_algorithms,
)
from experiments.study.variants import MOST_RUNS, Axis, Variant, at
from experiments.training import config as training
from experiments.training.config import RunConfig
from syncalgos import checks, network
from syncalgos.network import Network

PROGRAM = "python -m experiments.compare"
TUNED = "lr=0.0125:1.6:log:8"
BASIC = (  # the most needed flags
    *("algos", "preset", "task", "seeds", "sweep"),
    *("tune", "target", "network", "jobs", "out"),
)
# Flags that change the runs, beside those that the runs share.
DECISIVE = "algos", "preset", "task", "sweep", "worker_batch"
FIRST_TUNING_SEED = 1000  # seeds of trials must differ from those that are reported
TUNE_SHARE = 0.1  # of the training data, held out for tuning
MOST_JOBS = 1025  # also limits the devices per job: all start on this machine


@dataclass(frozen=True)
class StudyConfig:
    """The config of a study: its own flags, and the flags that all runs share.

    Attributes:
        shared: flags of all runs, one tuple of words for each flag.
        algorithms: the algorithms, if Python code passed them; else --algos names them.
        token: a text that tells the objects of this study from those of any other; ""
            if there are none.
    """

    algos: str = flag(
        "algorithms to compare, each with optional flags and label: 'sync_sgd, "
        "NBM=bmuf --nesterov'",
        "sync_sgd,model_averaging,bmuf",
        group=Group("what is compared"),
        metavar="A,B,…",
    )
    preset: str | None = flag(
        "a published comparison to repeat; other flags override its settings. 'paper' "
        "gives each algorithm the flags of its paper",
        choices=(*presets.NAMES, PAPER),
    )
    task: str = flag(
        "the model and its data; see experiments.run --list",
        training.SETTINGS["task"].default,
    )
    seeds: int = count("runs of each algorithm, with seeds 0 to N - 1", 5)
    sweep: str | None = flag(
        "also vary one flag, such as workers=1,2,4,8, at a fixed number of samples",
        metavar="FLAG=…",
    )
    worker_batch: int | None = count(
        "batch size of each worker: in a sweep of --workers, the global batch and the "
        "learning rate, unless it is tuned, grow with their number"
    )

    tune: tuple[str, ...] = flag(
        "tune a flag for each algorithm on validation data, over LOW:HIGH:log:COUNT, "
        "LOW:HIGH:linear:COUNT or a list; log:COUNT+MORE continues beyond an end and "
        "near the best; may be repeated",
        (),
        group=Group("tuning"),
        metavar="FLAG=…",
        otherwise=f"{TUNED} if no flag changes the runs",
    )
    tune_seeds: int = count("runs for each value tried", 1)

    baseline: str | None = flag(
        "the variant that all others are compared with; if you name one, the p-values "
        "are corrected for these comparisons alone, not for those of all pairs",
        otherwise="the first",
        group=Group("report"),
        metavar="LABEL",
    )
    measure: str | None = flag(
        "the result to compare, such as test_loss",
        otherwise="test_accuracy if there is one",
    )
    target: float | None = flag(
        "value of the measure to reach, such as 0.95, for the time to target", above=0
    )
    network: tuple[str, ...] = flag(
        "model the time on a network: '100Mbit/s, 20ms' or a preset; may be repeated",
        (),
        otherwise="all presets, without figures",
        metavar="NET",
    )
    fused: bool = flag("model a sync's arrays as one message, as with bucketing", False)
    step_time: float | None = flag(
        "seconds per local step of a worker, for modelled times",
        otherwise="as measured",
        metavar="S",
        above=0,
    )

    jobs: int = count(
        "number of runs at a time, in parallel processes on this machine",
        1,
        group=Group("jobs"),
        below=MOST_JOBS,
    )
    scheduler: str | None = flag(
        "run on the workers of a Dask scheduler: tcp://HOST:PORT, tls://HOST:PORT or "
        "its scheduler file",
        metavar="ADDRESS",
    )
    devices_per_job: int | None = count(
        "CPU devices, and threads, per run", otherwise="all", below=MOST_JOBS
    )
    list: bool = flag(
        "print the commands of the missing runs, one per line, and run none", False
    )

    out: Path | None = flag(
        "folder of the study; the same command continues it there",
        otherwise="a folder in runs/",
        group=Group("files"),
    )

    shared: tuple[Words, ...] = ()
    algorithms: tuple[VariantWords, ...] = ()
    token: str = ""

    def __post_init__(self) -> None:
        """Raises a ValueError for a field that is out of range."""
        checked(SETTINGS, self)

    @cached_property
    def variant_words(self) -> tuple[VariantWords, ...]:
        """The algorithms, with the flags that their runs accept, as words."""
        algorithms = self.algorithms or read_algorithms(self.algos)
        return parse_variants(
            algorithms,
            task=self.task,
            shared=self.shared,
            own_names=SETTINGS,
            tuned=self.tuned,
            swept=[self.swept] if self.swept else [],
        )

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The algorithms, with the configs of their runs.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        return tuple(words.parse() for words in self.variant_words)

    @cached_property
    def points(self) -> dict[str, dict[str, RunConfig]]:
        """The config of each variant's runs, by its label and the point of the sweep.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        return {variant.label: variant.configs() for variant in self.variants}

    @cached_property
    def swept(self) -> Axis | None:
        """The swept flag and its values; None without a sweep."""
        return None if self.sweep is None else parse_axis("--sweep", self.sweep)

    @cached_property
    def tuned(self) -> tuple[Axis, ...]:
        """The tuned flags and their values.

        The study without flags tunes the rates, so that it compares algorithms.
        """
        decisive = all(getattr(self, x) == SETTINGS[x].default for x in DECISIVE)
        by_default = (TUNED,) if decisive and not self.shared else ()
        return tuple(parse_axis("--tune", text) for text in self.tune or by_default)

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The networks on which time is modelled, each once."""
        return tuple(dict.fromkeys(map(network.parse, self.network or network.PRESETS)))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that decide the runs, as in study.json.

        Two studies in one folder must agree on them.
        """
        # Seeds, networks, target and baseline change no run: five seeds reuse the runs
        # of three, and another network needs no new run.
        is_tuned = bool(self.tuned)
        # A given number holds on every machine; the default depends on the machine.
        devices = self.devices_per_job
        return {
            **({} if devices is None else {"devices_per_job": devices}),
            "entries": [
                [x.label, self._identify(x.algo), list(x.words)]
                for x in self.variant_words
            ],
            "task": self._identify(self.task),
            "words": sorted((list(g) for g in self.shared), key=lambda words: words[0]),
            "sweep": self.swept and [self.swept.flag, *self.swept.values],
            "tune": [r.listed for r in self.tuned],
            "worker_batch": self.worker_batch,
            "scale_lr": "none" if self.worker_batch is None else "linear",
            "tune_seeds": self.tune_seeds if is_tuned else None,
            "share": TUNE_SHARE if is_tuned else None,
        }

    def _identify(self, name: str) -> str:
        """Returns a name that no other algorithm or task has, for that of an object."""
        return f"{name} {self.token}" if name == OWN else name

    @property
    def compared_to(self) -> str:
        """The label of the baseline."""
        return self.baseline or self.variant_words[0].label

    @property
    def factories(self) -> tuple[str, ...]:
        """The names of the task and of the algorithms; some may be the user's."""
        return self.task, *(variant.algo for variant in self.variant_words)

    @property
    def is_parallel(self) -> bool:
        """Whether jobs make the runs, instead of this process one after the other."""
        return self.jobs > 1 or self.scheduler is not None

    @cached_property
    def folder(self) -> Path:
        """The folder of the study's files; the same command finds it again."""
        content = json.dumps(self.identity, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        name = f"compare-{self.task.replace(':', '.')}-{digest}"
        return self.out or Path("runs") / name


SETTINGS = settings_of(StudyConfig)


def read(
    argv: list[str], algorithms: Sequence[VariantWords] = (), token: str = ""
) -> StudyConfig:
    """Reads and checks a command line; --help and --version print and exit.

    Errors are found now, before jax is imported, rather than hours later in a run.

    Args:
        argv: the flags.
        algorithms, token: as for `StudyConfig`.

    Raises:
        BadRequest: a flag is unknown or out of range; one line.
    """
    config = replace(parse(argv), algorithms=tuple(algorithms), token=token)
    for line in _conflicts(config):
        raise BadRequest(line)
    with refusing():
        labels = [variant.label for variant in config.variant_words]
        checks.one_of("--baseline", config.compared_to, labels)
        _ = config.networks
    _check_runs(config)
    return config


def parse(argv: Sequence[str]) -> StudyConfig:
    """Reads the flags of a study and of its preset, and checks each by itself.

    Raises:
        BadRequest: a value is out of range; one line.
    """
    words = cleaned(argv)
    made = parser()
    if {"-h", "--help"} & {*words}:
        parser(flags.shortened(SETTINGS, BASIC)).parse_args(["--help"])
    known, rest = made.parse_known_args(words)
    values = vars(known)
    if rest and rest[0].strip(",") in ALGORITHM.files:  # meant for --algos
        others = [] if known.algos == SETTINGS["algos"].default else [known.algos]
        several = ", ".join(word.strip(",") for word in [*others, *rest])
        raise BadRequest(f"unexpected argument {rest[0]!r}: use --algos '{several}'")
    shared = flag_groups(rest)
    if known.preset == PAPER:
        shared = [("--preset", PAPER), *shared]
    elif known.preset in presets.NAMES:
        under = presets.under(known.preset, flag_groups(words))
        own = {name: under.pop(name) for name in [*under] if name in SETTINGS}
        values = {**values, **own}
        shared = [*flag_groups(as_words(under)), *shared]
    return flags.made(StudyConfig, values, {"shared": tuple(shared)})


def parser(settings: Mapping[str, Setting] = SETTINGS) -> argparse.ArgumentParser:
    """Returns the parser of a study's own flags, or of the given ones."""
    made = flags.command_parser(
        PROGRAM,
        "[--algos A,B,…] [--task NAME] [flags]",
        "Compare algorithms on the same batches, over several seeds.",
        "Other flags of experiments.run are accepted, too, and apply to every "
        f"algorithm that has them: see {flags.PROGRAM} --help-all",
    )
    flags.add_settings(made, settings.values())
    return made


def _conflicts(config: StudyConfig) -> Iterator[str]:
    """Yields lines about flags that exclude each other, or that need Dask in vain."""
    set_parameters = set[str]()
    own_parameters = set[str]()
    for variant in config.variant_words:
        set_parameters |= variant.parameters
        own_parameters |= {parameter(words[0]) for words in variant.own_flags}
    if config.tuned and config.seeds > FIRST_TUNING_SEED:
        yield (
            f"--seeds must be at most {FIRST_TUNING_SEED} with --tune, whose trials "
            f"have the seeds after these, got {config.seeds}"
        )
    if config.worker_batch is not None and "batch_size" in set_parameters:
        yield "--worker-batch and --batch-size both set the batch: give one"
    if config.worker_batch and any("workers" in r.flags for r in config.tuned):
        yield (
            "--worker-batch cannot be used while --workers is tuned: use "
            "--batch-size, or --sweep for the workers"
        )
    if config.worker_batch and "workers" in own_parameters:
        yield "--worker-batch needs one --workers for all: give it beside --algos"
    if config.scheduler is not None and config.jobs > 1:
        yield "--jobs starts Dask workers, but --scheduler uses running ones: give one"
    if config.list and config.is_parallel:
        yield "--list makes no run: give it without --jobs and --scheduler"
    if config.is_parallel and importlib.util.find_spec("distributed") is None:
        flag = "--scheduler" if config.scheduler else "--jobs"
        yield (
            f"{flag} needs Dask, which is not installed: run pip install -e "
            "'.[cluster]' in the checkout of syncalgos"
        )


def _check_runs(config: StudyConfig) -> None:
    """Raises a BadRequest for too many runs, or flags that a run does not accept."""
    runs = count_runs(config)
    if runs > MOST_RUNS:
        raise BadRequest(
            f"the study would make {runs:,} runs, more than {MOST_RUNS:,}: give fewer "
            "values to --tune or --sweep, or fewer --seeds"
        )
    for variant in config.variants:
        trials = [*variant.decisive_trials()]
        for run, trial in product(config.points[variant.label].values(), trials):
            at(run, variant.read(trial))


def count_runs(config: StudyConfig) -> int:
    """Returns the number of runs, without planning them."""
    num_runs = 0
    for variant in config.variant_words:
        runs_of_point = variant.num_trials * config.tune_seeds + config.seeds
        num_runs += variant.num_points * runs_of_point
    return num_runs
