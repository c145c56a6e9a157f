"""What a study compares: algorithms, values of a sweep, and what is tuned."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from experiments import factories, flags
from experiments.errors import BadRequest
from experiments.factories import ALGORITHM, TASK, Kind
from experiments.study.ranges import Range, Words
from syncalgos import checks


class Entry(NamedTuple):
    """An algorithm with flags of its own.

    Attributes:
        label: as it is shown.
        algo: its name.
        words: its own flags, as on the command line of experiments.run.
    """

    label: str
    algo: str
    words: Words


def entries(text: str) -> list[Entry]:
    """Reads `--algos`: "sync_sgd, bmuf --nesterov, Slow=diloco --outer-lr 0.4".

    Args:
        text: algorithms with commas between them; each may have flags of its own, and a
            label before =.

    Raises:
        BadRequest: none, or two of one label.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise BadRequest(f"--algos {text!r}: {error}") from None
    groups: list[list[str]] = [[]]
    for token in tokens:
        if token == ",":
            groups.append([])
        else:
            groups[-1].append(token)
    found = [_entry(text, words) for words in groups]
    labels = [entry.label for entry in found]
    if twice := next((x for x in labels if labels.count(x) > 1), None):
        raise BadRequest(f"--algos names {twice!r} twice: give one a label, A={twice}")
    return found


def _entry(text: str, words: Sequence[str]) -> Entry:
    if not words or words[0].startswith("-"):
        raise BadRequest(
            f"--algos {text!r}: every algorithm needs a name, as in "
            "sync_sgd,bmuf --nesterov"
        )
    label, equals, name = words[0].rpartition("=")
    own = tuple(flags.with_dashes(word) for word in words[1:])
    if equals and not label:
        raise BadRequest(f"--algos {text!r}: {words[0]!r} has no label before =")
    return Entry(label or " ".join([name, *own]), name, own)


def groups_of_flags(words: Sequence[str]) -> list[Words]:
    """A command line cut before each flag: [("--lr", "0.1"), ("--nesterov",)]."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([flags.with_dashes(word)])
        elif groups:
            groups[-1].append(word)
        else:
            raise BadRequest(f"unexpected argument {word!r}")
    return [tuple(group) for group in groups]


def parameter(flag: str) -> str:
    """The name of the parameter that a flag sets: "--no-nesterov" -> "nesterov"."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return re.sub("^no_", "", name)


def own_parameters(kind: Kind, name: str) -> set[str]:
    """The parameters that are flags of an algorithm or a task."""
    factory = flags.find(kind, name)
    return {p.name for p in factories.flag_parameters(kind, factory)}


def common() -> set[str]:
    """The flags of every run that a study may set."""
    return {flag.replace("-", "_") for flag, *_ in flags.COMMON} - TAKEN


TAKEN = {"seed", "out", "export"}  # a study sets them itself


