"""The command line: common flags, and an algorithm's and a task's own."""

import argparse
import importlib.util
import typing
from pathlib import Path
from typing import Any, NamedTuple

from experiments import factories
from experiments.errors import BadRequest
from experiments.factories import ALGORITHM, TASK, Factory, Kind, number, whole
from experiments.tasks import TASKS

PROGRAM = "python -m experiments.run"
DEFAULT_ALGORITHM = "bmuf"
DEFAULT_TASK = "digits"


class Request(NamedTuple):
    """What the user asked for.

    Attributes:
        settings: the common flags.
        factory: of the algorithm.
        arguments: its own flags.
        task_factory: of the task.
        task_arguments: its own flags.
    """

    settings: argparse.Namespace
    factory: Factory
    arguments: dict[str, Any]
    task_factory: Factory
    task_arguments: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Tells what is wrong as a BadRequest."""

    def error(self, message: str) -> typing.NoReturn:
        raise BadRequest(message)


def indices(text: str) -> list[int]:
    """Device indices from a flag."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be indices with commas between them, such as 0,2,1, got {text!r}"
        ) from None


# flag, type, default, what it means; the task says what most defaults of None are
COMMON: list[tuple[str, Any, Any, str]] = [
    ("workers", whole, 8, "how many workers train; they share the devices"),
    ("steps", whole, None, "local steps of each worker (default: the task's)"),
    ("batch-size", whole, None, "global batch of all workers (default: the task's)"),
    ("lr", number, None, "learning rate of the inner optimizer (default: the task's)"),
    ("optimizer", str, None, "inner optimizer: sgd, adam, adamw, muon, … of optax"),
    ("momentum", number, None, "momentum of an inner optimizer that has one"),
    ("weight-decay", number, None, "weight decay (default: the optimizer's own)"),
    ("clip-norm", number, None, "clip gradients to this global norm"),
    ("schedule", str, None, "learning rate: constant, cosine or step"),
    ("warmup-steps", whole, None, "local steps over which the learning rate rises"),
    ("accumulate", whole, 1, "microbatches into which a worker's batch is split"),
    ("sync-until", whole, 0, "train synchronously for this many steps first"),
    ("opt-state-at-sync", str, "keep", "of the inner optimizer: keep, reset, average"),
    ("seed", whole, 0, "of the model, the batches and all else that is drawn"),
    ("backend", str, "pmap", "pmap, shard_map or vmap (one device)"),
    ("devices", indices, None, "device indices, such as 0,2,1 (default: all that fit)"),
    ("lanes", whole, None, "workers of a device (default: as few as devices allow)"),
    (
        "lane-form",
        str,
        None,
        "how a device runs them: together, in-turn or joined (default: the fastest)",
    ),
    ("data-dir", Path, None, "of data sets (default: $SYNCALGOS_DATA, or a cache)"),
    (
        "partition",
        str,
        "iid",
        "a worker's examples: iid, label, speaker, dirichlet:A",
    ),
    ("validation", number, None, "test on this share of the training data instead"),
    ("feed", str, None, "training data from: device (if it fits), or host"),
    ("out", Path, None, "folder for the run's files (default: a new one in runs/)"),
    ("export", Path, None, "write the trained model to this .safetensors file"),
    ("eval-every", whole, None, "local steps between evaluations (default: a tenth)"),
    ("dispatch-steps", whole, None, "local steps per dispatch (default: the task's)"),
]

# Of single runs, which a study does not take: checkpoints, and many processes.
LASTING: list[tuple[str, Any, Any, str]] = [
    ("checkpoint-every", whole, None, "local steps between checkpoints in --out"),
    ("keep-checkpoints", whole, 3, "how many of the newest are kept"),
    ("processes", whole, 1, "train in so many processes, started here"),
    (
        "coordinator",
        str,
        None,
        "HOST:PORT of process 0, to join processes that are started one by one",
    ),
    ("process-id", whole, None, "with --coordinator: which this one is, from 0"),
    ("num-processes", whole, None, "with --coordinator: how many there are"),
    (
        "distributed",
        str,
        "none",
        "auto: join as Slurm, Open MPI or Kubernetes has started the processes",
    ),
    ("init-timeout", number, 60.0, "seconds for all processes to find each other"),
    ("max-restarts", whole, 0, "how many lost processes a run survives by restarts"),
]
SWITCHES = {
    "displacements": "measure how far, and how alike, the workers go between syncs (at "
    "the cost of a copy of the params)",
    "resume": "go on from the newest checkpoint in --out, if there is one",
    "resume-center": "the same; with another number of workers, from its center model",
    "overwrite": "replace the run's files in --out",
}


