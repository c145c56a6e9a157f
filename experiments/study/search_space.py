"""The values of a flag to sweep or tune over, and their combinations."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from experiments.cli.errors import BadRequest
from experiments.cli.words import Words, as_words, literal

# The largest number of runs of a study, and so of values in a range.
MOST_RUNS = 10_000


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

    @property
    def points(self) -> dict[str, Words]:
        """The flags of each value, by the value's name such as "workers=4"."""
        each = [{self.flag: value} for value in self.values]
        return {named(x): tuple(as_words(x)) for x in each}

    def refined(self, factor: int) -> "Range":
        """Returns a range with `factor` times as many values; lists do not change."""
        if self.bounds is None or factor == 1:
            return self
        values = spaced(*self.bounds, len(self.values) * factor)
        return self._replace(values=values)


def read(flag: str, text: str) -> Range:
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
    if first.others and {(x.bounds, len(x.values)) for x in found} != {
        (None, len(first.values))
    }:
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


def _number(text: str) -> float:
    """Reads a number; an int where it is written as one."""
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else float(text)


def _bounds(shown: str, listed: str) -> tuple[tuple[float, float, bool], int]:
    """Reads the ends, the spacing and the number of values of a range."""
    parts = listed.split(":")
    form = f"{shown}: a range must be LOW:HIGH:log:COUNT or LOW:HIGH:linear:COUNT"
    try:
        low, high, count = _number(parts[0]), _number(parts[1]), int(parts[3])
    except (IndexError, ValueError):
        raise BadRequest(form) from None
    if len(parts) != 4 or parts[2] not in ("log", "linear"):
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