class Spec(NamedTuple):
    """All that decides which runs a study makes.

    Attributes:
        entries: the algorithms.
        task: what is trained on what.
        words: the flags that all runs share, cut before each flag.
        sweep: None where nothing is swept.
        tune: empty where nothing is tuned.
        worker_batch: the batch of each worker; None where the global batch is fixed.
        scale_lr: how the learning rate follows the global batch: none, linear, sqrt.
        tune_seeds: runs for each value that is tried.
        share: of the training data, on which values are chosen.
    """

    entries: list[Entry]
    task: str
    words: list[Words]
    sweep: Range | None
    tune: list[Range]
    worker_batch: int | None
    scale_lr: str
    tune_seeds: int
    share: float

    def applies(self, entry: Entry, flag: str) -> bool:
        """Whether a flag means something to an algorithm."""
        return (
            flag in common()
            or flag in own_parameters(TASK, self.task)
            or flag in own_parameters(ALGORITHM, entry.algo)
        )

    def argv(self, entry: Entry) -> list[str]:
        """The flags of an algorithm's runs, without the sweep and what is tuned."""
        shared = [g for g in self.words if self.applies(entry, parameter(g[0]))]
        return [
            *("--algo", entry.algo, "--task", self.task, "--displacements"),
            *(word for group in shared for word in group),
            *entry.words,
        ]

    def points(self, entry: Entry) -> list[str | None]:
        """The values of the sweep; [None] where it means nothing to an algorithm."""
        if self.sweep is None or not self.applies(entry, self.sweep.flag):
            return [None]
        return list(self.sweep.values)

    def trials(self, entry: Entry) -> tuple[list[Range], Iterator[dict[str, str]]]:
        """What is tuned for an algorithm, and every combination to try.

        All have the same budget: for one that lacks a flag, the first range that it
        has is the finer.
        """
        own = [r for r in self.tune if self.applies(entry, r.flag)]
        lacking = [len(r.values) for r in self.tune if r not in own]
        finer = next((r for r in own if r.bounds is not None), None)
        ranges = [r.refined(math.prod(lacking)) if r is finer else r for r in own]
        names = [r.flag for r in ranges]
        combinations = product(*(r.values for r in ranges)) if ranges else ()
        return ranges, (dict(zip(names, each, strict=True)) for each in combinations)


def check(spec: Spec) -> None:
    """Raises a BadRequest for a flag that means nothing to any of the algorithms."""
    for entry in spec.entries:
        flags.find(ALGORITHM, entry.algo)
    flags.find(TASK, spec.task)
    ranges = [*spec.tune, *([spec.sweep] if spec.sweep else [])]
    given = [parameter(group[0]) for group in spec.words]
    wanted: list[tuple[str, str]] = [(name, "--" + name) for name in given]
    wanted += [(r.flag, r.flag) for r in ranges]
    for name, shown in wanted:
        if name in TAKEN:
            raise BadRequest(
                f"{shown.replace('_', '-')} belongs to single runs: a study has "
                "--seeds, and --out for its folder"
            )
        if not any(spec.applies(entry, name) for entry in spec.entries):
            _refuse_unknown(spec, name, shown)
    for each in spec.tune:
        for value in each.values:
            _check_number(each.flag, value)
    twice = [r.flag for r in ranges]
    if (flag := next((x for x in twice if twice.count(x) > 1), None)) is not None:
        raise BadRequest(f"{flag} can be swept or tuned once only")


def _check_number(flag: str, value: str) -> None:
    try:
        float(value)
    except ValueError:
        raise BadRequest(
            f"--tune {flag}: needs numbers, got {value!r}; to compare words give the "
            f"algorithm twice, as in A=NAME --{flag} {value}"
        ) from None


def _refuse_unknown(spec: Spec, name: str, shown: str) -> None:
    if not shown.startswith("--"):
        known = common().union(
            *(own_parameters(ALGORITHM, e.algo) for e in spec.entries),
            own_parameters(TASK, spec.task),
        )
        raise BadRequest(
            f"{shown!r} is a flag of none of "
            f"{', '.join(e.algo for e in spec.entries)}{checks.nearest(name, known)}"
        )
    group = next(g for g in spec.words if parameter(g[0]) == name)
    first = spec.entries[0]
    flags.parse(["--algo", first.algo, "--task", spec.task, *group])  # it says why
    raise BadRequest(f"unknown flag {group[0]!r}")


def settings(spec: Spec) -> dict[str, Any]:
    """The spec as JSON has it: two studies of one folder must agree on it."""
    return {
        "entries": [[e.label, e.algo, list(e.words)] for e in spec.entries],
        "task": spec.task,
        "words": sorted([list(group) for group in spec.words]),
        "sweep": spec.sweep and [spec.sweep.flag, *spec.sweep.values],
        "tune": [[r.flag, *r.values] for r in spec.tune],
        "worker_batch": spec.worker_batch,
        "scale_lr": spec.scale_lr,
        "tune_seeds": spec.tune_seeds if spec.tune else None,
        "share": spec.share if spec.tune else None,
    }
