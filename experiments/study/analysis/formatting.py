"""Values of a report in words: measures, bytes, seconds."""

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from experiments.cli.terminal import MISSING, duration, rate, size, three_digits
from experiments.study.analysis.results import Report, Row
from experiments.study.statistics import Measure, Spread

PHRASES = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("utf-8"))
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class AtPoint(Protocol):
    """A record about one variant at one value of the sweep."""

    @property
    def label(self) -> str: ...
    @property
    def point(self) -> str: ...


def say(phrase: str, **values: Any) -> str:
    """Returns a phrase of phrases.toml, filled in."""
    return PHRASES[phrase].format(**values)


def counted(seeds: int) -> str:
    """Returns "one seed" or "5 seeds"."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def known(x: float | None) -> bool:
    """Whether there is a value to show."""
    return x is not None and math.isfinite(x)


def is_known(row: Row) -> bool:
    """Whether a row has a mean to draw."""
    return row.measure is not None and known(row.measure.mean)


def shown(x: float, measure: Measure) -> str:
    """Returns a value of the measure, scaled, without its unit."""
    places = 2 if measure.scale == 100 else 4
    # A function's loss falls by many powers of ten.
    if measure.scale == 1 and 0 < abs(x) < 0.01:
        return f"{x:.2e}"
    return f"{x * measure.scale:.{places}f}"


def spread(value: Spread | None, measure: Measure) -> str:
    """Returns "97.24 ± 0.12 %"; the mean alone for one seed."""
    if value is None or not known(value.mean):
        return MISSING
    text = shown(value.mean, measure)
    if value.deviation is not None:
        text += f" ± {shown(value.deviation, measure)}"
    return with_unit(text, measure)


def around(mean: float, deviation: float, unit: str) -> str:
    """Returns "97.2 ± 1.3 %", two digits of the deviation; only the mean if it is 0."""
    text = f"{mean:.4g}"
    if deviation > 0:
        places = places_of(deviation)
        text = f"{fixed(mean, places)} ± {fixed(deviation, places)}"
    return f"{text} {unit}".rstrip()


def places_of(x: float) -> int:
    """Returns the number of decimals that shows two digits of a value."""
    return max(0, 1 - int(f"{x:.1e}".split("e")[1]))


def fixed(x: float, places: int) -> str:
    """Returns a value with `places` decimals, never 0.0 for a value that is not 0."""
    text = f"{x:.{places}f}"
    # Neither 0.0 for a value that is not 0, nor a row of zeros for a huge one.
    if x and (float(text) == 0 or len(text) > 12):
        return f"{x:.1g}" if float(text) == 0 else f"{x:.6g}"
    return text if x else "0"


def with_unit(text: str, measure: Measure) -> str:
    """Returns the text and its unit, if the measure has one."""
    return f"{text} {measure.unit}".rstrip()


def nominal(row: Row) -> str:
    """Returns the learning rate, marked if it is at an end of the range tried."""
    return rate(row.lr) + " (edge)" * ("lr" in row.at_edge)


def ends(rows: Sequence[Row], by: Measure) -> str:
    """Returns the lowest and the highest mean: "96.6 to 98.1 %"."""
    means = [row.measure.mean for row in rows if row.measure]
    limits = dict.fromkeys(shown(x, by) for x in (min(means), max(means)))
    return with_unit(" to ".join(limits), by)


def diverged(row: Row) -> str:
    """Returns a sentence that says how many runs diverged."""
    return f"{row.name} diverged in {row.diverged} of {row.seeds} runs."


def sent(row: Row) -> str:
    """Returns the most bytes that a worker sent."""
    if row.bytes_per_worker is None:
        return MISSING if row.measure is None else "not counted"
    return size(row.bytes_per_worker)


def syncs(row: Row) -> str:
    """Returns the number of syncs; "" if they could not be counted."""
    if row.syncs is None:
        return ""
    return f"in {row.syncs:,} sync{'' if row.syncs == 1 else 's'}"


def number(x: Any) -> str:
    """Returns a number for an axis or a setting: 0.01, 20,000 or 10⁻⁶."""
    if not isinstance(x, int | float) or isinstance(x, bool):
        return str(x)
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return f"{x:,.6g}"
    mantissa, e, exponent = f"{x:.3g}".partition("e")
    if not e:
        return mantissa
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def speed(bytes_per_second: float) -> str:
    """Returns a bandwidth in bits per second: 10 Gbit/s."""
    bits = 8 * bytes_per_second
    for unit, unit_size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= unit_size:
            return f"{three_digits(bits / unit_size)} {unit}"
    return f"{three_digits(bits / 1e3)} kbit/s"


def sentence(text: str) -> str:
    """Returns the text with a capital letter."""
    return text[:1].upper() + text[1:]


def point_text(point: str) -> str:
    """Returns a point of a sweep: "workers 4" for "workers=4"."""
    return point.replace("=", " ", 1)


def named(one: AtPoint) -> str:
    """Returns a variant and its point of the sweep, if there is one."""
    return f"{one.label} ({point_text(one.point)})" if one.point else one.label


def until(row: Row, network: str) -> str:
    """Returns the time to the target, if it could be modelled."""
    if network not in row.to_target:
        return MISSING
    reached = row.to_target[network]
    return not_in(row) if reached is None else duration(reached)


def until_step(row: Row) -> str:
    """Returns the local steps to the target."""
    if row.measure is None:
        return MISSING
    reached = row.steps_to_target
    return not_in(row) if reached is None else f"{reached:,}"


def not_in(row: Row) -> str:
    """Returns words for a target that was not reached."""
    return f"not in {row.steps:,} steps"


def against(report: Report) -> str:
    """Returns the heading of the differences: the baseline, and unfair terms."""
    terms = f", {report.terms}" if report.terms else ""
    return f"against {report.baseline}{terms}"


def target(report: Report) -> str:
    """Returns the target, rounded, with its unit."""
    if report.target is None:
        return MISSING
    return with_unit(
        number(float(shown(report.target, report.measure))), report.measure
    )
