"""The variants of a study: the algorithms, their flags, and the values to try."""

import math
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.cli import flags
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, flag_kind
from experiments.cli.words import (
    Words,
    as_words,
    flag_groups,
    flag_of,
    literal,
    nearest_flag,
    one_of,
    parameter,
    with_dashes,
)
from experiments.training.config import SETTINGS, RunConfig, parse
from experiments.training.progress import MEASURED

# The largest number of runs of a study, and so of values in a range.
MOST_RUNS = 10_000
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
_SWITCH = one_of({"true": True, "false": False})


class Range(NamedTuple):
    """The values of a flag to sweep or tune over.

    Attributes:
        flag: its parameter, with underscores; or several with | between them, of which
            an algorithm uses the first that it has.
        values: the values, as on a command line.
        bounds: low, high and whether logarithmic, for a range; None for a list.
        others: lists of the same length, for algorithms without these parameters.
    """

    flag: str
    values: Words
    bounds: tuple[float, float, bool] | None = None
    others: tuple["Range", ...] = ()

    @property
    def each(self) -> list["Range"]:
        """A range for each parameter."""
        named = [(x, flag) for x in (self, *self.others) for flag in x.flag.split("|")]
        return [Range(flag, x.values, x.bounds) for x, flag in named]

    @property
    def flags(self) -> Words:
        """The parameters; the range varies one of them for each algorithm."""
        return tuple(x.flag for x in self.each)

    @property
    def listed(self) -> list[str]:
        """The parameters and their values, as given on the command line."""
        return [x for own in (self, *self.others) for x in (own.flag, *own.values)]

    @property
    def decisive(self) -> Words:
        """Values that suffice to check all: if any value is invalid, one of these is.

        The valid values of a flag form an interval, so if both ends are valid, all
        values between them are. Whole numbers may have to divide something.
        """
        if self.bounds is None or _are_whole(*self.bounds[:2]):
            return self.values
        return self.values[0], self.values[-1]

    def refined(self, factor: int) -> "Range":
        """Returns a range with `factor` times as many values; lists do not change."""
        if self.bounds is None or factor == 1:
            return self
        values = spaced(*self.bounds, len(self.values) * factor)
        return self._replace(values=values)


def read_range(flag: str, text: str) -> Range:
    """Reads "lr=0.01:1.0:log:7", "lr=0.1:0.5:linear:5" or "workers=1,2,4,8".

    For --tune, "block_momentum|slow_momentum=0.5,0.9" is one range with two names, and
    "block_momentum=0.5,0.9|rank=1,4" has separate values for each of two parameters.

    Args:
        flag: --tune or --sweep, for errors.
        text: its value.

    Raises:
        BadRequest: the text does not have this form; one line.
    """
    names: list[str] = []
    found: list[Range] = []
    for part in text.split("|"):
        name, equals, listed = part.partition("=")
        names.append(name.strip().lstrip("-").replace("-", "_"))
        if equals and all(names) and listed.strip():
            found.append(_read(flag, text, "|".join(names), listed))
            names = []
    if names:
        raise BadRequest(
            f"{flag} {text!r}: needs a flag and its values, such as lr=0.01:1:log:7 or "
            "period=4,16,64"
        )
    first = found[0]._replace(others=tuple(found[1:]))
    if flag == "--sweep" and first.flags[1:]:
        raise BadRequest(
            f"--sweep {text!r}: varies one flag; only --tune takes several names"
        )
    alike = {(x.bounds, len(x.values)) for x in found} == {(None, len(first.values))}
    if first.others and not alike:
        raise BadRequest(f"--tune {text!r}: needs lists with the same number of values")
    return first


def _read(flag: str, text: str, name: str, listed: str) -> Range:
    """Reads the values of one range."""
    # A list may have colons, too: partition=iid,dirichlet:0.1.
    if re.search(r"^[\s+\-.\deE]+:|:(log|linear):", listed):
        bounds, count = _bounds(f"{flag} {text!r}", listed)
        found = spaced(*bounds, count)
        if len(found) < count:
            raise BadRequest(
                f"{flag} {text!r}: there are not {count} whole numbers in this range; "
                "write the ends with a point, such as 1.0, for other numbers"
            )
        return Range(name, found, bounds)
    found = tuple(value.strip() for value in listed.split(","))
    # 0.1 and 0.10 are one value.
    if not all(found) or len(set(map(literal, found))) < len(found):
        raise BadRequest(f"{flag} {text!r}: values must differ and not be empty")
    word = next((x for x in found if isinstance(literal(x), str)), None)
    if flag == "--tune" and word is not None:
        raise BadRequest(
            f"--tune {name}: needs numbers, got {word!r}; to compare words, list the "
            f"algorithm once for each word, as in A=NAME --{name} {word}"
        )
    return Range(name, found)


