"""Values of a report as text: numbers with their units, times, names and lists."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from experiments.command import terminal
from experiments.command.terminal import MISSING, duration, format_bytes, three_digits
from experiments.study.results import Curve, Report, Row
from experiments.study.runs import Tuning
from experiments.study.statistics import Difference, Measure, Spread

Item = TypeVar("Item")
Key = TypeVar("Key")

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
BANDWIDTHS = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))
MAX_LABELS = 8  # in a sentence; the table has all


def group_items(
    items: Iterable[Item], key: Callable[[Item], Key]
) -> dict[Key, list[Item]]:
    """Returns items by their keys, in the order of the first item of each."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# Values of a measure.


def format_value(x: float, measure: Measure, smallest: float = 0.01) -> str:
    """Returns a value of the measure, scaled, without its unit."""
    if measure.scale == 100:
        return f"{100 * x:.2f}"
    # A function's loss falls by many powers of ten.
    return f"{x:.2e}" if 0 < abs(x) < smallest else f"{x:.4f}"


def add_unit(text: str, measure: Measure) -> str:
    """Returns the text and its unit, if the measure has one."""
    return f"{text} {measure.unit}".rstrip()


def format_result(row: Row, measure: Measure) -> str:
    """Returns the measure at the end, or why there is none."""
    if row.result is not None:
        return format_spread(row.result, measure)
    return "all diverged" if row.diverged == row.seeds else "undefined"


def format_spread(spread: Spread, measure: Measure) -> str:
    """Returns "97.24 ± 0.12 %"; the mean alone for one seed."""
    text = format_value(spread.mean, measure)
    if spread.deviation is not None:  # in the form of the mean
        smallest = 0.01 if abs(spread.mean) < 0.01 else 1e-4
        text += f" ± {format_value(spread.deviation, measure, smallest)}"
    return add_unit(text, measure)


def format_range(rows: Sequence[Row], measure: Measure) -> str:
    """Returns the lowest and the highest mean: "96.6 to 98.1 %"."""
    means = [row.result.mean for row in rows if row.result]
    lowest = format_value(min(means), measure)
    highest = format_value(max(means), measure)
    if lowest == highest:
        return add_unit(lowest, measure)
    return add_unit(f"{lowest} to {highest}", measure)


def format_target(report: Report) -> str:
    """Returns the target, rounded, with its unit; "" without one."""
    if report.target is None:
        return ""
    rounded = float(format_value(report.target, report.measure))
    return add_unit(format_number(rounded), report.measure)


def format_difference(
    difference: Difference, measure: Measure, side: float
) -> tuple[str, str]:
    """Returns a mean with its unit and its interval: "0.80 points", "[0.50, 1.10]".

    Args:
        difference: the difference; the interval is "" if it has none.
        measure: the measure.
        side: a number; the figures are multiplied by its sign.
    """
    scale = measure.scale if side > 0 else -measure.scale
    mean = scale * difference.mean
    decimals = count_decimals(mean)
    interval = ""
    if difference.low is not None and difference.high is not None:
        low, high = sorted((scale * difference.low, scale * difference.high))
        interval = format_interval(low, high)
        decimals = count_decimals((high - low) / 2)
        if abs(mean) <= 0.01 / 10**decimals:
            mean = 0.0
    amount = f"{format_decimals(mean, decimals)} {measure.difference_unit}".rstrip()
    return amount, interval


def format_interval(low: float, high: float) -> str:
    """Returns "[0.50, 1.10]", with two digits of half its width."""
    decimals = count_decimals((high - low) / 2)
    return f"[{format_decimals(low, decimals)}, {format_decimals(high, decimals)}]"


def count_decimals(x: float) -> int:
    """Returns the number of decimals that shows two digits of a value."""
    exponent = int(f"{x:.1e}".split("e")[1])
    return max(0, 1 - exponent)


def format_decimals(x: float, decimals: int) -> str:
    """Returns a value with a number of decimals."""
    if x == 0:
        return "0"
    text = f"{x:.{decimals}f}"
    # Neither 0.0 for a value that is not 0, nor a row of zeros for a huge one.
    if float(text) == 0:
        return f"{x:.1g}"
    return text if len(text) <= 12 else f"{x:.6g}"


# Other numbers.


def format_number(x: float) -> str:
    """Returns a number for an axis or a setting: 0.01, 20,000 or 10⁻⁶."""
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return f"{x:,.6g}"
    mantissa, e, exponent = f"{x:.3g}".partition("e")
    if not e:
        return mantissa
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def format_factor(ratio: float) -> str:
    """Returns a ratio in words: "8 times" or "2.5 times"."""
    return f"{format_number(float(f'{ratio:.2g}'))} times"


def format_share(share: float) -> str:
    """Returns a fraction in words, such as "1/16" or "37 %"."""
    divisor = round(1 / share)
    if divisor >= 2 and abs(1 / share - divisor) <= 0.01 * divisor:
        return f"1/{divisor:,}"
    if divisor >= 10:
        return f"about 1/{divisor:,}"
    # Less is not all.
    return "over 99 %" if share > 0.99 else f"{100 * share:.0f} %"


def format_bandwidth(bytes_per_second: float) -> str:
    """Returns a bandwidth in bits per second: 10 Gbit/s."""
    bits = 8 * bytes_per_second
    for unit, unit_bits in BANDWIDTHS:
        if bits >= unit_bits:
            return f"{three_digits(bits / unit_bits)} {unit}"
    unit, unit_bits = BANDWIDTHS[-1]
    return f"{three_digits(bits / unit_bits)} {unit}"


def format_count(count: int, noun: str) -> str:
    """Returns "1 seed" or "5 seeds"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# Cells of a row.


def format_rate(row: Row) -> str:
    """Returns the learning rate, marked if it is at an end of the range tried."""
    rate = terminal.rate(row.lr)
    return f"{rate} (edge)" if row.has_edge_rate else rate


def format_sent_bytes(row: Row) -> str:
    """Returns the most bytes that a worker sent."""
    if row.bytes_per_worker is not None:
        return format_bytes(row.bytes_per_worker)
    return MISSING if row.result is None else "not counted"


def format_syncs(row: Row) -> str:
    """Returns the number of syncs; "" if they could not be counted."""
    return "" if row.syncs is None else f"in {format_count(row.syncs, 'sync')}"


def format_time_to_target(row: Row, network: str) -> str:
    """Returns the time to the target, if it could be modelled."""
    if network not in row.to_target:
        return MISSING
    seconds = row.to_target[network]
    return f"not in {row.steps:,} steps" if seconds is None else duration(seconds)


def format_steps_to_target(row: Row) -> str:
    """Returns the local steps to the target."""
    if row.result is None:
        return MISSING
    if row.steps_to_target is None:
        return f"not in {row.steps:,} steps"
    return f"{row.steps_to_target:,}"


# Names.


def format_name(record: Row | Curve | Tuning) -> str:
    """Returns a variant and its point of the sweep, if there is one."""
    if not record.point:
        return record.label
    return f"{record.label} ({format_point(record.point)})"


def format_point(point: str) -> str:
    """Returns a point of a sweep: "workers 4" for "workers=4"."""
    return point.replace("=", " ", 1)


def join_words(words: Sequence[str]) -> str:
    """Returns words joined as in a sentence: "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def capitalize_first(text: str) -> str:
    """Returns the text with a capital letter, and all others as they are."""
    return text[:1].upper() + text[1:]
