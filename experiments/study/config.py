"""The flags of a study."""

import argparse
from pathlib import Path
from typing import NamedTuple

from experiments.cli import flags
from experiments.cli.errors import BadRequest
from experiments.cli.flags import DEFAULT_TASK
from experiments.cli.words import cleaned, number, whole
from experiments.training import config
from experiments.training.config import PAPER, Setting

PROGRAM = "python -m experiments.compare"
DEFAULT_ALGOS = "sync_sgd,model_averaging,bmuf"
FOLDER = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

GROUPS: dict[str, list[Setting]] = {
    "what is compared": [
        Setting(
            "algos",
            str,
            "algorithms; each may have flags and a label: 'sync_sgd, NBM=bmuf "
            "--nesterov'",
            DEFAULT_ALGOS,
            placeholder="A,B,…",
        ),
        Setting(
            "preset",
            str,
            "a published comparison, which any flag overrides; or paper: each "
            "algorithm's own flags from its paper",
            choices=(*PRESETS, PAPER),
        ),
        Setting("task", str, "see experiments.run --list", DEFAULT_TASK),
        Setting(
            "seeds", whole, "runs of each, from seeds 0 to N - 1", default=3, least=1
        ),
        Setting(
            "sweep",
            str,
            "also vary one flag, such as workers=1,2,4,8, at fixed samples",
            placeholder="FLAG=…",
        ),
        Setting(
            "worker-batch",
            whole,
            "batch of each worker; the global batch then grows with them",
            least=1,
        ),
        Setting(
            "scale-lr",
            str,
            "how --lr follows the global batch of a sweep",
            "none",
            choices=("none", "linear", "sqrt"),
        ),
    ],
    "tuning": [
        Setting(
            "tune",
            str,
            "choose it for each algorithm on validation data, over LOW:HIGH:log:COUNT, "
            "LOW:HIGH:linear:COUNT or a list; may be repeated",
            placeholder="FLAG=…",
            is_repeated=True,
        ),
        Setting("tune-seeds", whole, "runs for each value that is tried", 1, least=1),
        Setting(
            "tune-share",
            number,
            "of the training data, held out to choose by",
            0.1,
            above=0,
            below=1,
        ),
    ],
    "report": [
        Setting(
            "baseline", str, "compare to it", otherwise="the first", placeholder="LABEL"
        ),
        Setting(
            "measure",
            str,
            "compare by it, such as test_loss",
            otherwise="test_accuracy, where there is one",
        ),
        Setting(
            "target",
            number,
            "of time to target, such as 0.95",
            otherwise="near the best reached",
            above=0,
        ),
        Setting(
            "network",
            str,
            "model time on it: '100Mbit/s, 20ms' or a preset; may be repeated",
            otherwise="all presets",
            placeholder="NET",
            is_repeated=True,
        ),
        Setting(
            "fused",
            None,
            "model all arrays of a sync as one message, as buckets do",
            False,
        ),
        Setting(
            "step-time",
            number,
            "seconds of a worker's local step",
            otherwise="as measured",
            placeholder="S",
            above=0,
        ),
        Setting("tensorboard", None, "write event files, too", False),
    ],
    "files": [
        Setting(
            "out", Path, "folder; the same command finds it again", otherwise="in runs/"
        ),
        Setting("overwrite", None, "make all runs in the folder again", False),
    ],
}
OWN: dict[str, Setting] = {
    each.parameter: each for group in GROUPS.values() for each in group
}


class Asked(NamedTuple):
    """A command line, read but not checked.

    Attributes:
        own: the flags of the study.
        rest: all others, which are of the runs.
    """

    own: argparse.Namespace
    rest: list[str]


def read(argv: list[str]) -> Asked:
    """Reads a study's flags; --help and --version print and exit.

    Raises:
        BadRequest: with one line that says what was wrong.
    """
    known, rest = parser().parse_known_args(cleaned(argv))
    try:
        for name, setting in OWN.items():
            if not setting.is_repeated:
                setting.check(getattr(known, name))
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return Asked(known, rest)


def parser_for(words: list[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command line that is being written, with runs' flags."""
    made = parser()
    others = {
        title: [x for x in group if x.parameter not in OWN]
        for title, group in config.GROUPS.items()
    }
    flags.add_settings(made, others)
    return made


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
    flags.add_settings(made, GROUPS)
    return made