def _are_whole(low: float, high: float) -> bool:
    """Whether both ends are written as whole numbers: then all values are."""
    return isinstance(low, int) and isinstance(high, int)


def _bounds(shown: str, listed: str) -> tuple[tuple[float, float, bool], int]:
    """Reads the ends, the spacing and the number of values of a range."""
    parts = listed.split(":")
    form = f"{shown}: a range must be LOW:HIGH:log:COUNT or LOW:HIGH:linear:COUNT"
    if len(parts) != 4 or parts[2] not in ("log", "linear"):
        raise BadRequest(form)
    low, high, count = (literal(parts[i]) for i in (0, 1, 3))
    if isinstance(low, str) or isinstance(high, str) or not isinstance(count, int):
        raise BadRequest(form)
    logarithmic = parts[2] == "log"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadRequest(f"{shown}: {parts[0]} must be below {parts[1]}")
    if logarithmic and low <= 0:
        raise BadRequest(f"{shown}: a logarithmic range begins above 0, got {parts[0]}")
    if count < 2:
        raise BadRequest(f"{shown}: a range needs at least 2 values, got {count}")
    if count > MOST_RUNS:
        raise BadRequest(
            f"{shown}: {count:,} values are too many: a study makes at most "
            f"{MOST_RUNS:,} runs"
        )
    return (low, high, logarithmic), count


def spaced(low: float, high: float, logarithmic: bool, count: int) -> Words:
    """Returns evenly spaced values, with three digits, or more if two would be equal.

    Between ints they are whole, and fewer than `count` if some would be identical.
    """
    ends = (math.log(low), math.log(high)) if logarithmic else (low, high)
    steps = [ends[0] + (ends[1] - ends[0]) * i / (count - 1) for i in range(count)]
    found = [math.exp(x) if logarithmic else x for x in steps]
    # A flag such as --period does not accept 4.0.
    if _are_whole(low, high):
        return tuple(dict.fromkeys(f"{x:.0f}" for x in found))
    # Three digits are enough to read; equal ones would be one trial instead of two.
    spellings = (tuple(f"{x:.{digits}g}" for x in found) for digits in range(3, 17))
    return next((x for x in spellings if len(set(x)) == count), ())


def combinations(ranges: Sequence[Range]) -> Iterator[dict[str, str]]:
    """Yields every combination of values by flag; none without ranges."""
    for each in product(*(r.values for r in ranges)) if ranges else ():
        yield dict(zip((r.flag for r in ranges), each, strict=True))


def named(values: Mapping[str, str]) -> str:
    """Returns values by flag as a name, such as "lr=0.1,period=4"; "" for none."""
    return ",".join(f"{flag}={value}" for flag, value in values.items())


