"""The flags of aim, and all checks that need no jax."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from experiments.aiming import targets
from experiments.aiming.targets import Target
from experiments.cli import flags
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM
from experiments.cli.settings import Group, checked, flag, settings_of
from experiments.cli.words import cleaned, flag_groups, parameter
from experiments.study import network, spec
from experiments.study.network import Network
from experiments.study.search_space import Words
from experiments.study.spec import Variant
from experiments.training import config as training
from experiments.training.config import RunConfig

NOT_HERE = "on machines that are not here"  # in a page's title
PROGRAM = "python -m experiments.aim"
# How files written by this command begin, and text that they contain.
OURS = {
    ".json": (f'{{"command": {json.dumps(PROGRAM.split())[:-1]}', '"programs": ['),
    ".md": (f"```sh\n{PROGRAM} ", ""),
    ".html": ("<!DOCTYPE html>\n", f" {NOT_HERE}</title>\n"),
}
ALL = "all"
BASELINE = "sync_sgd"
# Flags of training that would have no effect, and what to use instead.
INSTEAD = {
    training.FILES.title: "--json or --page, as nothing trains",
    training.PROCESSES.title: "--target, whose hosts are the processes",
}
TAKEN = {
    name: INSTEAD[setting.group.title]
    for name, setting in training.SETTINGS.items()
    if setting.group is not None and setting.group.title in INSTEAD
}
TAKEN |= {
    "algo": "--algo or --algos, not inside the value of --algos",
    "task": "--task, not inside the value of --algos",
    "devices": "--target, whose chips are the devices",
    "displacements": "no flag: measurements of runs are left out",
    "help": "experiments.run --algo NAME --help",
    "help_all": "experiments.run --algo NAME --help-all",
}


class Job(NamedTuple):
    """A program to compile.

    Attributes:
        target: the machine.
        variant: the algorithm with its own flags.
        argv: flags of the run, as for experiments.run.
        config: the config of the run, whose workers take all chips.
    """

    target: Target
    variant: Variant
    argv: Words
    config: RunConfig


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
        group=Group("what is compiled"),
    )
    slices: int = flag(
        "number of TPU slices of this shape, joined by the data-centre network",
        1,
        least=1,
    )
    algo: str | None = flag(
        "the algorithm, if only one", otherwise=training.SETTINGS["algo"].default
    )
    algos: str | None = flag(
        "algorithms, each with optional flags: 'diloco, NBM=bmuf --nesterov'; or all",
        metavar="A,B,…",
    )
    task: str = flag("see experiments.run --list", training.SETTINGS["task"].default)

    mfu: float = flag(
        "fraction of a chip's peak that matrix products are assumed to reach",
        0.4,
        group=Group("model of time"),
        above=0,
    )
    step_time: float | None = flag(
        "seconds per local step of a worker, instead of an estimate",
        otherwise="from --mfu",
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
        group=Group("report"),
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
    page: Path | None = flag("write the report to this .html or .md file")

    shared: tuple[Words, ...] = ()

    def __post_init__(self) -> None:
        """Raises a ValueError for a field out of range, or for two that conflict."""
        checked(SETTINGS, self)
        if self.mfu > 1:
            raise ValueError(f"--mfu must be at most 1, got {self.mfu}")
        if self.algo is not None and self.algos is not None:
            raise ValueError("--algo and --algos both set algorithms: use one of them")
        if not self.target:
            raise ValueError(f"--target is missing; it may be {targets.FORMS}")
        _ = self.targets, self.networks

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The machines, each once."""
        names = [name for text in self.target for name in text.split(",")]
        return tuple(
            dict.fromkeys(targets.parse(name.strip(), self.slices) for name in names)
        )

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The additional networks on which time is modelled, each once."""
        return tuple(dict.fromkeys(map(network.parse, self.network)))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The algorithms, with the flags that their runs accept."""
        text = self.algos or self.algo or str(training.SETTINGS["algo"].default)
        text = ",".join(ALGORITHM.files) if text == ALL else text
        return spec.resolved(
            text, self.task, self.shared, (), None, SETTINGS, TAKEN, added=()
        )

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """The programs, target by target.

        Speed is compared with sync_sgd: if no variant is plain sync_sgd, it is added
        after them, with the shared flags.
        """
        variants = self.variants
        if not any(is_baseline(variant) for variant in variants):
            # sync_sgd has no strategy state to keep elsewhere.
            shared = [x for x in self.shared if parameter(x[0]) != "sync_memory"]
            plain = Variant(BASELINE, BASELINE)
            variants += (plain.taking(self.task, shared, (), None, TAKEN, added=()),)
        return tuple(_job(each, x) for each in self.targets for x in variants)


