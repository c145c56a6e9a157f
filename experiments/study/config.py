"""The flags of a study."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from experiments.cli import flags
from experiments.cli.flags import PAPER
from experiments.cli.settings import Group, Setting, checked, flag, settings_of
from experiments.cli.words import cleaned
from experiments.training.config import SETTINGS

PROGRAM = "python -m experiments.compare"
FOLDER = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@dataclass(frozen=True)
class StudyConfig:
    """The config of a study: its own flags; all others are of its runs."""

    algos: str = flag(
        "algorithms; each may have flags and a label: 'sync_sgd, NBM=bmuf --nesterov'",
        "sync_sgd,model_averaging,bmuf",
        group=Group("what is compared"),
        metavar="A,B,…",
    )
    preset: str | None = flag(
        "a published comparison, which any flag overrides; or paper: each algorithm's "
        "own flags from its paper",
        choices=(*PRESETS, PAPER),
    )
    task: str = flag("see experiments.run --list", SETTINGS["task"].default)
    seeds: int = flag("runs of each, from seeds 0 to N - 1", 3, least=1)
    sweep: str | None = flag(
        "also vary one flag, such as workers=1,2,4,8, at fixed samples",
        metavar="FLAG=…",
    )
    worker_batch: int | None = flag(
        "batch of each worker; the global batch then grows with them", least=1
    )
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "how --lr follows the global batch of a sweep", "none"
    )

    tune: tuple[str, ...] = flag(
        "choose it for each algorithm on validation data, over LOW:HIGH:log:COUNT, "
        "LOW:HIGH:linear:COUNT or a list; may be repeated",
        (),
        group=Group("tuning"),
        metavar="FLAG=…",
    )
    tune_seeds: int = flag("runs for each value that is tried", 1, least=1)
    tune_share: float = flag(
        "of the training data, held out to choose by", 0.1, above=0, below=1
    )

    baseline: str | None = flag(
        "compare to it", None, "the first", Group("report"), metavar="LABEL"
    )
    measure: str | None = flag(
        "compare by it, such as test_loss", None, "test_accuracy, where there is one"
    )
    target: float | None = flag(
        "of time to target, such as 0.95", None, "near the best reached", above=0
    )
    network: tuple[str, ...] = flag(
        "model time on it: '100Mbit/s, 20ms' or a preset; may be repeated",
        (),
        "all presets",
        metavar="NET",
    )
    fused: bool = flag(
        "model all arrays of a sync as one message, as buckets do", False
    )
    step_time: float | None = flag(
        "seconds of a worker's local step", None, "as measured", metavar="S", above=0
    )
    tensorboard: bool = flag("write event files, too", False)

    out: Path | None = flag(
        "folder; the same command finds it again", None, "in runs/", Group("files")
    )
    overwrite: bool = flag("make all runs in the folder again", False)

    def __post_init__(self) -> None:
        """Raises a ValueError for a field out of its range."""
        checked(OWN, self)


OWN: dict[str, Setting] = settings_of(StudyConfig)


class Asked(NamedTuple):
    """A command line, read but not checked.

    Attributes:
        own: the flags of the study.
        rest: all others, which are of the runs.
    """

    own: StudyConfig
    rest: list[str]


def read(argv: list[str]) -> Asked:
    """Reads a study's flags; --help and --version print and exit.

    Raises:
        BadRequest: with one line that says what was wrong.
    """
    known, rest = parser().parse_known_args(cleaned(argv))
    return Asked(flags.made(StudyConfig, vars(known)), rest)


def parser_for(words: list[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command line that is being written, with runs' flags."""
    parser_of_both = parser()
    others = (x for name, x in SETTINGS.items() if name not in OWN and not x.study)
    flags.add_settings(parser_of_both, others)
    return parser_of_both


def parser() -> argparse.ArgumentParser:
    """Returns the parser of a study's own flags."""
    made = flags.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--algos A,B,…] [--task NAME] [flags]",
        allow_abbrev=False,
        description="Compare algorithms on the same batches, over several seeds.",
        epilog="All other flags are those of experiments.run, for every algorithm that "
        f"has them: see {flags.PROGRAM} --help",
    )
    flags.add_version(made)
    flags.add_settings(made, OWN.values())
    return made
