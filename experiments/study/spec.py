"""The variants of a study: the algorithms of --algos, and the flags of their runs."""

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from experiments.cli import factories, flags
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK
from experiments.cli.words import (
    flag_groups,
    flag_of,
    nearest_flag,
    parameter,
    with_dashes,
)
from experiments.study.search_space import Range, Words, combinations
from experiments.training.config import SETTINGS
from experiments.training.progress import MEASURED

# Flags of single runs that a study sets itself, and the flags to use instead.
TAKEN = {name: each.study for name, each in SETTINGS.items() if each.study}
TAKEN |= {
    name: f"experiments.run --algo NAME --{name.replace('_', '-')}"
    for name in ("help", "help_all")
}
# Names that a study's records use themselves: no swept or tuned parameter may have one.
RECORDED = {"label", "algo", "algorithm", "seed", "reported", "diverged"}
RECORDED |= {"effective_lr", "commit", "versions", *MEASURED}
# Flags of additional measurements that every study makes.
ADDED: Words = ("--displacements",)


class Variant(NamedTuple):
    """An algorithm with its own flags, and the study's flags that its runs accept.

    Attributes:
        label: name in the report.
        algo: name of the algorithm.
        words: its own flags, as on the command line of experiments.run.
        known: the parameters of its runs that a study may set.
        argv: flags of its runs, without those of a point and of a trial.
        points: flags of each value of the sweep, by its name such as "workers=4"; one
            point "" without flags if the variant is not swept.
        tuned: the tuned ranges, of flags that it has.
        trials: number of trials at each point; ranges of whole numbers may give fewer.
    """

    label: str
    algo: str
    words: Words = ()
    known: frozenset[str] = frozenset()
    argv: Words = ()
    points: Mapping[str, Words] = MappingProxyType({"": ()})
    tuned: Sequence[Range] = ()
    trials: int = 0

    @property
    def parameters(self) -> set[str]:
        """The parameters that are set, swept or tuned for its runs."""
        words = [*self.argv, *chain.from_iterable(self.points.values())]
        given = {parameter(group[0]) for group in flag_groups(words)}
        return given | {r.flag for r in self.tuned}

    @property
    def own_flags(self) -> list[Words]:
        """Its own flags, each with its value."""
        return flag_groups(self.words)

    @property
    def budget(self) -> list[Range]:
        """The ranges of its trials, the first one refined to reach the trial count."""
        # With a plain grid, a variant that lacks one of the tuned flags would have only
        # a fraction of the others' trials.
        coarse = math.prod(len(r.values) for r in self.tuned)
        times = self.trials // coarse
        first = next((r for r in self.tuned if r.bounds is not None), None)
        return [r.refined(times) if r is first else r for r in self.tuned]

    def taking(
        self,
        task: str,
        shared: Sequence[Words],
        tuned: Sequence[Range],
        swept: Range | None,
        taken: Mapping[str, str] = TAKEN,
        added: Words = ADDED,
    ) -> "Variant":
        """Returns the variant with the flags of its runs; arguments: see `resolved`."""
        known = SETTINGS.keys() - taken.keys()
        known |= factories.describe(ALGORITHM, self.algo).flags.keys()
        known |= factories.describe(TASK, task).flags.keys()
        run = ("--algo", self.algo, "--task", task, *added)
        shares = chain(*(group for group in shared if parameter(group[0]) in known))
        own = [next((x for x in r.each if x.flag in known), None) for r in tuned]
        ranges = [r for r in own if r is not None]
        # Counted without the refined values: they may be too many to list.
        counted = tuned if any(r.bounds for r in ranges) else ranges
        return self._replace(
            known=frozenset(known),
            # Its own flags come last: the last of two equal flags wins.
            argv=(*run, *shares, *self.words),
            points=swept.points if swept and swept.flag in known else self.points,
            tuned=ranges,
            trials=math.prod(len(r.values) for r in counted) if ranges else 0,
        )

    def decisive_trials(self) -> Iterator[dict[str, str]]:
        """Yields values by flag; if any trial is invalid, one of these is."""
        return combinations([r._replace(values=r.decisive) for r in self.tuned])