def parse(argv: list[str]) -> Request:
    """Reads the command line; --help prints and exits.

    Raises:
        BadRequest: with one line that says what was wrong and what is possible.
    """
    argv = [with_dashes(word) for word in argv]
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--algo")
    first.add_argument("--task")
    first.add_argument("-h", "--help", action="store_true")
    early, _ = first.parse_known_args(argv)
    if early.help and early.algo is None and early.task is None:
        _parser([]).parse_args(["--help"])  # answered without importing jax
    own = [
        _Own.named(ALGORITHM, early.algo or DEFAULT_ALGORITHM),
        _Own.named(TASK, early.task or DEFAULT_TASK),
    ]
    parser = _parser(own)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise BadRequest(_explain_unknown(unknown[0], own, parser))
    algorithm, task = (each.take(known) for each in own)
    return Request(known, own[0].factory, algorithm, own[1].factory, task)


class _Own(NamedTuple):
    """An algorithm or a task with flags of its own."""

    kind: Kind
    name: str
    factory: Factory

    @classmethod
    def named(cls, kind: Kind, name: str) -> "_Own":
        return cls(kind, name, find(kind, name))

    def take(self, known: argparse.Namespace) -> dict[str, Any]:
        """Moves its flags out of all that are known."""
        parameters = factories.flag_parameters(self.kind, self.factory)
        return {p.name: vars(known).pop(p.name) for p in parameters}


def find(kind: Kind, name: str) -> Factory:
    """The factory of an algorithm or a task.

    Raises:
        BadRequest: an unknown name, or a module that cannot be imported.
    """
    return factories.find(kind, name, _known(kind))


def _known(kind: Kind) -> Any:
    from syncalgos import ALGORITHMS  # imports jax

    return ALGORITHMS if kind == ALGORITHM else TASKS


def with_dashes(word: str) -> str:
    """A flag, which may also be written with underscores, as Python has the name."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _parser(own: list[_Own]) -> Parser:
    parser = Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Train one model on many workers that agree by an algorithm.",
        epilog=None
        if own
        else "Flags of an algorithm and of a task: "
        f"{PROGRAM} --algo NAME --task NAME --help",
    )
    parser.add_argument(
        "--algo",
        metavar="NAME",
        default=DEFAULT_ALGORITHM,
        help=f"how the workers agree: {', '.join(_algorithm_files())}, or your own as "
        f"package.module:factory (default: {DEFAULT_ALGORITHM})",
    )
    parser.add_argument(
        "--task",
        metavar="NAME",
        default=DEFAULT_TASK,
        help=f"what is trained on what: {', '.join(TASKS)}, or your own as "
        f"package.module:factory (default: {DEFAULT_TASK})",
    )
    for flag, kind, default, text in COMMON + LASTING:
        shown = "" if default is None else f" (default: {default})"
        metavar = {whole: "N", number: "X", str: "NAME"}.get(kind, flag.upper())
        parser.add_argument(
            f"--{flag}", type=kind, default=default, metavar=metavar, help=text + shown
        )
    for flag, text in SWITCHES.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    for each in sorted(own, key=lambda each: ":" in each.name):  # it is blamed
        factories.add_flags(parser, *each)
    return parser


def _algorithm_files() -> list[str]:
    """The registry's names, which are those of its files, without importing jax."""
    package = importlib.util.find_spec("syncalgos")
    places = package.submodule_search_locations if package else None
    folder = Path(next(iter(places or ["."]))) / "algorithms"
    return sorted(f.stem for f in folder.glob("[!_]*.py"))


def _explain_unknown(argument: str, own: list[_Own], parser: Parser) -> str:
    from syncalgos import checks

    flag = argument.partition("=")[0]
    if not flag.startswith("--"):
        return f"unexpected argument {argument!r}"
    parameter = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    for kind, name, _ in own:
        owners = [
            other
            for other in _known(kind)
            if parameter
            in [p.name for p in factories.flag_parameters(kind, find(kind, other))]
        ]
        if owners:
            return f"{name} has no flag {flag}: it belongs to {', '.join(owners)}"
    options = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {flag!r}{checks.nearest(flag, options)} (see --help)"