SETTINGS = settings_of(AimConfig)


def is_baseline(variant: Variant) -> bool:
    """Whether a variant is synchronous SGD without flags of its own."""
    return variant.algo == BASELINE and not variant.words


def read(argv: Sequence[str]) -> AimConfig:
    """Reads and checks a command line; --help and --version print and exit.

    Raises:
        BadRequest: a flag is unknown or out of range; one line.
    """
    known, rest = parser().parse_known_args(cleaned(argv))
    shared = tuple(flag_groups(rest))
    config = flags.made(AimConfig, vars(known), {"shared": shared})
    try:
        _ = config.jobs
        for target in () if config.reuse else config.targets:
            targets.check_compiler(target)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if config.page is not None:
        if config.page.suffix not in (".html", ".md"):
            raise BadRequest(
                f"--page {config.page}: the file's name must end in .html or .md"
            )
        _check_file("--page", config.page, config.page.suffix)
    if config.json is not None:
        _check_file("--json", config.json, ".json")
    return config


def _check_file(name: str, path: Path, kind: str) -> None:
    """Raises a BadRequest if a file's folder is missing, or it belongs to the user."""
    if not path.parent.is_dir():
        raise BadRequest(f"{name} {path}: there is no folder {path.parent}")
    if not path.is_file():  # such as /dev/stdout
        return
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise BadRequest(f"{name} {path}: {error.strerror}") from None
    begins, holds = OURS[kind]
    if text and not (text.startswith(begins) and holds in text):
        raise BadRequest(
            f"{name} {path} exists, and this command did not write it: use another file"
        )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's own flags."""
    made = flags.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --target TARGET [--algo NAME] [--task NAME] [flags]",
        allow_abbrev=False,
        description="Compile a run for machines that you do not have: whether it fits, "
        "what is sent over which network, and its modelled time. Nothing is trained.",
        epilog="Other flags of experiments.run are accepted, too: see "
        f"{flags.PROGRAM} --help-all",
    )
    flags.add_version(made)
    flags.add_settings(made, SETTINGS.values())
    return made


def _job(target: Target, variant: Variant) -> Job:
    """Returns the run of a variant on all chips of a target.

    Raises:
        BadRequest: a run does not accept its flags, or the workers do not fit the
            chips.
    """
    argv = ("--workers", str(_workers(target, variant)), *variant.argv)
    config = training.parse(argv)
    if config.backend not in ("auto", "shard_map"):
        raise BadRequest(
            f"--backend {config.backend}: only shard_map compiles for absent devices: "
            "leave out --backend"
        )
    places = target.chips // config.worker_devices
    if config.workers % places:
        raise BadRequest(
            f"--workers {config.workers} cannot fill the {target.chips} chips of "
            f"{target.text}: leave out --workers, or use a multiple of {places}"
        )
    argv += ("--backend", "shard_map")
    return Job(target, variant, argv, replace(config, backend="shard_map"))


def _workers(target: Target, variant: Variant) -> int:
    """Returns the number of workers that take all chips, given the mesh."""
    mesh = {"mesh": training.SETTINGS["mesh"]}
    known = flags.parser_of(mesh).parse_known_args(variant.argv)[0]
    each = math.prod((known.mesh or {}).values())
    if each < 1 or target.chips % each:
        axes = ", ".join(f"{name}={size}" for name, size in known.mesh.items())
        raise BadRequest(
            f"--mesh {axes}: workers of {each} chips do not evenly divide the "
            f"{target.chips} chips of {target.shown}"
        )
    return target.chips // each
