"""The words of --algos, --sweep and --tune, read as variants and axes."""

import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from experiments.command import flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import ALGORITHM, TASK, Factory, flag_kind
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
from experiments.study.variants import (
    MOST_RUNS,
    Axis,
    Readers,
    Variant,
    are_whole,
    count_trials,
)
from experiments.training.config import SETTINGS, parse
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.progress import DISPLACEMENTS, MEASURED

# Names that a study's records use themselves: no swept or tuned parameter may have one.
RECORDED = {"label", "algo", "algorithm", "seed", "reported", "diverged"}
RECORDED |= {"effective_lr", "commit", "versions", *MEASURED, *DISPLACEMENTS}
# Flags of additional measurements that every study makes.
ADDED: Words = ("--displacements",)
_SWITCH = one_of({"true": True, "false": False})


class VariantWords(NamedTuple):
    """The words of a variant, before its runs' flags are parsed.

    Attributes:
        label: its name in the report.
        algo: the name of the algorithm.
        words: its own flags, as on the command line of experiments.run.
        task: the name of the task.
        argv: the flags of its runs, without what is swept and tuned.
        readers: the parameters of its runs that a study may set, each with the function
            that reads its value.
        swept: the axis of the sweep, if its runs have the parameter.
        tuned: the tuned axes, of parameters that its runs have.
        objects: what Python code passed in place of names.
    """

    label: str
    algo: str
    words: Words = ()
    task: str = ""
    argv: Words = ()
    readers: Readers = MappingProxyType({})
    swept: Sequence[Axis] = ()
    tuned: Sequence[Axis] = ()
    objects: Objects = NO_OBJECTS

    @property
    def own_flags(self) -> list[Words]:
        """Its own flags, each with its value."""
        return flag_groups(self.words)

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters that are set, swept or tuned for its runs."""
        varied_names = [axis.flag for axis in (*self.tuned, *self.swept)]
        return frozenset([*_set_by(flag_groups(self.argv)), *varied_names])

    @property
    def num_points(self) -> int:
        """The number of values of the sweep; 1 without one."""
        return math.prod(len(axis.values) for axis in self.swept)

    @property
    def num_trials(self) -> int:
        """The number of trials at each point; an optimum at an end adds some."""
        return count_trials(self.tuned)

    def parse(self) -> Variant:
        """Parses the flags of its runs, at the first value of the sweep.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        first_values = {axis.flag: axis.values[0] for axis in self.swept}
        axes = *self.swept, *self.tuned
        own_factories = None
        if self.objects != NO_OBJECTS:
            own_factories = _describe_factories(self)
        return Variant(
            label=self.label,
            algo=self.algo,
            config=parse([*self.argv, *as_words(first_values)], own_factories),
            words=self.words,
            parameters=self.parameters,
            swept=self.swept,
            tuned=self.tuned,
            readers={axis.flag: self.readers[axis.flag] for axis in axes},
            objects=self.objects,
        )


def parse_variants(
    algorithms: Sequence[VariantWords],
    *,
    task: str,
    shared: Sequence[Words],
    own_names: Collection[str],
    tuned: Sequence[Axis] = (),
    swept: Sequence[Axis] = (),
    taken: Mapping[str, str] = TAKEN,
    added: Words = ADDED,
) -> tuple[VariantWords, ...]:
    """Reads the algorithms of a command, with the flags that their runs accept.

    Args:
        algorithms: the algorithms with their own flags, as of `read_algorithms`.
        task: the name of the task.
        shared: flags of all runs with one value, one tuple of words for each.
        own_names: the command's own parameters, suggested for a misspelt flag.
        tuned: the tuned axes.
        swept: the axis of the sweep, if there is one.
        taken: parameters that cannot be set for runs, and what to use instead.
        added: flags that all runs get.

    Raises:
        BadRequest: an unknown algorithm or task, or a flag that a study sets itself,
            that no variant has, or that is given, swept or tuned twice.
    """
    variants = tuple(
        complete_variant(
            algorithm,
            task=task,
            shared=shared,
            tuned=tuned,
            swept=swept,
            taken=taken,
            added=added,
        )
        for algorithm in algorithms
    )
    _check_flags(variants, shared, [*tuned, *swept], own_names, taken)
    return variants


