"""The config of a study: its flags, what they name, and checks that need no jax."""

import argparse
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.command import flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import ALGORITHM, YOUR_OWN
from experiments.command.flags import PAPER
from experiments.command.settings import (
    FlagGroup,
    FlagSetting,
    convert_values,
    count,
    flag,
    read_settings,
)
from experiments.command.words import (
    Words,
    as_words,
    clean_words,
    flag_groups,
)
from experiments.study import presets
from experiments.study.command_line import (
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
class StudyFlags:
    """The flags of a study, and the flags that all of its runs share.

    Attributes:
        shared: flags of all runs, one tuple of words for each flag, as study.json has
            them.
    """

    algos: str = flag(
        "algorithms to compare, each with optional flags and label: 'sync_sgd, "
        "NBM=bmuf --nesterov'",
        "sync_sgd,model_averaging,bmuf",
        group=FlagGroup("what is compared"),
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
        "near the best, log:COUNT+MORExSEEDS with more seeds there; may be repeated",
        (),
        group=FlagGroup("tuning"),
        metavar="FLAG=…",
        otherwise=f"{TUNED} if no flag changes the runs",
    )
    tune_seeds: int = count("runs for each value tried", 1)

    baseline: str | None = flag(
        "the variant that all others are compared with; if you name one, the p-values "
        "are corrected for these comparisons alone, not for those of all pairs",
        otherwise="the first",
        group=FlagGroup("report"),
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
        group=FlagGroup("jobs"),
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
        group=FlagGroup("files"),
    )

    shared: tuple[Words, ...] = ()

    def __post_init__(self) -> None:
        """Raises a ValueError for a field that is out of range."""
        convert_values(SETTINGS, self)

    @property
    def is_parallel(self) -> bool:
        """Whether jobs make the runs, instead of this process one after the other."""
        return self.jobs > 1 or self.scheduler is not None

    @property
    def tuned_texts(self) -> tuple[str, ...]:
        """The values of --tune.

        The study without flags tunes the rates, so that it compares algorithms.
        """
        is_default = all(getattr(self, x) == SETTINGS[x].default for x in DECISIVE)
        if is_default and not self.shared and not self.tune:
            return (TUNED,)
        return self.tune


@dataclass(frozen=True, kw_only=True)
class StudyConfig(StudyFlags):
    """The config of a study: its flags, and the variants and axes that they name.

    Attributes:
        variants: the algorithms, with the configs of their runs.
        swept: the swept flag and its values; None without a sweep.
        tuned: the tuned flags and their values.
        token: a text that tells the objects of this study from those of any other; ""
            if there are none.
    """

    variants: tuple[Variant, ...]
    swept: Axis | None = None
    tuned: tuple[Axis, ...] = ()
    token: str = ""

    @cached_property
    def points(self) -> dict[str, dict[str, RunConfig]]:
        """The config of each variant's runs, by its label and the point of the sweep.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        return {variant.label: variant.configs() for variant in self.variants}

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The networks on which time is modelled, each once."""
        return tuple(dict.fromkeys(map(network.parse, self.network or network.PRESETS)))

    @property
    def baseline_label(self) -> str:
        """The label of the baseline."""
        return self.baseline or self.variants[0].label

    @property
    def factories(self) -> tuple[str, ...]:
        """The names of the task and of the algorithms; some may be the user's."""
        return self.task, *(variant.algo for variant in self.variants)

    @cached_property
    def folder(self) -> Path:
        """The folder of the study's files; the same command finds it again."""
        content = json.dumps(identity(self), sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        name = f"compare-{self.task.replace(':', '.')}-{digest}"
        return self.out or Path("runs") / name


SETTINGS = read_settings(StudyFlags)


def identity(study: StudyConfig) -> dict[str, Any]:
    """Returns the settings that decide the runs of a study, as in study.json.

    Two studies in one folder must agree on them. They have this form since 0.3.
    """

    def identify(name: str) -> str:
        # No other study has the objects of this one.
        return f"{name} {study.token}" if name == YOUR_OWN else name

    # Seeds, networks, target and baseline change no run: five seeds reuse the runs
    # of three, and another network needs no new run.
    content: dict[str, Any] = {}
    # A given number holds on every machine; the default depends on the machine.
    if study.devices_per_job is not None:
        content["devices_per_job"] = study.devices_per_job
    shared_flags = sorted(study.shared, key=lambda words: words[0])
    content["entries"] = [
        [variant.label, identify(variant.algo), list(variant.words)]
        for variant in study.variants
    ]
    content["task"] = identify(study.task)
    content["words"] = [list(words) for words in shared_flags]
    content["sweep"] = study.swept and study.swept.record
    content["tune"] = [axis.record for axis in study.tuned]
    content["worker_batch"] = study.worker_batch
    content["scale_lr"] = "none" if study.worker_batch is None else "linear"
    content["tune_seeds"] = study.tune_seeds if study.tuned else None
    content["share"] = TUNE_SHARE if study.tuned else None
    return content


def read_command_line(argv: Sequence[str]) -> StudyConfig:
    """Reads and checks a command line; --help and --version print and exit.

    Errors are found now, before jax is imported, rather than hours later in a run.

    Raises:
        BadRequest: a flag is unknown or out of range; one line.
    """
    config = complete(parse_study_flags(argv))
    check_study(config)
    return config


def parse_study_flags(argv: Sequence[str]) -> StudyFlags:
    """Reads the flags of a study and of its preset, and checks each by itself.

    Raises:
        BadRequest: a value is out of range; one line.
    """
    words = clean_words(argv)
    if {"-h", "--help"} & {*words}:
        parser(flags.shorten_help(SETTINGS, BASIC)).parse_args(["--help"])
    namespace, run_words = parser().parse_known_args(words)
    values = vars(namespace)
    # An algorithm that was meant for --algos.
    if run_words and run_words[0].strip(",") in ALGORITHM.files:
        names = [word.strip(",") for word in run_words]
        if namespace.algos != SETTINGS["algos"].default:
            names.insert(0, namespace.algos.strip(","))
        raise BadRequest(
            f"unexpected argument {run_words[0]!r}: use --algos '{', '.join(names)}'"
        )
    shared = flag_groups(run_words)
    if namespace.preset == PAPER:
        shared = [("--preset", PAPER), *shared]
    elif namespace.preset in presets.NAMES:
        preset_values = presets.under(
            namespace.preset, presets.list_set_names(flag_groups(words))
        )
        for name in [*preset_values]:
            if name in SETTINGS:
                values[name] = preset_values.pop(name)
        shared = [*flag_groups(as_words(preset_values)), *shared]
    return flags.make_config(StudyFlags, values, {"shared": tuple(shared)})


def complete(study_flags: StudyFlags) -> StudyConfig:
    """Reads the algorithms and the axes that the flags of a study name.

    Raises:
        BadRequest: an algorithm or a flag is unknown, or a run does not accept its
            flags.
    """
    tuned = tuple(parse_axis("--tune", text) for text in study_flags.tuned_texts)
    swept = None
    if study_flags.sweep is not None:
        swept = parse_axis("--sweep", study_flags.sweep)
    variants = parse_variants(
        read_algorithms(study_flags.algos),
        task=study_flags.task,
        shared=study_flags.shared,
        own_names=SETTINGS,
        tuned=tuned,
        swept=[swept] if swept else [],
    )
    return StudyConfig(
        **vars(study_flags),
        variants=tuple(variant.parse() for variant in variants),
        swept=swept,
        tuned=tuned,
    )


def check_study(study: StudyConfig) -> None:
    """Raises a BadRequest for a study that cannot be made; one line."""
    for line in _conflicts(study):
        raise BadRequest(line)
    with refusing():
        labels = [variant.label for variant in study.variants]
        checks.one_of("--baseline", study.baseline_label, labels)
        _ = study.networks
    _check_runs(study)


def parser(settings: Mapping[str, FlagSetting] = SETTINGS) -> argparse.ArgumentParser:
    """Returns the parser of a study's own flags, or of the given ones."""
    command_parser = flags.command_parser(
        PROGRAM,
        "[--algos A,B,…] [--task NAME] [flags]",
        "Compare algorithms on the same batches, over several seeds.",
        "Other flags of experiments.run are accepted, too, and apply to every "
        f"algorithm that has them: see {flags.PROGRAM} --help-all",
    )
    flags.add_settings(command_parser, settings.values())
    return command_parser


def _conflicts(config: StudyConfig) -> Iterator[str]:
    """Yields lines about flags that exclude each other, or that need Dask in vain."""
    set_parameters = set[str]()
    own_parameters = set[str]()
    for variant in config.variants:
        set_parameters |= variant.parameters
        own_parameters |= {*variant.own_names}
    if config.tuned and config.seeds > FIRST_TUNING_SEED:
        yield (
            f"--seeds must be at most {FIRST_TUNING_SEED} with --tune, whose trials "
            f"have the seeds after these, got {config.seeds}"
        )
    for axis in config.tuned:
        if 0 < axis.near_seeds <= config.tune_seeds:
            yield (
                f"--tune {axis.flag}: x{axis.near_seeds} needs more seeds near the "
                f"best than --tune-seeds {config.tune_seeds}, which all trials have"
            )
    if config.worker_batch is not None and "batch_size" in set_parameters:
        yield "--worker-batch and --batch-size both set the batch: give one"
    if config.worker_batch and any("workers" in axis.flags for axis in config.tuned):
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
        dask_flag = "--scheduler" if config.scheduler else "--jobs"
        yield (
            f"{dask_flag} needs Dask, which is not installed: run pip install -e "
            "'.[cluster]' in the checkout of syncalgos"
        )


def _check_runs(config: StudyConfig) -> None:
    """Raises a BadRequest for too many runs, or flags that a run does not accept."""
    num_runs = count_runs(config)
    if num_runs > MOST_RUNS:
        raise BadRequest(
            f"the study would make {num_runs:,} runs, more than {MOST_RUNS:,}: give "
            "fewer values to --tune or --sweep, or fewer --seeds"
        )
    for variant in config.variants:
        for run in config.points[variant.label].values():
            for texts in variant.decisive_trials():
                at(run, variant.read(texts))


def count_runs(config: StudyConfig) -> int:
    """Returns the number of runs, without planning them."""
    num_runs = 0
    for variant in config.variants:
        runs_of_point = variant.trials * config.tune_seeds + config.seeds
        for axis in variant.tuned:
            more_seeds = max(0, axis.near_seeds - config.tune_seeds)
            runs_of_point += (1 + axis.near) * more_seeds
        num_runs += variant.num_points * runs_of_point
    return num_runs