def variants(text: str) -> tuple[Variant, ...]:
    """Reads `--algos`: "sync_sgd, bmuf --nesterov, Slow=diloco --outer-lr 0.4".

    Args:
        text: algorithms, separated by commas; each may have its own flags, and a label
            before =.

    Raises:
        BadRequest: an algorithm has no name, or two have the same label.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
    # A label may have a #.
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise BadRequest(
            f"--algos {text!r}: a quotation mark is not closed, or a backslash is last"
        ) from None
    groups: list[list[str]] = [[]]
    for token in tokens:
        # Adjacent commas are one token: between them a name is missing.
        if set(token) == {","}:
            groups += [[] for _ in token]
        else:
            groups[-1].append(token)
    found = tuple(_variant(text, words) for words in groups)
    labels = [variant.label for variant in found]
    if twice := next((x for x in labels if labels.count(x) > 1), None):
        raise BadRequest(
            f"--algos has {twice!r} twice: give one of them another label, as in other="
            f"{found[labels.index(twice)].algo}"
        )
    return found


def _variant(text: str, words: Sequence[str]) -> Variant:
    """Reads one algorithm of --algos; `text` is the whole value, for errors."""
    if not words or words[0].startswith("-"):
        raise BadRequest(
            f"--algos {text!r}: every algorithm needs a name, as in "
            "sync_sgd,bmuf --nesterov"
        )
    if "-h" in words:
        raise BadRequest(
            f"--algos {text!r}: see python -m experiments.run --algo NAME --help"
        )
    label, equals, name = words[0].rpartition("=")
    own = tuple(with_dashes(word) for word in words[1:])
    if not name or (equals and not label):
        raise BadRequest(
            f"--algos {text!r}: {words[0]!r} must be a label, = and a name, without "
            "spaces around ="
        )
    return Variant(label or " ".join([name, *own]), name, own)


def resolved(
    text: str,
    task: str,
    shared: Sequence[Words],
    tuned: Sequence[Range],
    swept: Range | None,
    others: Collection[str],
    taken: Mapping[str, str] = TAKEN,
    added: Words = ADDED,
) -> tuple[Variant, ...]:
    """Returns the variants with the flags of a study that their runs accept.

    Args:
        text: the value of --algos.
        task: the name of the task.
        shared: flags for all variants that have them, one tuple of words for each flag.
        tuned: the tuned ranges.
        swept: the sweep, if there is one.
        others: the study's own parameters, suggested for a misspelt flag.
        taken: parameters that cannot be set for runs, and what to use instead.
        added: flags that all runs get.

    Raises:
        BadRequest: an unknown algorithm or task, or a flag that a study sets itself,
            that no variant has, or that is given, swept or tuned twice.
    """
    found = tuple(
        x.taking(task, shared, tuned, swept, taken, added) for x in variants(text)
    )
    given = [parameter(group[0]) for group in shared]
    own = [parameter(group[0]) for x in found for group in x.own_flags]
    varied = [x for r in (*tuned, swept) if r is not None for x in r.flags]
    for name in (*given, *varied, *own):
        if name in taken:
            raise BadRequest(f"{flag_of(name)} is for single runs: use {taken[name]}")
    known = set().union(*(x.known for x in found))
    # With several parameters, one may belong to an algorithm that is not compared.
    several = [x for r in tuned if r.flags[1:] for x in r.flags]
    for name in (*given, *varied):
        if name in known or (name in several and flags.owners_of(ALGORITHM, name)):
            continue
        raise BadRequest(_unknown(name, found, [*known, *others]))
    for name in varied:
        if name in RECORDED:
            raise BadRequest(
                f"{flag_of(name)} cannot be swept or tuned: a study's records already "
                f"use the name {name!r}; give the parameter another name"
            )
        if varied.count(name) > 1:
            raise BadRequest(f"{flag_of(name)} can be swept or tuned once only")
        if name in (*given, *own):
            raise BadRequest(
                f"{flag_of(name)} is given, and also swept or tuned: do only one"
            )
    return found


def _unknown(name: str, variants: Sequence[Variant], possible: Sequence[str]) -> str:
    """Returns the error message for a flag that no variant has."""
    owners = ", ".join(flags.owners_of(ALGORITHM, name))
    nearest = nearest_flag(flag_of(name), [flag_of(x) for x in possible])
    hint = f": it belongs to {owners}" if owners else nearest
    algos = ", ".join(dict.fromkeys(variant.algo for variant in variants))
    return f"none of {algos} has the flag '{flag_of(name)}'{hint}"
