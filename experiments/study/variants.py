"""The variants of a study: configs of runs, and the values to try for each."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.command.errors import BadRequest, refusing
from experiments.command.words import Words, flag_groups, flag_name, parameter
from experiments.training.config import RunConfig
from experiments.training.objects import NO_OBJECTS, Objects

# The largest number of runs of a study, and so of values on an axis.
MOST_RUNS = 20_000
# Trials after an axis's own values: see `Axis`.
NEAR = 1.2  # the factor between values near the best
MOST_BEYOND = 4  # values beyond the ends
Readers = Mapping[str, Callable[[str], Any]]
"""Functions that read the value of a parameter from a word, by its name."""


class Axis(NamedTuple):
    """A flag to sweep or tune over, and the values to try.

    Attributes:
        flag: its parameter, with underscores; or several with | between them, of which
            an algorithm uses the first that it has.
        values: the values, as on a command line.
        bounds: low, high and whether logarithmic, for a range; None for a list.
        near: how many values near the best one are tried after these. With any, a best
            value at an end is first followed beyond it.
        near_seeds: tuning seeds of the best one and of those near it, by which the
            value is chosen; 0: as many as of other trials.
        fallbacks: lists of the same length, for algorithms without these parameters.
    """

    flag: str
    values: Words
    bounds: tuple[float, float, bool] | None = None
    near: int = 0
    near_seeds: int = 0
    fallbacks: tuple["Axis", ...] = ()

    @property
    def alternatives(self) -> list["Axis"]:
        """An axis for each parameter."""
        axes: list[Axis] = []
        for axis in (self, *self.fallbacks):
            for flag in axis.flag.split("|"):
                axes.append(axis._replace(flag=flag, fallbacks=()))
        return axes

    def find_own(self, parameters: Collection[str]) -> list["Axis"]:
        """Returns the axis of the first parameter that an algorithm has, if any."""
        return [axis for axis in self.alternatives if axis.flag in parameters][:1]

    @property
    def flags(self) -> Words:
        """The parameters; the axis varies one of them for each algorithm."""
        return tuple(axis.flag for axis in self.alternatives)

    @property
    def record(self) -> list[str]:
        """The parameters and their values, as study.json has them."""
        words: list[str] = []
        for axis in (self, *self.fallbacks):
            words += [axis.flag, *axis.values]
        if self.near:
            words.append(f"+{self.near}")
        return words

    @property
    def decisive(self) -> Words:
        """Values that suffice to check all: if any value is invalid, one of these is.

        The valid values of a flag form an interval, so if both ends are valid, all
        values between them are. Whole numbers may have to divide something.
        """
        if self.bounds is None or are_whole(*self.bounds[:2]):
            return self.values
        return self.values[0], self.values[-1]

    def further_values(
        self, tried_values: Collection[str], best: str, *, is_near: bool
    ) -> Words:
        """Returns new values near the best, or one beyond an end at which it lies."""
        assert self.bounds is not None
        low, high, _ = self.bounds
        tried_numbers = sorted(map(float, tried_values))
        below = self.near // 2
        ratio = (high / low) ** (1 / (len(self.values) - 1))
        if is_near:
            factors = [NEAR**n for n in range(-below, self.near - below + 1)]
        elif len(tried_numbers) >= len(self.values) + MOST_BEYOND:
            factors = [1]
        else:
            ends = {tried_numbers[0]: 1 / ratio, tried_numbers[-1]: ratio}
            factors = [ends.get(float(best), 1)]
        texts = dict.fromkeys(self._format(float(best) * x) for x in factors)
        return tuple(x for x in texts if float(x) not in tried_numbers)

    def value_beyond(self, window: Collection[str], best: str) -> str | None:
        """Returns the value beyond the end of a window at which the best lies.

        Args:
            window: values near the best one, spaced by the factor NEAR.
            best: the best of them.

        Returns:
            None if the best lies between others, is the only one, or if MOST_BEYOND
            values beyond the first window have been tried.
        """
        numbers = sorted(map(float, window))
        if len(numbers) < 2 or len(numbers) > self.near + MOST_BEYOND:
            return None
        factors = {numbers[0]: 1 / NEAR, numbers[-1]: NEAR}
        if float(best) not in factors:
            return None
        value = self._format(float(best) * factors[float(best)])
        return None if float(value) in numbers else value

    def _format(self, value: float) -> str:
        """Returns the text of a value: of a whole number, if the ends are."""
        assert self.bounds is not None
        return f"{value:.0f}" if are_whole(*self.bounds[:2]) else f"{value:.3g}"


def are_whole(low: float, high: float) -> bool:
    """Whether both ends are written as whole numbers: then all values are."""
    return isinstance(low, int) and isinstance(high, int)


class Variant(NamedTuple):
    """An algorithm with its settings, and the axes along which its runs vary.

    Attributes:
        label: its name in the report.
        config: the config of its runs, at the first value of the sweep.
        words: the flags that this variant alone has, as study.json and titles have
            them.
        parameters: the parameters that are set, swept or tuned for its runs.
        swept: the axis of the sweep, if its runs have the parameter.
        tuned: the tuned axes whose parameters its runs have.
        readers: the parameters of its runs that a study may set, each with the function
            that reads its value.
        objects: what Python code passed in place of names.
    """

    label: str
    config: RunConfig
    words: Words = ()
    parameters: frozenset[str] = frozenset()
    swept: Sequence[Axis] = ()
    tuned: Sequence[Axis] = ()
    readers: Readers = MappingProxyType({})
    objects: Objects = NO_OBJECTS

    @property
    def algo(self) -> str:
        """The name of the algorithm."""
        return self.config.algo

    @property
    def points(self) -> dict[str, dict[str, str]]:
        """The values of the sweep by flag, by name such as "workers=4"; one "" without.

        A value's name is also that of a folder.
        """
        return {format_values(x): x for x in combinations(self.swept)} or {"": {}}

    @property
    def own_flags(self) -> list[Words]:
        """Its own flags, each with its value."""
        return flag_groups(self.words)

    @property
    def own_names(self) -> list[str]:
        """The parameters that this variant alone sets."""
        return [parameter(flag) for flag, *_ in self.own_flags]

    @property
    def num_points(self) -> int:
        """The number of values of the sweep; 1 without one."""
        return math.prod(len(axis.values) for axis in self.swept)

    @property
    def trials(self) -> int:
        """The number of trials at each point; an optimum at an end adds some."""
        return count_trials(self.tuned)

    def read(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Reads values of its axes, which folders name by their texts.

        Raises:
            BadRequest: a text is no value of its parameter.
        """
        values: dict[str, Any] = {}
        for name, text in texts.items():
            values[name] = read_text(name, self.readers[name], text)
        return values

    def configs(self) -> dict[str, RunConfig]:
        """Returns the config of its runs at each value of the sweep, by its name.

        Raises:
            BadRequest: a run does not accept its flags.
        """
        return {
            name: at(self.config, self.read(texts))
            for name, texts in self.points.items()
        }

    def decisive_trials(self) -> Iterator[dict[str, str]]:
        """Yields values by flag; if any trial is invalid, one of these is."""
        return combinations([x._replace(values=x.decisive) for x in self.tuned])


