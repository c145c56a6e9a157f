"""The flags of aim, and all checks that need no jax."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from experiments.aim import targets
from experiments.aim.targets import Target
from experiments.command import flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import ALGORITHM
from experiments.command.settings import (
    FlagGroup,
    convert_values,
    count,
    flag,
    read_settings,
)
from experiments.command.words import Words, clean_words, flag_groups
from experiments.files import read_bytes, refuse_os_errors, try_to_write
from experiments.study.command_line import (
    VariantWords,
    complete_variant,
    parse_variants,
    read_algorithms,
)
from experiments.study.variants import Variant, at
from experiments.training import config as training
from experiments.training.config import RunConfig
from syncalgos import network
from syncalgos.network import Network

PROGRAM = "python -m experiments.aim"
# How the files of --json and --page begin.
JSON = '{"command": ["python", "-m", "experiments.aim"'
PAGE = f"```sh\n{PROGRAM} "
MFU = 0.4  # the fraction of a chip's peak that matrix products are assumed to reach
BASELINE = "sync_sgd"
# Flags of training that would have no effect, by group and by name, and what to use
# instead.
GROUPS: dict[FlagGroup | None, str] = {
    training.FILES: "--json or --page, as nothing trains",
    training.PROCESSES: "--target, whose hosts are the processes",
}
REFUSED_FLAGS = {
    name: GROUPS[setting.group]
    for name, setting in training.SETTINGS.items()
    if setting.group in GROUPS
}
REFUSED_FLAGS |= {
    "algo": "--algos",
    "task": "--task, not inside the value of --algos",
    "devices": "--target, whose chips are the devices",
    "displacements": "no flag: measurements of runs are left out",
    "help": "experiments.run --algo NAME --help",
    "help_all": "experiments.run --algo NAME --help-all",
}


class CompileJob(NamedTuple):
    """A program to compile.

    Attributes:
        target: the machine.
        variant: the algorithm with its settings.
        argv: flags of the run, as for experiments.run.
        config: the config of the run, whose workers take all chips.
    """

    target: Target
    variant: Variant
    argv: Words
    config: RunConfig

    @property
    def period(self) -> int | None:
        """The algorithm's period, if it has one."""
        period = self.config.arguments.get("period")
        return period if type(period) is int else None


@dataclass(frozen=True)
class AimConfig:
    """The config of aim: its own flags, and the flags that all runs share.

    Attributes:
        shared: flags of all runs, one tuple of words for each flag.
    """

    target: tuple[str, ...] = flag(
        "machines to compile for, separated by commas: tpu:v5e:16x16, "
        "cuda:h100:4x8 (hosts x GPUs), cpu:8; may be repeated",
        (),
        group=FlagGroup("what is compiled"),
    )
    slices: int = count(
        "number of TPU slices of this shape, joined by the data-centre network", 1
    )
    algos: str = flag(
        "algorithms, each with optional flags: 'diloco, NBM=bmuf --nesterov'; or all",
        training.SETTINGS["algo"].default,
        metavar="A,B,…",
    )
    task: str = flag("see experiments.run --list", training.SETTINGS["task"].default)

    step_time: float | None = flag(
        "seconds per local step of a worker",
        otherwise=f"matrix products at {MFU:g} of the chip's peak",
        group=FlagGroup("model of time"),
        metavar="S",
        above=0,
    )
    network: tuple[str, ...] = flag(
        "also model time with this network between workers, shared by the chips of a "
        "worker: '100Gbit/s, 20us' or a preset of experiments.compare; may be repeated",
        (),
        otherwise="none",
        metavar="NET",
    )

    timeout: float | None = flag(
        "seconds after which a compilation is given up; unlimited by default",
        group=FlagGroup("report"),
        metavar="SECONDS",
        above=0,
    )
    json: Path | None = flag("write all results to this JSON file, after each program")
    reuse: tuple[Path, ...] = flag(
        "take compiled programs from this file of an earlier --json; may be repeated: "
        "later files take precedence",
        (),
        otherwise="none",
        metavar="JSON",
    )
    page: Path | None = flag("write the report to this .md file")

    shared: tuple[Words, ...] = ()

    def __post_init__(self) -> None:
        """Raises a ValueError for a field that is missing or out of range."""
        convert_values(SETTINGS, self)
        if not self.target:
            raise ValueError(f"--target is missing; it may be {targets.FORMS}")
        _ = self.targets, self.networks

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The machines, each once."""
        names = [name.strip() for name in ",".join(self.target).split(",")]
        return tuple(dict.fromkeys(targets.parse_target(x, self.slices) for x in names))

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The additional networks on which time is modelled, each once."""
        return tuple(dict.fromkeys(map(network.parse, self.network)))

    @cached_property
    def algorithms(self) -> tuple[VariantWords, ...]:
        """The algorithms, with the flags that their runs accept."""
        text = ",".join(ALGORITHM.files) if self.algos == "all" else self.algos
        return parse_variants(
            read_algorithms(text),
            task=self.task,
            shared=self.shared,
            own_names=SETTINGS,
            refused=REFUSED_FLAGS,
            added=(),
        )

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The algorithms, with the configs of their runs by one worker on one chip."""
        return tuple(map(_parse_variant, self.algorithms))

    @cached_property
    def jobs(self) -> tuple[CompileJob, ...]:
        """The programs, target by target.

        Speed is compared with sync_sgd: if no variant is plain sync_sgd, it is added
        after them, with the shared flags.
        """
        algorithms = self.algorithms
        variants = self.variants
        if not any(is_baseline(variant) for variant in variants):
            # Not checked: a shared flag need not be one of sync_sgd's.
            baseline = complete_variant(
                VariantWords(label=BASELINE, algo=BASELINE),
                task=self.task,
                shared=self.shared,
                refused=REFUSED_FLAGS,
                added=(),
            )
            algorithms = (*algorithms, baseline)
            variants = (*variants, _parse_variant(baseline))
        jobs = []
        for target in self.targets:
            for algorithm, variant in zip(algorithms, variants, strict=True):
                jobs.append(_make_job(target, algorithm, variant))
        return tuple(jobs)


SETTINGS = read_settings(AimConfig)


def is_baseline(variant: Variant) -> bool:
    """Whether a variant is synchronous SGD without flags of its own."""
    return variant.algo == BASELINE and not variant.words


def read_config(argv: Sequence[str]) -> AimConfig:
    """Reads and checks a command line; --help and --version print and exit.

    Raises:
        BadRequest: a flag is unknown or out of range; one line.
    """
    own_flags, run_words = make_parser().parse_known_args(clean_words(argv))
    shared = tuple(flag_groups(run_words))
    config = flags.make_config(AimConfig, vars(own_flags), {"shared": shared})
    with refusing():
        _ = config.jobs
    if config.page is not None and config.page.suffix != ".md":
        raise BadRequest(f"--page {config.page}: the file's name must end in .md")
    _check_file("--json", config.json, JSON)
    _check_file("--page", config.page, PAGE)
    return config


def _check_file(name: str, path: Path | None, beginning: str) -> None:
    """Raises a BadRequest if a file's folder is missing, or it belongs to the user."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise BadRequest(f"{name} {path}: there is no folder {path.parent}")
    text = ""
    with refuse_os_errors(name, path):
        if path.is_dir():
            raise BadRequest(f"{name} {path} is a folder: name a file in it")
        if path.is_file():
            text = read_bytes(path).decode("utf-8", errors="replace")
        # An error of writing would otherwise come after minutes of compiling. What is
        # there and no file, such as /dev/stdout, is written to as it is.
        if path.is_file() or not _exists(path):
            try_to_write(path.resolve().parent)
    if text and not text.startswith(beginning):
        raise BadRequest(
            f"{name} {path} exists, and this command did not write it: use another file"
        )


