"""The variants of a study: the algorithms, their flags, and the values to try."""

import math
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.command import flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import ALGORITHM, flag_kind
from experiments.command.words import (
    TAKEN,
    Words,
    as_words,
    flag_groups,
    flag_of,
    literal,
    nearest_flag,
    one_of,
    parameter,
)
from experiments.training.config import SETTINGS, RunConfig, parse
from experiments.training.progress import DISPLACEMENTS, MEASURED

# The largest number of runs of a study, and so of values in a range.
MOST_RUNS = 10_000
# Names that a study's records use themselves: no swept or tuned parameter may have one.
RECORDED = {"label", "algo", "algorithm", "seed", "reported", "diverged"}
RECORDED |= {"effective_lr", "commit", "versions", *MEASURED, *DISPLACEMENTS}
# Trials after a range's own values: see `Range`.
NEAR = 1.2  # the factor between values near the best
MOST_BEYOND = 4  # values beyond the ends
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
        near: how many values near the best one are tried after these. With any, a best
            value at an end is first followed beyond it.
        others: lists of the same length, for algorithms without these parameters.
    """

    flag: str
    values: Words
    bounds: tuple[float, float, bool] | None = None
    near: int = 0
    others: tuple["Range", ...] = ()

    @property
    def each(self) -> list["Range"]:
        """A range for each parameter."""
        named = [(x, flag) for x in (self, *self.others) for flag in x.flag.split("|")]
        return [x._replace(flag=flag, others=()) for x, flag in named]

    def of(self, known: Collection[str]) -> list["Range"]:
        """Returns the range of the first parameter that an algorithm has."""
        return [x for x in self.each if x.flag in known][:1]

    @property
    def flags(self) -> Words:
        """The parameters; the range varies one of them for each algorithm."""
        return tuple(x.flag for x in self.each)

    @property
    def listed(self) -> list[str]:
        """The parameters and their values, as given on the command line."""
        near = [f"+{self.near}"] if self.near else []
        each = self, *self.others
        return [x for own in each for x in (own.flag, *own.values)] + near

    @property
    def decisive(self) -> Words:
        """Values that suffice to check all: if any value is invalid, one of these is.

        The valid values of a flag form an interval, so if both ends are valid, all
        values between them are. Whole numbers may have to divide something.
        """
        if self.bounds is None or _are_whole(*self.bounds[:2]):
            return self.values
        return self.values[0], self.values[-1]

    def more(self, tried: Collection[str], best: str, is_near: bool) -> Words:
        """Returns new values near the best, or one beyond an end at which it lies."""
        assert self.bounds is not None
        low, high, _ = self.bounds
        known, below = sorted(map(float, tried)), self.near // 2
        ratio = (high / low) ** (1 / (len(self.values) - 1))
        factors = [NEAR**n for n in range(-below, self.near - below + 1)]
        if not is_near:
            is_enough = len(known) >= len(self.values) + MOST_BEYOND
            ends = {} if is_enough else {known[0]: 1 / ratio, known[-1]: ratio}
            factors = [ends.get(float(best), 1)]
        form = ".0f" if _are_whole(low, high) else ".3g"
        texts = dict.fromkeys(f"{float(best) * x:{form}}" for x in factors)
        return tuple(x for x in texts if float(x) not in known)


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
    with refusing(f"{flag} {text!r}"):
        for part in text.split("|"):
            name, equals, listed = part.partition("=")
            names.append(name.strip().lstrip("-").replace("-", "_"))
            if equals and all(names) and listed.strip():
                found.append(_read(flag, "|".join(names), listed))
                names = []
        if names:
            raise ValueError(
                "needs a flag and its values, such as lr=0.01:1:log:7 or period=4,16,64"
            )
        first = found[0]._replace(others=tuple(found[1:]))
        if flag == "--sweep" and first.flags[1:]:
            raise ValueError("varies one flag; only --tune takes several names")
        kinds = {(x.bounds, len(x.values)) for x in found}
        if first.others and kinds != {(None, len(first.values))}:
            raise ValueError("needs lists with the same number of values")
    return first


def _read(flag: str, name: str, listed: str) -> Range:
    """Reads the values of one range."""
    # A list may have colons, too: partition=iid,dirichlet:0.1.
    if re.search(r"^[\s+\-.\deE]+:|:(log|linear):", listed):
        bounds, count, near = _bounds(listed)
        if near and flag == "--sweep":
            raise ValueError("values near the best are for --tune: leave out +MORE")
        found = spaced(*bounds, count)
        if len(found) < count:
            raise ValueError(
                f"there are not {count} whole numbers in this range; write the ends "
                "with a point, such as 1.0, for other numbers"
            )
        return Range(name, found, bounds, near)
    found = tuple(value.strip() for value in listed.split(","))
    # 0.1 and 0.10 are one value.
    if not all(found) or len(set(map(literal, found))) < len(found):
        raise ValueError("values must differ and not be empty")
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


def _bounds(listed: str) -> tuple[tuple[float, float, bool], int, int]:
    """Reads the ends, the spacing, and the numbers of values and of near ones."""
    parts = listed.split(":")
    number, plus, more = parts[-1].partition("+")
    match [literal(x) for x in (*parts[:-1], number, more if plus else "0")]:
        case [
            int() | float() as low,
            int() | float() as high,
            ("log" | "linear") as how,
            int() as count,
            int() as near,
        ] if not plus or (how == "log" and near > 0):
            is_log = how == "log"
        case _:
            raise ValueError(
                "a range must be LOW:HIGH:log:COUNT, with +MORE behind it for values "
                "near the best, or LOW:HIGH:linear:COUNT"
            )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{parts[0]} must be below {parts[1]}")
    if is_log and low <= 0:
        raise ValueError(f"a logarithmic range begins above 0, got {parts[0]}")
    if count < 2:
        raise ValueError(f"a range needs at least 2 values, got {count}")
    if count > MOST_RUNS:
        raise ValueError(
            f"{count:,} values are too many: a study makes at most {MOST_RUNS:,} runs"
        )
    return (low, high, is_log), count, near


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


def at(label: str, point: str) -> str:
    """Returns a label and the value of a sweep, if there is one."""
    return f"{label} at {point}" if point else label


class Given(NamedTuple):
    """The flags that a study sets for the runs of all variants that have them.

    Attributes:
        task: the name of the task.
        shared: flags with one value, one tuple of words for each.
        tuned: the tuned ranges.
        swept: the range of the sweep, if there is one.
        taken: parameters that cannot be set for runs, and what to use instead.
        added: flags that all runs get.
    """

    task: str
    shared: Sequence[Words]
    tuned: Sequence[Range] = ()
    swept: Sequence[Range] = ()
    taken: Mapping[str, str] = TAKEN
    added: Words = ADDED


class Variant(NamedTuple):
    """An algorithm with its own flags, and the study's flags that its runs accept.

    Attributes:
        label: name in the report.
        algo: name of the algorithm.
        words: its own flags, as on the command line of experiments.run.
        argv: the flags of its runs, without what is swept and tuned.
        known: the parameters of its runs that a study may set, each with the function
            that reads its value.
        swept: the range of the sweep, if its runs have the flag.
        tuned: the tuned ranges, of flags that it has.
    """

    label: str
    algo: str
    words: Words = ()
    argv: Words = ()
    known: Mapping[str, Callable[[str], Any]] = MappingProxyType({})
    swept: Sequence[Range] = ()
    tuned: Sequence[Range] = ()

    @property
    def points(self) -> dict[str, dict[str, str]]:
        """The values of the sweep by flag, by name such as "workers=4"; one "" without.

        A value's name is also that of a folder.
        """
        return {named(x): x for x in combinations(self.swept)} or {"": {}}

    @property
    def parameters(self) -> set[str]:
        """The parameters that are set, swept or tuned for its runs."""
        varied = [r.flag for r in (*self.tuned, *self.swept)]
        return {*_set_by(flag_groups(self.argv)), *varied}

    @property
    def own_flags(self) -> list[Words]:
        """Its own flags, each with its value."""
        return flag_groups(self.words)

    @property
    def trials(self) -> int:
        """The number of trials at each point; an optimum at an end adds some."""
        grid = math.prod(len(r.values) for r in self.tuned) if self.tuned else 0
        return grid + sum(r.near for r in self.tuned)

    def taking(self, given: Given) -> "Variant":
        """Returns the variant with the flags that its runs accept."""
        readers = {name: each.read for name, each in SETTINGS.items()}
        for own in flags.own_of(self.algo, given.task, None):
            kinds = {name: flag_kind(x) for name, x in own.flags.items()}
            readers |= {name: kind.get("type") for name, kind in kinds.items()}
        known = {k: x or _SWITCH for k, x in readers.items() if k not in given.taken}
        run = ("--algo", self.algo, "--task", given.task, *given.added)
        shared = [group for group in given.shared if parameter(group[0]) in known]
        return self._replace(
            # Its own flags come last: the last of two equal flags wins.
            argv=(*run, *chain(*shared), *self.words),
            known=known,
            swept=[r for r in given.swept if r.flag in known],
            tuned=[r for each in given.tuned for r in each.of(known)],
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


@refusing()
def replaced(run: RunConfig, **fields: Any) -> RunConfig:
    """Returns a config with other fields; raises a BadRequest if they do not fit."""
    return replace(run, **fields)


def resolved(text: str, given: Given, others: Collection[str]) -> tuple[Variant, ...]:
    """Returns the variants with the flags of a study that their runs accept.

    Args:
        text: the value of --algos.
        given: the flags of the study.
        others: the study's own parameters, suggested for a misspelt flag.

    Raises:
        BadRequest: an unknown algorithm or task, or a flag that a study sets itself,
            that no variant has, or that is given, swept or tuned twice.
    """
    found = tuple(x.taking(given) for x in read(text))
    shared, own = _set_by(given.shared), _set_by(x for v in found for x in v.own_flags)
    varied = [x for r in (*given.tuned, *given.swept) for x in r.flags]
    # With several parameters, one may belong to an algorithm that is not compared.
    several = [x for r in given.tuned if r.flags[1:] for x in r.flags]
    elsewhere = [x for x in several if flags.owners_of(ALGORITHM, x)]
    known = set().union(*(x.known for x in found))
    for name in (*shared, *varied, *own):
        flag = flag_of(name)
        if name in given.taken:
            raise BadRequest(f"{flag} is for single runs: use {given.taken[name]}")
        # Each variant's own flags are checked as those of a run.
        if name not in (*known, *elsewhere, *own):
            raise BadRequest(_unknown(name, found, [*known, *others]))
        if name in varied and name in RECORDED:
            raise BadRequest(
                f"{flag} cannot be swept or tuned: a study's records already use the "
                f"name {name!r}; give the parameter another name"
            )
        if varied.count(name) > 1:
            raise BadRequest(
                f"{flag} can be swept or tuned once only: name it in one --sweep or "
                "--tune"
            )
        if name in varied and name in (*shared, *own):
            raise BadRequest(f"{flag} is given, and also swept or tuned: do only one")
    return found


def _set_by(groups: Iterable[Words]) -> list[str]:
    """Returns the parameters that flags set."""
    return [parameter(flag) for flag, *_ in groups]


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
    found: dict[str, Variant] = {}
    with refusing(f"--algos {text!r}"):
        for words in _separated(lexer):
            variant = _variant(words)
            if variant.label in found:
                raise BadRequest(
                    f"--algos has {variant.label!r} twice: give one of them another "
                    f"label, as in other={found[variant.label].algo}"
                )
            found[variant.label] = variant
    return (*found.values(),)


def _separated(lexer: Iterable[str]) -> list[list[str]]:
    """Returns the words between commas."""
    groups: list[list[str]] = [[]]
    try:
        for token in lexer:
            # Adjacent commas are one token: between them a name is missing.
            if set(token) == {","}:
                groups += [[] for _ in token]
            else:
                groups[-1].append(token)
    except ValueError:
        raise ValueError("an open quotation mark, or a backslash at the end") from None
    return groups


def _variant(words: Sequence[str]) -> Variant:
    """Reads one algorithm of --algos."""
    if not words or words[0].startswith("-"):
        raise ValueError("every algorithm needs a name, as in sync_sgd,bmuf --nesterov")
    if "-h" in words:
        raise ValueError("see python -m experiments.run --algo NAME --help")
    label, equals, name = words[0].rpartition("=")
    if not name or (equals and not label):
        raise ValueError(
            f"{words[0]!r} must be a label, = and a name, without spaces around ="
        )
    own = (*chain(*flag_groups(words[1:])),)
    return Variant(label or " ".join([name, *own]), name, own)


def _unknown(name: str, variants: Sequence[Variant], possible: Sequence[str]) -> str:
    """Returns the error message for a flag that no variant has."""
    flag = flag_of(name)
    algos = ", ".join(dict.fromkeys(variant.algo for variant in variants))
    owners = ", ".join(flags.owners_of(ALGORITHM, name))
    if owners:
        return f"none of {algos} has the flag '{flag}': it belongs to {owners}"
    suggestion = nearest_flag(flag, [flag_of(x) for x in possible])
    return f"none of {algos} has the flag '{flag}'{suggestion}"