def read_text(name: str, read: Callable[[str], Any], text: str) -> Any:
    """Reads the value of a parameter.

    Raises:
        BadRequest: the text is no value of it.
    """
    try:
        return read(text)
    except ArgumentTypeError as error:
        raise BadRequest(f"argument {flag_name(name)}: {error}") from None


def at(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Returns a config with other values, by parameter.

    Args:
        config: a config that has the parameters.
        values: values of its fields, or of the flags of its algorithm and its task.

    Raises:
        BadRequest: they do not fit.
    """
    fields: dict[str, Any] = {}
    arguments = dict(config.arguments)
    task_arguments = dict(config.task_arguments)
    for name, value in values.items():
        if name in arguments:
            arguments[name] = value
        elif name in task_arguments:
            task_arguments[name] = value
        else:
            fields[name] = value
    with refusing():
        return replace(
            config, **fields, arguments=arguments, task_arguments=task_arguments
        )


def count_trials(tuned: Sequence[Axis]) -> int:
    """Returns the number of trials at a point; an optimum at an end adds some."""
    if not tuned:
        return 0
    num_values = math.prod(len(axis.values) for axis in tuned)
    return num_values + sum(axis.near for axis in tuned)


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yields every combination of values by flag; none without axes."""
    if not axes:
        return
    flags = [axis.flag for axis in axes]
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip(flags, values, strict=True))


def format_values(values: Mapping[str, str]) -> str:
    """Returns values by flag as a name, such as "lr=0.1,period=4"; "" for none."""
    return ",".join(f"{flag}={value}" for flag, value in values.items())


def variant_name(label: str, point: str) -> str:
    """Returns a label and the value of a sweep, if there is one."""
    return f"{label} at {point}" if point else label