def _exists(path: Path) -> bool:
    """Whether anything is there; raises an OSError for a link to itself."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's own flags."""
    parser = flags.command_parser(
        PROGRAM,
        "--target TARGET [--algos A,B,…] [--task NAME] [flags]",
        "Compile a run for machines that you do not have: whether it fits, what is "
        "sent over which network, and its modelled time. Nothing is trained.",
        "Other flags of experiments.run are accepted, too: see "
        f"{flags.PROGRAM} --help-all",
        has_help_all=False,
    )
    flags.add_settings(parser, SETTINGS.values())
    return parser


def _parse_variant(algorithm: VariantWords) -> Variant:
    """Parses the flags of an algorithm's runs, which have one worker by default.

    With more workers, a small batch would be refused before the target is known.
    """
    return algorithm._replace(argv=("--workers", "1", *algorithm.argv)).parse()


def _make_job(target: Target, algorithm: VariantWords, variant: Variant) -> CompileJob:
    """Returns the run of a variant on all chips of a target.

    Args:
        target: the machine.
        algorithm: the words of the variant.
        variant: the algorithm with its settings.

    Raises:
        BadRequest: a run does not accept its flags, or the workers do not fit the
            chips.
    """
    config = variant.config
    worker_chips = config.worker_devices
    if target.chips % worker_chips:
        mesh_text = ", ".join(
            f"{name}={size}" for name, size in (config.mesh or {}).items()
        )
        raise BadRequest(
            f"--mesh {mesh_text}: workers of {worker_chips} chips do not evenly divide "
            f"the {target.chips} chips of {target.full_name}: use sizes whose product "
            "does"
        )
    if config.backend not in ("auto", "shard_map"):
        raise BadRequest(
            f"--backend {config.backend}: only shard_map compiles for absent devices: "
            "leave out --backend"
        )
    num_places = target.chips // worker_chips
    values: dict[str, Any] = {"backend": "shard_map"}
    if "workers" not in algorithm.parameters:
        values["workers"] = num_places
    config = at(config, values)
    if config.workers % num_places:
        raise BadRequest(
            f"--workers {config.workers} cannot fill the {target.chips} chips of "
            f"{target.text}: leave out --workers, or use a multiple of {num_places}"
        )
    words = ("--workers", str(num_places), *algorithm.argv, "--backend", "shard_map")
    return CompileJob(target, variant, words, config)
