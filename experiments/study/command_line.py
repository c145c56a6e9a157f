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
from experiments.command.factories import ALGORITHM, Factory, flag_kind
from experiments.command.words import (
    REFUSED_FLAGS,
    Words,
    as_words,
    flag_groups,
    flag_name,
    literal,
    nearest_flag,
    parameter,
    read_choice,
)
from experiments.study.variants import (
    MOST_RUNS,
    Axis,
    Readers,
    Variant,
    are_whole,
)
from experiments.training.config import SETTINGS, parse
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.progress import DISPLACEMENTS, MEASURED

# Names that a study's records use themselves: no swept or tuned parameter may have one.
RECORDED = {"label", "algo", "algorithm", "seed", "reported", "diverged"}
RECORDED |= {"effective_lr", "commit", "versions", *MEASURED, *DISPLACEMENTS}
# Flags of additional measurements that every study makes.
ADDED: Words = ("--displacements",)
_SWITCH = read_choice({"true": True, "false": False})


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
    def own_names(self) -> list[str]:
        """The parameters that its own flags set."""
        return _list_names(flag_groups(self.words))

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters that are set, swept or tuned for its runs."""
        varied_names = [axis.flag for axis in (*self.tuned, *self.swept)]
        return frozenset([*_list_names(flag_groups(self.argv)), *varied_names])

    def parse(self) -> Variant:
        """Parses the flags of its runs, at the first value of the sweep.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        first_values = {axis.flag: axis.values[0] for axis in self.swept}
        own_factories = None
        if self.objects != NO_OBJECTS:
            own_factories = self.objects.describe_both(self.algo, self.task)
        return Variant(
            label=self.label,
            config=parse([*self.argv, *as_words(first_values)], own_factories),
            words=self.words,
            parameters=self.parameters,
            swept=self.swept,
            tuned=self.tuned,
            readers=self.readers,
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
    refused: Mapping[str, str] = REFUSED_FLAGS,
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
        refused: parameters that cannot be set for runs, and what to use instead.
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
            refused=refused,
            added=added,
        )
        for algorithm in algorithms
    )
    check_flags(
        variants,
        shared_names=_list_names(shared),
        axes=[*tuned, *swept],
        own_names=own_names,
        refused=refused,
    )
    return variants


def complete_variant(
    algorithm: VariantWords,
    *,
    task: str,
    shared: Sequence[Words],
    tuned: Sequence[Axis] = (),
    swept: Sequence[Axis] = (),
    refused: Mapping[str, str] = REFUSED_FLAGS,
    added: Words = ADDED,
) -> VariantWords:
    """Gives an algorithm those of the shared flags and axes that its runs accept.

    The arguments are those of `parse_variants`, which also checks the flags.
    """
    variant = algorithm._replace(task=task)
    own_factories = variant.objects.describe_both(variant.algo, task)
    readers = find_readers(own_factories, refused)
    first_words = ("--algo", variant.algo, "--task", task, *added)
    shared_words = [x for x in shared if parameter(x[0]) in readers]
    return variant._replace(
        # Its own flags come last: the last of two equal flags wins.
        argv=(*first_words, *chain(*shared_words), *variant.words),
        readers=readers,
        swept=choose_axes(swept, readers),
        tuned=choose_axes(tuned, readers),
    )


def choose_axes(axes: Sequence[Axis], readers: Readers) -> list[Axis]:
    """Returns, of each axis, that of the parameter that a variant has, if any."""
    own_axes: list[Axis] = []
    for axis in axes:
        own_axes += axis.find_own(readers)
    return own_axes


def find_readers(
    own_factories: Sequence[Factory], refused: Mapping[str, str] = REFUSED_FLAGS
) -> Readers:
    """Returns a reader for each parameter that a study may set for runs.

    Args:
        own_factories: the algorithm and the task of the runs.
        refused: parameters that cannot be set for runs.
    """
    readers = {name: setting.read for name, setting in SETTINGS.items()}
    for factory in own_factories:
        for name, own_parameter in factory.flags.items():
            readers[name] = flag_kind(own_parameter).get("type")
    return {
        name: reader or _SWITCH
        for name, reader in readers.items()
        if name not in refused
    }


def check_flags(
    variants: Sequence[VariantWords | Variant],
    *,
    shared_names: Sequence[str],
    axes: Sequence[Axis],
    own_names: Collection[str],
    refused: Mapping[str, str] = REFUSED_FLAGS,
) -> None:
    """Raises a BadRequest for a flag that no variant has, or that is given twice.

    Args:
        variants: the variants with their own flags.
        shared_names: the parameters with one value for all runs.
        axes: the swept and tuned axes.
        own_names: the command's own parameters, suggested for a misspelt flag.
        refused: parameters that cannot be set for runs, and what to use instead.
    """
    variant_names: list[str] = []
    possible_names: set[str] = set()
    for variant in variants:
        variant_names += variant.own_names
        possible_names |= variant.readers.keys()
    varied_names: list[str] = []
    # With several parameters, one may belong to an algorithm that is not compared.
    absent_names: list[str] = []
    for axis in axes:
        varied_names += axis.flags
        if len(axis.flags) > 1:
            absent_names += [x for x in axis.flags if flags.find_owners(ALGORITHM, x)]
    for name in (*shared_names, *varied_names, *variant_names):
        flag = flag_name(name)
        if name in refused:
            raise BadRequest(f"{flag} is for single runs: use {refused[name]}")
        # Each variant's own flags are checked as those of a run.
        if name not in (*possible_names, *absent_names, *variant_names):
            raise unknown_flag(name, variants, [*possible_names, *own_names])
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