def complete_variant(
    algorithm: VariantWords,
    *,
    task: str,
    shared: Sequence[Words],
    tuned: Sequence[Axis] = (),
    swept: Sequence[Axis] = (),
    taken: Mapping[str, str] = TAKEN,
    added: Words = ADDED,
) -> VariantWords:
    """Gives an algorithm those of the shared flags and axes that its runs accept.

    The arguments are those of `parse_variants`, which also checks the flags.
    """
    variant = algorithm._replace(task=task)
    readers = _find_readers(variant, taken)
    first_words = ("--algo", variant.algo, "--task", task, *added)
    shared_words = [x for x in shared if parameter(x[0]) in readers]
    tuned_axes = [own_axis for axis in tuned for own_axis in axis.of(readers)]
    return variant._replace(
        # Its own flags come last: the last of two equal flags wins.
        argv=(*first_words, *chain(*shared_words), *variant.words),
        readers=readers,
        swept=[axis for axis in swept if axis.flag in readers],
        tuned=tuned_axes,
    )


def _describe_factories(variant: VariantWords) -> list[Factory]:
    """Describes the algorithm and the task of a variant."""
    algorithm = variant.objects.describe(ALGORITHM, variant.algo)
    return [algorithm, variant.objects.describe(TASK, variant.task)]


def _find_readers(variant: VariantWords, taken: Mapping[str, str]) -> Readers:
    """Returns a reader for each parameter that a study may set for runs."""
    readers = {name: setting.read for name, setting in SETTINGS.items()}
    for factory in _describe_factories(variant):
        for name, own_parameter in factory.flags.items():
            readers[name] = flag_kind(own_parameter).get("type")
    return {
        name: reader or _SWITCH for name, reader in readers.items() if name not in taken
    }


def _check_flags(
    variants: Sequence[VariantWords],
    shared: Sequence[Words],
    axes: Sequence[Axis],
    own_names: Collection[str],
    taken: Mapping[str, str],
) -> None:
    """Raises a BadRequest for a flag that no variant has, or that is given twice."""
    shared_names = _set_by(shared)
    own_flags = [words for variant in variants for words in variant.own_flags]
    variant_names = _set_by(own_flags)
    varied_names = [flag for axis in axes for flag in axis.flags]
    # With several parameters, one may belong to an algorithm that is not compared.
    alternatives = [flag for axis in axes if axis.flags[1:] for flag in axis.flags]
    absent_names = [x for x in alternatives if flags.owners_of(ALGORITHM, x)]
    possible_names: set[str] = set()
    for variant in variants:
        possible_names |= variant.readers.keys()
    for name in (*shared_names, *varied_names, *variant_names):
        flag = flag_of(name)
        if name in taken:
            raise BadRequest(f"{flag} is for single runs: use {taken[name]}")
        # Each variant's own flags are checked as those of a run.
        if name not in (*possible_names, *absent_names, *variant_names):
            raise BadRequest(_unknown(name, variants, [*possible_names, *own_names]))
        if name in varied_names and name in RECORDED:
            raise BadRequest(
                f"{flag} cannot be swept or tuned: a study's records already use the "
                f"name {name!r}; give the parameter another name"
            )
        if varied_names.count(name) > 1:
            raise BadRequest(
                f"{flag} can be swept or tuned once only: name it in one --sweep or "
                "--tune"
            )
        if name in varied_names and name in (*shared_names, *variant_names):
            raise BadRequest(f"{flag} is given, and also swept or tuned: do only one")