class Variant(NamedTuple):
    """An algorithm with its own flags, and the study's flags that its runs accept.

    Attributes:
        label: name in the report.
        algo: name of the algorithm.
        words: its own flags, as on the command line of experiments.run.
        argv: the flags of its runs, without what is swept and tuned.
        known: the parameters of its runs that a study may set, each with the function
            that reads its value.
        swept: the sweep, if its runs have the flag.
        tuned: the tuned ranges, of flags that it has.
        trials: number of trials at each point; ranges of whole numbers may give fewer.
    """

    label: str
    algo: str
    words: Words = ()
    argv: Words = ()
    known: Mapping[str, Callable[[str], Any]] = MappingProxyType({})
    swept: Range | None = None
    tuned: Sequence[Range] = ()
    trials: int = 0

    @property
    def points(self) -> dict[str, dict[str, str]]:
        """The values of the sweep by flag, by name such as "workers=4"; one "" without.

        A value's name is also that of a folder.
        """
        each = combinations([self.swept]) if self.swept else [{}]
        return {named(values): values for values in each}

    @property
    def parameters(self) -> set[str]:
        """The parameters that are set, swept or tuned for its runs."""
        ranges = [*self.tuned, *([self.swept] if self.swept else [])]
        given = {parameter(group[0]) for group in flag_groups(self.argv)}
        return given | {r.flag for r in ranges}

    @property
    def own_flags(self) -> list[Words]:
        """Its own flags, each with its value."""
        return flag_groups(self.words)

    @property
    def budget(self) -> list[Range]:
        """The ranges of its trials, the first one refined to reach the trial count."""
        # With a plain grid, a variant that lacks one of the tuned flags would have only
        # a fraction of the others' trials.
        times = self.trials // math.prod(len(r.values) for r in self.tuned)
        first = next((r for r in self.tuned if r.bounds is not None), None)
        return [r.refined(times) if r is first else r for r in self.tuned]

    def taking(
        self,
        task: str,
        shared: Sequence[Words],
        tuned: Sequence[Range],
        swept: Range | None,
        taken: Collection[str] = TAKEN,
        added: Words = ADDED,
    ) -> "Variant":
        """Returns the variant with the flags of its runs; arguments: see `resolved`."""
        kinds = {name: {"type": each.read} for name, each in SETTINGS.items()}
        for own in flags.own_of(self.algo, task, None):
            kinds |= {name: flag_kind(x) for name, x in own.flags.items()}
        known = {
            k: x.get("type") or _SWITCH for k, x in kinds.items() if k not in taken
        }
        run = ("--algo", self.algo, "--task", task, *added)
        shares = chain(*(group for group in shared if parameter(group[0]) in known))
        firsts = ([x for x in r.each if x.flag in known][:1] for r in tuned)
        ranges = [*chain(*firsts)]
        # Counted without the refined values: they may be too many to list.
        counted = tuned if any(r.bounds for r in ranges) else ranges
        return self._replace(
            # Its own flags come last: the last of two equal flags wins.
            argv=(*run, *shares, *self.words),
            known=known,
            swept=swept if swept and swept.flag in known else None,
            tuned=ranges,
            trials=math.prod(len(r.values) for r in counted) if ranges else 0,
        )

    def configs(self) -> dict[str, RunConfig]:
        """Returns the config of its runs at each value of the sweep, by its name.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        points = self.points
        first = parse([*self.argv, *as_words(next(iter(points.values())))])
        return {name: self.varied(first, values) for name, values in points.items()}

    def varied(self, run: RunConfig, values: Mapping[str, str]) -> RunConfig:
        """Returns a config of its runs with other values, as words by parameter.

        Raises:
            BadRequest: the run does not accept a value.
        """
        fields: dict[str, Any] = {}
        own = {**run.arguments}, {**run.task_arguments}
        for name, text in values.items():
            place = next((x for x in own if name in x), fields)
            try:
                place[name] = self.known[name](text)
            except ArgumentTypeError as error:
                raise BadRequest(f"argument {flag_of(name)}: {error}") from None
        return replaced(run, **fields, arguments=own[0], task_arguments=own[1])

    def decisive_trials(self) -> Iterator[dict[str, str]]:
        """Yields values by flag; if any trial is invalid, one of these is."""
        return combinations([r._replace(values=r.decisive) for r in self.tuned])


def replaced(run: RunConfig, **fields: Any) -> RunConfig:
    """Returns a config with other fields; raises a BadRequest if they do not fit."""
    try:
        return replace(run, **fields)
    except ValueError as error:
        raise BadRequest(str(error)) from None


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
        x.taking(task, shared, tuned, swept, taken, added) for x in read(text)
    )
    given = [parameter(group[0]) for group in shared]
    own = [parameter(group[0]) for x in found for group in x.own_flags]
    varied = [x for r in (*tuned, swept) if r is not None for x in r.flags]
    # With several parameters, one may belong to an algorithm that is not compared.
    several = [x for r in tuned if r.flags[1:] for x in r.flags]
    elsewhere = [x for x in several if flags.owners_of(ALGORITHM, x)]
    known = set().union(*(x.known for x in found))
    for name in (*given, *varied, *own):
        flag = flag_of(name)
        if name in taken:
            raise BadRequest(f"{flag} is for single runs: use {taken[name]}")
        # Each variant's own flags are checked as those of a run.
        if name not in (*known, *elsewhere, *own):
            raise BadRequest(_unknown(name, found, [*known, *others]))
        if name in varied and name in RECORDED:
            raise BadRequest(
                f"{flag} cannot be swept or tuned: a study's records already use the "
                f"name {name!r}; give the parameter another name"
            )
        if varied.count(name) > 1:
            raise BadRequest(f"{flag} can be swept or tuned once only")
        if name in varied and name in (*given, *own):
            raise BadRequest(f"{flag} is given, and also swept or tuned: do only one")
    return found


def read(text: str) -> tuple[Variant, ...]:
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
    found: dict[str, Variant] = {}
    for words in groups:
        variant = _variant(text, words)
        if variant.label in found:
            raise BadRequest(
                f"--algos has {variant.label!r} twice: give one of them another label, "
                f"as in other={found[variant.label].algo}"
            )
        found[variant.label] = variant
    return (*found.values(),)


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


def _unknown(name: str, variants: Sequence[Variant], possible: Sequence[str]) -> str:
    """Returns the error message for a flag that no variant has."""
    owners = ", ".join(flags.owners_of(ALGORITHM, name))
    nearest = nearest_flag(flag_of(name), [flag_of(x) for x in possible])
    hint = f": it belongs to {owners}" if owners else nearest
    algos = ", ".join(dict.fromkeys(variant.algo for variant in variants))
    return f"none of {algos} has the flag '{flag_of(name)}'{hint}"
