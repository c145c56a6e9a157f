"""Values of a flag: those of a sweep, and those to tune over."""

import math
import re
from typing import NamedTuple

from experiments.cli.errors import BadRequest

Words = tuple[str, ...]
MOST_RUNS = 10_000  # of a study, and so values of a range


class Range(NamedTuple):
    """The values of a flag, to sweep or to tune over.

    Attributes:
        flag: without dashes, with underscores.
        values: as they are written on a command line.
        bounds: (low, high, whether logarithmic), where it was given so; None for a
            list.
    """

    flag: str
    values: Words
    bounds: tuple[float, float, bool] | None = None

    @property
    def telling(self) -> Words:
        """The values of which one is refused if any is.

        Between two numbers that a flag can be lies none that it cannot be, unless they
        are whole: those may have to divide something.
        """
        if self.bounds is None or _are_whole(*self.bounds[:2]):
            return self.values
        return self.values[0], self.values[-1]

    def refined(self, factor: int) -> "Range":
        """Over the same bounds with so many times the values; a list stays."""
        if self.bounds is None or factor == 1:
            return self
        values = spaced(*self.bounds, len(self.values) * factor)
        return self._replace(values=values)


def values(flag: str, text: str) -> Range:
    """Reads "lr=0.01:1.0:log:7", "lr=0.1:0.5:linear:5" or "workers=1,2,4,8".

    Args:
        flag: --tune or --sweep, for errors.
        text: what follows it.

    Raises:
        BadRequest: no values, in one line.
    """
    name, equals, listed = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not (equals and name and listed.strip()):
        raise BadRequest(
            f"{flag} {text!r}: needs a flag and its values, such as lr=0.01:1:log:7 or "
            "period=4,16,64"
        )
    if re.search(r"^[\s+\-.\deE]+:|:(log|linear):", listed):  # not dirichlet:0.1
        bounds, count = _bounds(flag, text, listed)
        found = spaced(*bounds, count)
        if len(found) < count:
            raise BadRequest(
                f"{flag} {text!r}: there are not {count} such whole numbers; ends with "
                "a point, such as 1.0, give others"
            )
        return Range(name, found, bounds)
    found = tuple(value.strip() for value in listed.split(","))
    if not all(found) or len(set(map(_value, found))) < len(found):
        raise BadRequest(f"{flag} {text!r}: values must differ, and none be empty")
    return Range(name, found)


def _are_whole(low: float, high: float) -> bool:
    """Whether both ends are written as whole numbers: then all values are."""
    return isinstance(low, int) and isinstance(high, int)


def _number(text: str) -> float:
    """An int where it is written as one."""
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else float(text)


def _value(text: str) -> float | str:
    """What tells two values apart: 0.1 and 0.10 are one."""
    try:
        return float(text)
    except ValueError:
        return text


def _bounds(flag: str, text: str, listed: str) -> tuple[tuple[float, float, bool], int]:
    parts = listed.split(":")
    form = f"{flag} {text!r}: a range is LOW:HIGH:log:COUNT or LOW:HIGH:linear:COUNT"
    try:
        low, high, count = _number(parts[0]), _number(parts[1]), int(parts[3])
    except (IndexError, ValueError):
        raise BadRequest(form) from None
    if len(parts) != 4 or parts[2] not in ("log", "linear"):
        raise BadRequest(form)
    logarithmic = parts[2] == "log"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadRequest(f"{flag} {text!r}: {parts[0]} must be below {parts[1]}")
    if logarithmic and low <= 0:
        raise BadRequest(f"{flag} {text!r}: a logarithmic range begins above 0")
    if count < 2:
        raise BadRequest(f"{flag} {text!r}: a range has at least 2 values, got {count}")
    if count > MOST_RUNS:
        raise BadRequest(
            f"{flag} {text!r}: {count:,} values are too many: a study makes at most "
            f"{MOST_RUNS:,} runs"
        )
    return (low, high, logarithmic), count


def spaced(low: float, high: float, logarithmic: bool, count: int) -> Words:
    """Evenly spaced values, of three digits or as many as tell them apart.

    Between ints they are whole, and fewer than asked for where some would be
    the same.
    """
    ends = (math.log(low), math.log(high)) if logarithmic else (low, high)
    steps = [ends[0] + (ends[1] - ends[0]) * i / (count - 1) for i in range(count)]
    found = [math.exp(x) if logarithmic else x for x in steps]
    if _are_whole(low, high):
        return tuple(dict.fromkeys(f"{x:.0f}" for x in found))
    writings = (tuple(f"{x:.{digits}g}" for x in found) for digits in range(3, 17))
    return next((w for w in writings if len(set(w)) == count), ())


def as_words(values: dict[str, str]) -> list[str]:
    """Values by flag as a command line has them."""
    words = []
    for flag, value in values.items():
        name = flag.replace("_", "-")
        switch = {"true": f"--{name}", "false": f"--no-{name}"}.get(value.lower())
        words += [f"--{name}", value] if switch is None else [switch]
    return words