def read_algorithms(text: str) -> tuple[VariantWords, ...]:
    """Reads `--algos`: "sync_sgd, bmuf --nesterov, Slow=diloco --outer-lr 0.4".

    Args:
        text: algorithms, separated by commas; each may have its own flags, and a label
            before =.

    Raises:
        BadRequest: an algorithm has no name, or two have the same label.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
    # A label may have a #.
    lexer.whitespace_split = True
    lexer.commenters = ""
    variants: dict[str, VariantWords] = {}
    with refusing(f"--algos {text!r}"):
        for words in _split_at_commas(lexer):
            variant = _read_algorithm(words)
            if variant.label in variants:
                raise BadRequest(
                    f"--algos has {variant.label!r} twice: give one of them another "
                    f"label, as in other={variants[variant.label].algo}"
                )
            variants[variant.label] = variant
    return (*variants.values(),)


def _split_at_commas(lexer: Iterable[str]) -> list[list[str]]:
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


def _read_algorithm(words: Sequence[str]) -> VariantWords:
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
    own_words = (*chain(*flag_groups(words[1:])),)
    return VariantWords(label or " ".join([name, *own_words]), name, own_words)


def _unknown(
    name: str, variants: Sequence[VariantWords], possible: Sequence[str]
) -> str:
    """Returns the error message for a flag that no variant has."""
    flag = flag_of(name)
    algos = ", ".join(dict.fromkeys(variant.algo for variant in variants))
    owners = ", ".join(flags.owners_of(ALGORITHM, name))
    if owners:
        return f"none of {algos} has the flag '{flag}': it belongs to {owners}"
    suggestion = nearest_flag(flag, [flag_of(x) for x in possible])
    return f"none of {algos} has the flag '{flag}'{suggestion}"


def _set_by(groups: Iterable[Words]) -> list[str]:
    """Returns the parameters that flags set."""
    return [parameter(flag) for flag, *_ in groups]


def parse_axis(flag: str, text: str) -> Axis:
    """Reads "lr=0.01:1.0:log:7", "lr=0.1:0.5:linear:5" or "workers=1,2,4,8".

    For --tune, "block_momentum|slow_momentum=0.5,0.9" is one axis with two names, and
    "block_momentum=0.5,0.9|rank=1,4" has separate values for each of two parameters.

    Args:
        flag: --tune or --sweep, for errors.
        text: its value.

    Raises:
        BadRequest: the text does not have this form; one line.
    """
    names: list[str] = []
    axes: list[Axis] = []
    with refusing(f"{flag} {text!r}"):
        for part in text.split("|"):
            name, equals, listed = part.partition("=")
            names.append(name.strip().lstrip("-").replace("-", "_"))
            if equals and all(names) and listed.strip():
                axes.append(_read_values(flag, "|".join(names), listed))
                names = []
        if names:
            raise ValueError(
                "needs a flag and its values, such as lr=0.01:1:log:7 or period=4,16,64"
            )
        first = axes[0]._replace(others=tuple(axes[1:]))
        if flag == "--sweep" and first.flags[1:]:
            raise ValueError("varies one flag; only --tune takes several names")
        kinds = {(x.bounds, len(x.values)) for x in axes}
        if first.others and kinds != {(None, len(first.values))}:
            raise ValueError("needs lists with the same number of values")
    return first


def _read_values(flag: str, name: str, listed: str) -> Axis:
    """Reads the values of one axis."""
    # A list may have colons, too: partition=iid,dirichlet:0.1.
    if re.search(r"^[\s+\-.\deE]+:|:(log|linear):", listed):
        bounds, count, near = _bounds(listed)
        if near and flag == "--sweep":
            raise ValueError("values near the best are for --tune: leave out +MORE")
        values = spaced(*bounds, count)
        if len(values) < count:
            raise ValueError(
                f"there are not {count} whole numbers in this range; write the ends "
                "with a point, such as 1.0, for other numbers"
            )
        return Axis(name, values, bounds, near)
    values = tuple(value.strip() for value in listed.split(","))
    # 0.1 and 0.10 are one value.
    if not all(values) or len(set(map(literal, values))) < len(values):
        raise ValueError("values must differ and not be empty")
    word = next((x for x in values if isinstance(literal(x), str)), None)
    if flag == "--tune" and word is not None:
        raise BadRequest(
            f"--tune {name}: needs numbers, got {word!r}; to compare words, list the "
            f"algorithm once for each word, as in A=NAME --{name} {word}"
        )
    return Axis(name, values)


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
    first, last = (math.log(low), math.log(high)) if logarithmic else (low, high)
    numbers: list[float] = []
    for index in range(count):
        place = first + (last - first) * index / (count - 1)
        numbers.append(math.exp(place) if logarithmic else place)
    # A flag such as --period does not accept 4.0.
    if are_whole(low, high):
        return tuple(dict.fromkeys(f"{x:.0f}" for x in numbers))
    # Three digits are enough to read; equal ones would be one trial instead of two.
    for digits in range(3, 17):
        texts = tuple(f"{x:.{digits}g}" for x in numbers)
        if len(set(texts)) == count:
            return texts
    return ()
