"""The command line of a study."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from experiments import flags
from experiments.factories import number, whole
from experiments.flags import DEFAULT_TASK

PROGRAM = "python -m experiments.compare"
DEFAULT_ALGOS = "sync_sgd,model_averaging,bmuf"
DEFAULT_SEEDS = 3


# flag, options of add_argument
OWN: list[tuple[str, dict[str, Any]]] = [
    (
        "algos",
        {
            "metavar": "A,B,…",
            "default": DEFAULT_ALGOS,
            "help": "what to compare; each may have flags and a label: "
            f"'sync_sgd, NBM=bmuf --nesterov' (default: {DEFAULT_ALGOS})",
        },
    ),
    (
        "preset",
        {"metavar": "NAME", "help": "a published comparison; any flag overrides"},
    ),
    (
        "task",
        {"metavar": "NAME", "default": DEFAULT_TASK, "help": "see experiments.run"},
    ),
    (
        "seeds",
        {
            "metavar": "N",
            "type": whole,
            "default": DEFAULT_SEEDS,
            "help": f"runs of each, from seeds 0 to N - 1 (default: {DEFAULT_SEEDS})",
        },
    ),
    (
        "sweep",
        {
            "metavar": "FLAG=…",
            "help": "also vary one flag, such as workers=1,2,4,8, at fixed samples",
        },
    ),
    (
        "worker-batch",
        {
            "metavar": "N",
            "type": whole,
            "help": "batch of each worker; the global batch then grows with them",
        },
    ),
    (
        "scale-lr",
        {
            "metavar": "RULE",
            "default": "none",
            "help": "how --lr follows the global batch of a sweep: none, linear, sqrt",
        },
    ),
    (
        "tune",
        {
            "metavar": "FLAG=…",
            "action": "append",
            "default": [],
            "help": "choose it for each algorithm on validation data, over "
            "LOW:HIGH:log:COUNT, LOW:HIGH:linear:COUNT or a list; may be repeated",
        },
    ),
    (
        "tune-seeds",
        {
            "metavar": "N",
            "type": whole,
            "default": 1,
            "help": "runs for each value that is tried (default: 1)",
        },
    ),
    (
        "tune-share",
        {
            "metavar": "X",
            "type": number,
            "default": 0.1,
            "help": "of the training data, held out to choose by (default: 0.1)",
        },
    ),
    ("baseline", {"metavar": "LABEL", "help": "compare to it (default: the first)"}),
    (
        "measure",
        {
            "metavar": "NAME",
            "help": "compare by it: test_accuracy (default, where there is one), "
            "test_loss, …",
        },
    ),
    (
        "target",
        {
            "metavar": "X",
            "type": number,
            "help": "of time to target, such as 0.95 (default: near the best reached)",
        },
    ),
    (
        "network",
        {
            "metavar": "NET",
            "action": "append",
            "help": "model time on it: '100Mbit/s, 20ms' or a preset; may be repeated "
            "(default: all presets)",
        },
    ),
    (
        "fused",
        {
            "action": "store_true",
            "help": "model all arrays of a sync as one message, as buckets do",
        },
    ),
    (
        "step-time",
        {
            "metavar": "S",
            "type": number,
            "help": "seconds of a worker's local step (default: as measured)",
        },
    ),
    ("out", {"metavar": "OUT", "type": Path, "help": "folder (default: in runs/)"}),
    (
        "overwrite",
        {"action": "store_true", "help": "make all runs in the folder again"},
    ),
    (
        "tensorboard",
        {"action": "store_true", "help": "write event files, too"},
    ),
]


class Asked(NamedTuple):
    """A command line, read but not checked.

    Attributes:
        own: the flags of the study.
        rest: all others, which are of the runs.
    """

    own: argparse.Namespace
    rest: list[str]


def read(argv: list[str]) -> Asked:
    """Reads a study's flags; --help prints and exits.

    Raises:
        BadRequest: with one line that says what was wrong.
    """
    known, rest = parser().parse_known_args([flags.with_dashes(w) for w in argv])
    return Asked(known, rest)


def parser() -> argparse.ArgumentParser:
    """The parser of a study's own flags."""
    made = flags.Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Compare algorithms on the same batches, over several seeds.",
        epilog="All other flags are those of experiments.run, for every algorithm that "
        f"has them: see {flags.PROGRAM} --help",
    )
    for flag, options in OWN:
        made.add_argument(f"--{flag}", **options)
    return made