def unknown_flag(
    name: str, variants: Sequence[VariantWords | Variant], possible_names: Sequence[str]
) -> BadRequest:
    """Makes the error for a flag that no variant has."""
    flag = flag_name(name)
    algos = ", ".join(dict.fromkeys(variant.algo for variant in variants))
    owners = ", ".join(flags.find_owners(ALGORITHM, name))
    if owners:
        return BadRequest(
            f"none of {algos} has the flag '{flag}': it belongs to {owners}"
        )
    suggestion = nearest_flag(flag, [flag_name(x) for x in possible_names])
    return BadRequest(f"none of {algos} has the flag '{flag}'{suggestion}")


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


def _list_names(groups: Iterable[Words]) -> list[str]:
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
            name, equals, value_text = part.partition("=")
            names.append(name.strip().lstrip("-").replace("-", "_"))
            if equals and all(names) and value_text.strip():
                axes.append(_read_values(flag, "|".join(names), value_text))
                names = []
        if names:
            raise ValueError(
                "needs a flag and its values, such as lr=0.01:1:log:7 or period=4,16,64"
            )
        axis = axes[0]._replace(fallbacks=tuple(axes[1:]))
        if flag == "--sweep" and len(axis.flags) > 1:
            raise ValueError("varies one flag; only --tune takes several names")
        are_lists = all(part.bounds is None for part in axes)
        lengths = {len(part.values) for part in axes}
        if axis.fallbacks and not (are_lists and len(lengths) == 1):
            raise ValueError("needs lists with the same number of values")
    return axis


def _read_values(flag: str, name: str, value_text: str) -> Axis:
    """Reads the values of one axis."""
    # A list may have colons, too: partition=iid,dirichlet:0.1.
    if re.search(r"^[\s+\-.\deE]+:|:(log|linear):", value_text):
        bounds, count, near, near_seeds = _read_range(value_text)
        if near and flag == "--sweep":
            raise ValueError("values near the best are for --tune: leave out +MORE")
        values = space_values(*bounds, count)
        if len(values) < count:
            raise ValueError(
                f"there are not {count} whole numbers in this range; write the ends "
                "with a point, such as 1.0, for other numbers"
            )
        return Axis(name, values, bounds, near, near_seeds)
    return list_axis(flag, name, [value.strip() for value in value_text.split(",")])


def list_axis(flag: str, name: str, values: Sequence[str]) -> Axis:
    """Returns the axis of a list of values.

    Args:
        flag: --tune or --sweep, for errors.
        name: the parameter, or several with | between them.
        values: the texts of the values.

    Raises:
        BadRequest, ValueError: the values cannot be tried.
    """
    # 0.1 and 0.10 are one value.
    if not all(values) or len(set(map(literal, values))) < len(values):
        raise ValueError("values must differ and not be empty")
    word = next((x for x in values if isinstance(literal(x), str)), None)
    if flag == "--tune" and word is not None:
        raise BadRequest(
            f"--tune {name}: needs numbers, got {word!r}; to compare words, list the "
            f"algorithm once for each word, as in A=NAME --{name} {word}"
        )
    return Axis(name, tuple(values))


def _read_range(text: str) -> tuple[tuple[float, float, bool], int, int, int]:
    """Reads the ends, the spacing, and the numbers of values, near ones and seeds."""
    parts = text.split(":")
    number, plus, near_text = parts[-1].partition("+")
    near_count, times, seeds = near_text.partition("x")
    words = (*parts[:-1], number, near_count if plus else "0", seeds if times else "0")
    match [literal(word) for word in words]:
        case [
            int() | float() as low,
            int() | float() as high,
            ("log" | "linear") as spacing,
            int() as count,
            int() as near,
            int() as near_seeds,
        ] if (not plus or (spacing == "log" and near > 0)) and (
            not times or near_seeds > 0
        ):
            is_log = spacing == "log"
        case _:
            raise ValueError(
                "a range must be LOW:HIGH:log:COUNT, with +MORE behind it for values "
                "near the best and xSEEDS behind that for their seeds, or "
                "LOW:HIGH:linear:COUNT"
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
    return (low, high, is_log), count, near, near_seeds


def space_values(low: float, high: float, logarithmic: bool, count: int) -> Words:
    """Returns evenly spaced values, with three digits, or more if two would be equal.

    Between ints they are whole, and fewer than `count` if some would be identical.
    """
    start: float = low
    end: float = high
    if logarithmic:
        start = math.log(low)
        end = math.log(high)
    numbers: list[float] = []
    for index in range(count):
        place = start + (end - start) * index / (count - 1)
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
