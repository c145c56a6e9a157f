"""What a study compares: algorithms, values of a sweep, and what is tuned."""

import math
from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

from experiments.cli import factories, flags
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK
from experiments.cli.library import checks
from experiments.study import config
from experiments.study.entries import Entry, entries, groups_of_flags, parameter
from experiments.study.search_space import Range, Words, values
from experiments.training.config import SETTINGS


def common() -> set[str]:
    """The flags of every run that a study may set."""
    return {name for name, setting in SETTINGS.items() if not setting.study}


SCALES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # powers of the batch, of a rate
TAKEN = {"help": "experiments.run --algo NAME --help"} | {
    name: setting.study for name, setting in SETTINGS.items() if setting.study
}


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
            or flag in factories.flag_names(TASK, self.task)
            or flag in factories.flag_names(ALGORITHM, entry.algo)
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

    def runs(self, seeds: int) -> int:
        """Counts the runs, with so many seeds of what is reported."""
        return sum(
            len(self.points(entry)) * (self._trials(entry) * self.tune_seeds + seeds)
            for entry in self.entries
        )

    def _trials(self, entry: Entry) -> int:
        """Counts the combinations of `trials`; whole numbers may be fewer."""
        own = [len(r.values) for r in self.tune if self.applies(entry, r.flag)]
        finer = any(r.bounds for r in self.tune if self.applies(entry, r.flag))
        every = math.prod(len(r.values) for r in self.tune)
        return (every if finer else math.prod(own)) if own else 0

    def trials(self, entry: Entry) -> tuple[list[Range], Iterator[dict[str, str]]]:
        """What is tuned for an algorithm, and every combination to try.

        All have the same budget: for one that lacks a flag, the first range that it
        has is the finer.
        """
        own = [r for r in self.tune if self.applies(entry, r.flag)]
        lacking = [len(r.values) for r in self.tune if r not in own]
        finer = next((r for r in own if r.bounds is not None), None)
        ranges = [r.refined(math.prod(lacking)) if r is finer else r for r in own]
        return ranges, _combined(ranges, [r.values for r in ranges])

    def telling(self, entry: Entry) -> Iterator[dict[str, str]]:
        """Combinations of which one is refused if any is; {} where nothing is tuned."""
        own = [r for r in self.tune if self.applies(entry, r.flag)]
        return _combined(own, [r.telling for r in own]) if own else iter([{}])


def _combined(ranges: list[Range], values: list[Words]) -> Iterator[dict[str, str]]:
    """Yields every combination of values by flag; none of no ranges."""
    names = [r.flag for r in ranges]
    for each in product(*values) if ranges else ():
        yield dict(zip(names, each, strict=True))


def of(asked: config.Asked) -> Spec:
    """What a command line compares.

    Raises:
        BadRequest: flags that mean nothing here, or two things at once, in one line.
    """
    own = asked.own
    found = Spec(
        entries=entries(own.algos),
        task=own.task,
        words=groups_of_flags(asked.rest),
        sweep=None if own.sweep is None else values("--sweep", own.sweep),
        tune=[values("--tune", text) for text in own.tune],
        worker_batch=own.worker_batch,
        scale_lr=own.scale_lr,
        tune_seeds=own.tune_seeds,
        share=own.tune_share,
    )
    check(found)
    return found


def check(spec: Spec) -> None:
    """Raises a BadRequest for flags that mean nothing here, or two things at once."""
    for entry in spec.entries:
        factories.describe(ALGORITHM, entry.algo)
    factories.describe(TASK, spec.task)
    ranges = [*spec.tune, *([spec.sweep] if spec.sweep else [])]
    varied = [r.flag for r in ranges]
    given = [parameter(group[0]) for group in spec.words]
    for name in (*given, *varied, *_of_entries(spec)):
        if name in TAKEN:
            flag = name.replace("_", "-")
            raise BadRequest(f"--{flag} is for single runs: say {TAKEN[name]}")
    for name in (*given, *varied):
        if not any(spec.applies(entry, name) for entry in spec.entries):
            _refuse_unknown(spec, name)
    for each in spec.tune:
        for value in each.values:
            _check_number(each.flag, value)
    _check_conflicts(spec, varied, {*given, *_of_entries(spec)})


def _of_entries(spec: Spec) -> list[str]:
    """The flags that algorithms have of their own in --algos."""
    groups = (groups_of_flags(entry.words) for entry in spec.entries)
    return [parameter(group[0]) for group in chain.from_iterable(groups)]


def _check_conflicts(spec: Spec, varied: list[str], given: set[str]) -> None:
    """Raises a BadRequest where one of two wishes would be lost in silence."""
    for name in varied:
        flag = name.replace("_", "-")
        if varied.count(name) > 1:
            raise BadRequest(f"--{flag} can be swept or tuned once only")
        if name in given:
            raise BadRequest(f"--{flag} is given, and swept or tuned: say one of both")
    if spec.worker_batch is not None and "batch_size" in {*varied, *given}:
        raise BadRequest("--worker-batch and --batch-size both set the batch: say one")
    if SCALES[spec.scale_lr] and (spec.sweep is None or "lr" in varied):
        raise BadRequest("--scale-lr follows the batch of a --sweep of another flag")


def _check_number(flag: str, value: str) -> None:
    try:
        float(value)
    except ValueError:
        raise BadRequest(
            f"--tune {flag}: needs numbers, got {value!r}; to compare words give the "
            f"algorithm twice, as in A=NAME --{flag} {value}"
        ) from None


def _refuse_unknown(spec: Spec, name: str) -> None:
    owners = flags.owners_of(ALGORITHM, name)
    known = common().union(
        *(factories.flag_names(ALGORITHM, e.algo) for e in spec.entries),
        factories.flag_names(TASK, spec.task),
        config.OWN,
    )
    flag, algos = name.replace("_", "-"), dict.fromkeys(e.algo for e in spec.entries)
    hint = checks.nearest(f"--{flag}", [f"--{x.replace('_', '-')}" for x in known])
    hint = f": it belongs to {', '.join(owners)}" if owners else hint
    raise BadRequest(f"'--{flag}' is a flag of none of {', '.join(algos)}{hint}")


def settings(spec: Spec) -> dict[str, Any]:
    """The spec as JSON has it: two studies of one folder must agree on it."""
    return {
        "entries": [[e.label, e.algo, list(e.words)] for e in spec.entries],
        "task": spec.task,
        "words": sorted((list(g) for g in spec.words), key=lambda words: words[0]),
        "sweep": spec.sweep and [spec.sweep.flag, *spec.sweep.values],
        "tune": [[r.flag, *r.values] for r in spec.tune],
        "worker_batch": spec.worker_batch,
        "scale_lr": spec.scale_lr,
        "tune_seeds": spec.tune_seeds if spec.tune else None,
        "share": spec.share if spec.tune else None,
    }
