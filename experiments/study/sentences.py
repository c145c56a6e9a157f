"""Sentences of a report: values, comparisons, the answer, and warnings to a reader."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.command import terminal
from experiments.command.terminal import MISSING, duration, size, three_digits
from experiments.command.words import flag_of
from experiments.study import results, statistics
from experiments.study.config import TUNE_SHARE, StudyConfig
from experiments.study.results import ONE_NOMINAL, Comparison, Ranking, Report, Row
from experiments.study.runs import RunSet, Tuning
from experiments.study.statistics import MIN_SEEDS, Difference, Measure, Spread

X = TypeVar("X")
K = TypeVar("K")

PHRASES = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("utf-8"))
FINDINGS = PHRASES["standing"]
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SPEEDS = ("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)
MOST_NAMED = 8  # labels in a sentence; the table has all


def grouped(each: Iterable[X], key: Callable[[X], K]) -> dict[K, list[X]]:
    """Returns things by their keys, in the order of the first of each."""
    found: dict[K, list[X]] = {}
    for x in each:
        found.setdefault(key(x), []).append(x)
    return found


def say(phrase: str, **values: Any) -> str:
    """Returns a phrase of phrases.toml, filled in."""
    return PHRASES[phrase].format(**values)


def plural(count: int, noun: str) -> str:
    """Returns "1 seed" or "5 seeds"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counted(seeds: int) -> str:
    """Returns "one seed" or "5 seeds"."""
    return "one seed" if seeds == 1 else plural(seeds, "seed")


def shown(x: float, measure: Measure, least: float = 0.01) -> str:
    """Returns a value of the measure, scaled, without its unit."""
    if measure.scale == 100:
        return f"{100 * x:.2f}"
    # A function's loss falls by many powers of ten.
    return f"{x:.2e}" if 0 < abs(x) < least else f"{x:.4f}"


def with_unit(text: str, measure: Measure) -> str:
    """Returns the text and its unit, if the measure has one."""
    return f"{text} {measure.unit}".rstrip()


def spread(value: Spread | None, measure: Measure) -> str:
    """Returns "97.24 ± 0.12 %"; the mean alone for one seed."""
    if value is None:
        return MISSING
    text = shown(value.mean, measure)
    if value.deviation is not None:  # in the form of the mean
        least = 0.01 if abs(value.mean) < 0.01 else 1e-4
        text += f" ± {shown(value.deviation, measure, least)}"
    return with_unit(text, measure)


def places_of(x: float) -> int:
    """Returns the number of decimals that shows two digits of a value."""
    return max(0, 1 - int(f"{x:.1e}".split("e")[1]))


def fixed(x: float, places: int) -> str:
    """Returns a value with `places` decimals."""
    if x == 0:
        return "0"
    text = f"{x:.{places}f}"
    # Neither 0.0 for a value that is not 0, nor a row of zeros for a huge one.
    if float(text) == 0:
        return f"{x:.1g}"
    return text if len(text) <= 12 else f"{x:.6g}"


def nominal(row: Row) -> str:
    """Returns the learning rate, marked if it is at an end of the range tried."""
    rate = terminal.rate(row.lr)
    return f"{rate} (edge)" if "lr" in row.at_edge else rate


def ends(rows: Sequence[Row], by: Measure) -> str:
    """Returns the lowest and the highest mean: "96.6 to 98.1 %"."""
    means = [row.measure.mean for row in rows if row.measure]
    limits = dict.fromkeys(shown(x, by) for x in (min(means), max(means)))
    return with_unit(" to ".join(limits), by)


def lost(row: Row) -> str:
    """Returns how many runs have no result, and why; "" if all have one."""
    undefined = row.seeds - row.diverged - (row.measure.count if row.measure else 0)
    why = {"diverged": row.diverged, "ended with an undefined result": undefined}
    return listed([f"{n} of its {row.seeds} runs {x}" for x, n in why.items() if n > 0])


def sent(row: Row) -> str:
    """Returns the most bytes that a worker sent."""
    if row.bytes_per_worker is None:
        return MISSING if row.measure is None else "not counted"
    return size(row.bytes_per_worker)


def syncs(row: Row) -> str:
    """Returns the number of syncs; "" if they could not be counted."""
    return "" if row.syncs is None else f"in {plural(row.syncs, 'sync')}"


def number(x: float) -> str:
    """Returns a number for an axis or a setting: 0.01, 20,000 or 10⁻⁶."""
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return f"{x:,.6g}"
    mantissa, e, exponent = f"{x:.3g}".partition("e")
    if not e:
        return mantissa
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def factor(times: float) -> str:
    """Returns a ratio in words: "8 times" or "2.5 times"."""
    return f"{number(float(f'{times:.2g}'))} times"


def share(part: float) -> str:
    """Returns a fraction in words, such as "1/16" or "37 %"."""
    whole = round(1 / part)
    if whole >= 2 and abs(1 / part - whole) <= 0.01 * whole:
        return f"1/{whole:,}"
    return f"about 1/{whole:,}" if whole >= 10 else f"{100 * part:.0f} %"


def speed(bytes_per_second: float) -> str:
    """Returns a bandwidth in bits per second: 10 Gbit/s."""
    bits = 8 * bytes_per_second
    unit, length = next((x for x in SPEEDS if bits >= x[1]), SPEEDS[-1])
    return f"{three_digits(bits / length)} {unit}"


def sentence(text: str) -> str:
    """Returns the text with a capital letter."""
    return text[:1].upper() + text[1:]


def listed(labels: Sequence[str]) -> str:
    """Returns names joined as in a sentence: "a, b and c"."""
    return " and ".join([x for x in (", ".join(labels[:-1]), *labels[-1:]) if x])


def titled(labels: Sequence[str], task: str) -> str:
    """Returns the title of a comparison, such as "sync_sgd and bmuf on digits"."""
    many = len(labels) > MOST_NAMED
    return f"{f'{len(labels)} algorithms' if many else listed(labels)} on {task}"


def point_text(point: str) -> str:
    """Returns a point of a sweep: "workers 4" for "workers=4"."""
    return point.replace("=", " ", 1)


def named(one: Row | results.Curve | Tuning) -> str:
    """Returns a variant and its point of the sweep, if there is one."""
    return f"{one.label} ({point_text(one.point)})" if one.point else one.label


def until(row: Row, network: str) -> str:
    """Returns the time to the target, if it could be modelled."""
    if network not in row.to_target:
        return MISSING
    reached = row.to_target[network]
    return f"not in {row.steps:,} steps" if reached is None else duration(reached)


def until_step(row: Row) -> str:
    """Returns the local steps to the target."""
    if row.measure is None:
        return MISSING
    reached = row.steps_to_target
    return f"not in {row.steps:,} steps" if reached is None else f"{reached:,}"


def against(report: Report) -> str:
    """Returns the heading of the differences: the baseline, and unfair terms."""
    terms = f", {report.terms}" if report.terms else ""
    return f"against {report.baseline}{terms}"


def target(report: Report) -> str:
    """Returns the target, rounded, with its unit; "" without one."""
    if report.target is None:
        return ""
    rounded = float(shown(report.target, report.measure))
    return with_unit(number(rounded), report.measure)


def in_words(
    difference: Difference | None, by: Measure, count: int = 1, named: bool = True
) -> Comparison:
    """Returns a difference with its verdict and its words.

    Args:
        difference: the difference, from `paired`, at 95 %.
        by: the measure of the difference.
        count: number of comparisons that its p-value is corrected for.
        named: whether a winner is named. If not, "above" and "below" take the place of
            "better" and "worse".
    """
    if difference is None:
        return Comparison("nothing to compare: no seed in common", kind="few")
    kind = kind_of(difference, by)
    seeds = difference.count
    mean = difference.mean
    is_equal = mean == 0 and not difference.deviation
    is_seen = mean != 0 and kind not in ("unseen", "doubtful")
    if is_equal:
        verdict = "equal"
    elif kind == "doubtful":
        verdict = "no difference seen after correction"
    elif not is_seen:
        verdict = "no difference seen"
    elif not named:
        verdict = "above" if mean > 0 else "below"
    elif kind == "few":
        verdict = "ahead" if by.side * mean > 0 else "behind"
    else:
        verdict = kind
    # If no difference is seen, the interval is of this row minus the other.
    amount, basis = figures(difference, by, mean if is_seen else 1)
    note = f" ({seeds} seeds, 95 % interval)"
    if is_equal or kind == "few":
        if is_equal:
            note = ""
        elif seeds < MIN_SEEDS:
            note = ": too few for an interval"
        else:
            note = ": equal differences have no interval"
        if not difference.same_sign and is_seen:
            basis = f"in the mean of {seeds} seeds (not in all)"
        elif not difference.same_sign:
            basis = f"in the mean of {seeds} seeds"
        elif seeds == 1:
            basis = "on one seed"
        elif seeds == 2:
            basis = "in both seeds"
        else:
            basis = f"in all {seeds} seeds"
    if is_equal or (not is_seen and kind == "few"):
        amount = ""
    return Comparison(verdict, kind, difference, count, amount, basis, note)


def kind_of(difference: Difference | None, by: Measure) -> str:
    """Returns the kind of a comparison: few, unseen, doubtful, better or worse."""
    if difference is None or difference.low is None or difference.high is None:
        return "few"
    if difference.low <= 0 <= difference.high:
        return "unseen"
    if difference.p is not None and difference.p >= statistics.LEVEL:
        return "doubtful"
    return "better" if by.side * difference.mean > 0 else "worse"


def figures(difference: Difference, by: Measure, side: float) -> tuple[str, str]:
    """Returns a mean with its unit and its interval: "0.80 points", "[0.50, 1.10]".

    Args:
        difference: the difference.
        by: the measure.
        side: a number; the figures are multiplied by its sign.
    """
    scale = by.scale if side > 0 else -by.scale
    mean = scale * difference.mean
    low = difference.low
    high = difference.high
    places = places_of(mean)
    ends = ""
    if low is not None and high is not None:
        ends, places = interval(*sorted((scale * low, scale * high)))
        mean = mean if abs(mean) > 0.01 / 10**places else 0.0
    return f"{fixed(mean, places)} {by.difference_unit}".rstrip(), ends


def interval(low: float, high: float) -> tuple[str, int]:
    """Returns "[0.50, 1.10]" and its decimals: finer ones mean nothing."""
    places = places_of((high - low) / 2)
    return f"[{fixed(low, places)}, {fixed(high, places)}]", places


def lead(report: Report) -> str:
    """Returns the answer in one line."""
    if report.terms == ONE_NOMINAL:
        return "No winner at one nominal learning rate"
    first = next(iter(report.points.values()))
    by = report.measure
    text = _line(first, by) if len(report.points) == 1 else _swept(report.points, by)
    return f"{sentence(report.terms)}: {text}" if report.terms else text


def _line(ranking: Ranking, by: Measure) -> str:
    """Returns the line about the best of these rows, and how certain it is."""
    top = ranking.top
    kinds = ranking.kinds
    others = len(ranking.rows) - 1
    if top is None:
        return "No run has a result"
    if len(kinds["lost"]) == others:
        return f"{top.label}: there is nothing to compare it to"
    ties = results.leaders(ranking.rows, by)
    labels = _labels(ties)
    leads = f"{labels} leads" if len(ties) == 1 else f"{labels} lead"
    has_best = f"{labels} has the best" if len(ties) == 1 else f"{labels} have the best"
    # All comparisons are paired: if one has too few seeds, the line must say so.
    if kinds["few"]:
        seeds = min(len(top.final.keys() & row.final.keys()) for row in kinds["few"])
        if seeds >= MIN_SEEDS:
            return f"{leads}, but equal differences show nothing about chance"
        if seeds == 1:
            return f"{leads}, but one seed is too few to tell"
        return f"{leads}, but {seeds} seeds are too few to tell"
    if lost(top):
        runs_text = lost(top) if len(ties) == 1 else f"of {top.label}, {lost(top)}"
        return f"{leads}, but {runs_text}"
    alike = [*kinds["doubtful"], *kinds["unseen"]]
    if alike and len(alike) == others:
        return _unseen(top, alike, by)
    # Rows of equal means lead together, and are none of the others.
    others -= len(ties) - 1
    alike = [row for row in alike if row not in ties]
    if alike:
        them = "it" if len(ties) == 1 else "them"
        return (
            f"{leads}, but {len(alike)} of {others} others cannot be distinguished "
            f"from {them}"
        )
    if kinds["edge"]:
        return (
            f"{leads}, but {len(kinds['edge'])} of {others} others may be better "
            "outside the range tried"
        )
    if kinds["better"]:
        return f"{has_best} {by.name} in the mean alone"
    return f"{has_best} {by.name}"


def _unseen(top: Row, alike: Sequence[Row], by: Measure) -> str:
    """Returns the line where no row can be distinguished from the best."""
    apart = [row for row in alike if row.final != top.final]
    second = results.leader(apart or alike, by) or top
    difference = statistics.paired(top.final, second.final)
    if not apart and len(alike) > 1:
        return f"No difference: {_labels([top, *alike])} are equal in all seeds"
    if not apart or difference is None:
        return f"No difference: {top.label} equals {second.label} in all seeds"
    ties = results.leaders([top, *apart], by)
    if second in ties:
        return f"No difference seen: the means of {_labels(ties)} are equal"
    gap = " ".join(figures(difference, by, by.side))
    side = "above" if by.higher_is_better else "below"
    if kind_of(difference, by) == "better":
        return (
            f"No difference seen after correction: the mean of {top.label} is {gap} "
            f"{side} that of {second.label}"
        )
    return (
        f"No difference seen: the mean of {top.label} is {gap} {side} that of "
        f"{second.label}"
    )


def _swept(points: Mapping[str, Ranking], by: Measure) -> str:
    """Returns the best variants, and at how many values of a sweep each is best."""
    sweep = next(iter(points)).partition("=")[0]
    ties_by_point = [results.leaders(x.rows, by) for x in points.values()]
    tops = [row for ties in ties_by_point for row in ties]
    if not tops:
        return "No run has a result"
    counts = Counter(top.label for top in tops).most_common()
    notes = ""
    if any(lost(top) for top in tops):
        notes = "; some of these runs have no result"
    everywhere = [label for label, count in counts if count == len(points)]
    if len(everywhere) == 1 and len(counts) == 1:
        return (
            f"{everywhere[0]} has the best mean {by.name} at every value of "
            f"{sweep}{notes}"
        )
    if len(everywhere) == len(counts):
        return (
            f"{listed(everywhere)} have the best mean {by.name}, equal, at every value "
            f"of {sweep}{notes}"
        )
    if len(tops) > len(points):
        notes += "; equal best means count for each"
    counts_text = ", ".join(f"{label} at {count}" for label, count in counts)
    return (
        f"Best mean {by.name}: {counts_text} of {len(points)} values of {sweep}{notes}"
    )


def answer(report: Report) -> str:
    """Returns the answer in sentences; for each value of a sweep, if there is one."""
    terms = report.terms
    is_ranked = terms != ONE_NOMINAL
    lines = [] if is_ranked else [say("nameless", times=factor(report.times))]
    for point, ranking in report.points.items():
        text = headline(ranking, report.measure, is_ranked)
        text = f"{terms}, {text}" if terms and is_ranked else text
        # A label at the start of a sentence gets no capital letter.
        text = sentence(text) if terms and not point else text
        lines.append(f"{point}: {text}" if point else text)
    return "\n".join(lines)


def headline(ranking: Ranking, by: Measure, is_ranked: bool = True) -> str:
    """Returns the best row, how certain that is, and its cost, in two sentences.

    Args:
        ranking: one row or more.
        by: the measure.
        is_ranked: whether a winner is named; otherwise only the range of means is.

    The cost is the smallest number of bytes sent by the best row and by those that
    cannot be distinguished from it, whether by chance or because of too few seeds.
    """
    rows, top, kinds, count = ranking
    if top is None or top.measure is None:
        return f"No run of {listed([row.label for row in rows])} has a result."
    if not is_ranked:
        fine = [row for row in rows if row.measure is not None]
        return f"the mean {by.name} is {ends(fine, by)}.{_spent(rows, fine)}"
    findings = [
        FINDINGS[kind].format(_several(kind_rows), count=count)
        for kind, kind_rows in kinds.items()
        if kind_rows
    ]
    standing = "; ".join(findings) or "there is nothing to compare it to"
    equal_rows = results.leaders(rows, by)[1:]
    tie_note = ""
    if len(equal_rows) == 1:
        tie_note = f", as has {_several(equal_rows)}"
    elif equal_rows:
        tie_note = f", as have {_several(equal_rows)}"
    return (
        f"{_several([top])} has the best mean {by.name}, {spread(top.measure, by)} "
        f"({counted(top.measure.count)}){tie_note}: "
        f"{standing}.{_spent(rows, ranking.best)}"
    )


def _several(rows: Sequence[Row]) -> str:
    """Returns labels with the number of lost runs; for many rows, their number."""
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} others"
    some = [f" ({lost(x)})" if lost(x) and x.measure else "" for x in rows]
    return listed([x.label + text for x, text in zip(rows, some, strict=True)])


def _labels(rows: Sequence[Row]) -> str:
    """Returns labels joined as in a sentence; for many rows, their number."""
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} algorithms"
    return listed([row.label for row in rows])


def _spent(rows: Sequence[Row], pool: Sequence[Row]) -> str:
    """Returns the cost of the pool as a sentence."""
    cost = cost_of(rows, pool)
    if cost is None:
        return ""
    cheapest_rows = [row for row in cost.cheapest_rows if row in pool]
    row = cheapest_rows[0]
    share_note = ""
    if cost.share_text:
        costliest_labels = _labels(cost.costliest_rows)
        share_note = f", {cost.share_text} of what {costliest_labels} sent"
        if len(cost.costliest_rows) > 1:
            share_note = f", {cost.share_text} of what {costliest_labels} each sent"
        # The number of syncs explains a share that is not round.
        has_one_count = len({each.syncs for each in cheapest_rows}) == 1
        if has_one_count and row.syncs and row.syncs < row.steps:
            share_note += f" ({row.syncs} syncs in {row.steps} steps)"
    labels = _labels(cheapest_rows)
    if len(pool) == 1:
        return f" It sent {sent(row)} per worker{share_note}."
    if len(cheapest_rows) == len(pool):
        return f" {labels} each sent {sent(row)} per worker{share_note}."
    if len(pool) < len(rows):
        # A row that is worse may have sent less.
        return (
            f" Of {_labels(pool)}, {labels} sent the least: {sent(row)} per "
            f"worker{share_note}."
        )
    return f" Of these, {labels} sent the least: {sent(row)} per worker{share_note}."


class Cost(NamedTuple):
    """The bytes that the cheapest row of a pool sent, beside those of all rows.

    Attributes:
        cheapest_rows: all rows, in the pool or not, that sent as little as the one of
            the pool that sent the least.
        costliest_rows: all rows that sent the most.
        share_text: the least as a fraction of the most, in words; "" if nothing is
            saved.
    """

    cheapest_rows: Sequence[Row]
    costliest_rows: Sequence[Row]
    share_text: str


def cost_of(rows: Sequence[Row], pool: Sequence[Row]) -> Cost | None:
    """Returns the cost of a pool of rows; None if no bytes of it are counted."""
    pool_bytes = []
    all_bytes = []
    for row in rows:
        if row.bytes_per_worker is not None:
            all_bytes.append(row.bytes_per_worker)
            if row in pool:
                pool_bytes.append(row.bytes_per_worker)
    if not pool_bytes:
        return None
    least_bytes = min(pool_bytes)
    most_bytes = max(all_bytes)
    share_text = ""
    if 0 < least_bytes < most_bytes:
        share_text = share(least_bytes / most_bytes)
    return Cost(
        [row for row in rows if row.bytes_per_worker == least_bytes],
        [row for row in rows if row.bytes_per_worker == most_bytes],
        share_text,
    )


def numbers(report: Report) -> list[tuple[str, str]]:
    """Returns up to three numbers beside the line: value and meaning."""
    rows = report.rows
    by = report.measure
    points = report.points
    top = report.top
    is_swept = len(points) > 1
    if top is None or top.measure is None:
        return []
    fine = [row for row in rows if row.measure]
    pool = rows if is_swept else next(iter(points.values())).best
    best_mean = with_unit(shown(top.measure.mean, by), by)
    found = [(best_mean, f"{by.name} of {_names_of(results.leaders(rows, by))}")]
    span = ends(fine, by), f"{by.name}, lowest and highest"
    if report.terms == ONE_NOMINAL:
        found = [span, (factor(report.times), "ratio of effective learning rates")]
        pool = rows if is_swept else fine
    elif is_swept:
        found.append(span)
    # If the baseline is best, the next best row shows the gap.
    elif pairs := [row for row in fine if row.comparison.difference]:
        best = results.leader(pairs, by) or top
        comparison = best.comparison
        is_seen = comparison.kind not in ("unseen", "doubtful")
        value = comparison.amount if is_seen and comparison.amount else "no difference"
        found.append(
            (
                value,
                f"{best.label} against {report.baseline}: {comparison.verdict} "
                f"{comparison.basis}",
            )
        )
    cost = cost_of(rows, pool)
    if cost is None:
        return found
    low = sent(cost.cheapest_rows[0])
    high = sent(cost.costliest_rows[0])
    if is_swept:
        both = " to ".join(dict.fromkeys((low, high)))
        return [*found, (both, "the most that a worker sent")]
    cheapest = _names_of(cost.cheapest_rows)
    costliest = _names_of(cost.costliest_rows)
    if cost.share_text:
        meaning = f"of what {costliest} sent: {cheapest}, {low}"
        return [*found, (cost.share_text, meaning)]
    return [*found, (low, f"the most that a worker of {cheapest} sent")]


def _names_of(rows: Sequence[Row]) -> str:
    """Returns rows with their points of the sweep; for many rows, their number."""
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} rows"
    return listed([named(row) for row in rows])


def laws(scores: Sequence[Tuning]) -> tuple[str, list[str]]:
    """Returns the best values of tuned flags against a swept one.

    Args:
        scores: the scores of the tuning.

    Returns:
        The first law in one line, such as "Best outer-lr: 0.8 at workers=2, 0.4 at
        workers=8"; and a sentence for each variant and tuned flag, such as "Best
        outer-lr of diloco: 0.8 at workers=2, 0.4 [0.4, 0.8] at workers=8." An interval
        is shown unless it holds only the value itself. Both are empty without a sweep.
    """
    known = [x for x in scores if x.point and any(y is not None for y in x.scores)]
    line = ""
    sentences = []
    for (label, flag), own in grouped(known, lambda x: (x.label, x.flag)).items():
        if len(own) > 1:
            values = ", ".join(f"{_best(x)} at {x.point}" for x in own)
            sentences.append(f"Best {flag} of {label}: {values}.")
            ends = [f"{number(x.chosen)} at {x.point}" for x in (own[0], own[-1])]
            line = line or f"Best {flag}: {', '.join(ends)}"
    return line, sentences


def _best(each: Tuning) -> str:
    """Returns the best value, and its interval unless it holds only that value."""
    if each.low is None or each.high is None or each.low == each.chosen == each.high:
        return number(each.chosen)
    return f"{number(each.chosen)} [{number(each.low)}, {number(each.high)}]"


def settings(config: StudyConfig, runs: Sequence[RunSet]) -> dict[str, str]:
    """Returns the settings of the runs; where they differ, those of each run set."""
    read = {r.config["task_arguments"].get("file") for r in runs}
    task = Path(*read).name if len(read) == 1 and all(read) else config.task
    shown = {"task": task, "seeds": f"0 to {config.seeds - 1}"}
    if config.tuned:
        shown["seeds of a trial"] = str(config.tune_seeds)
    given: dict[str, dict[str, Any]] = {}
    for r in runs:  # what differs between the points is swept or tuned
        own = r.config.get("arguments") or {}
        known = given.get(r.variant.label, own).items()
        given[r.variant.label] = {k: x for k, x in known if own.get(k) == x}
    if len(given) <= MOST_NAMED:
        words = {k: [f"{a} {b}" for a, b in x.items()] for k, x in given.items() if x}
        own = [f"{k}: {', '.join(each)}" for k, each in words.items()]
        shown |= {"arguments": "; ".join(own)} if own else {}
    swept = config.swept
    if swept:
        shown["swept"] = f"{swept.flag} over {', '.join(swept.values)}"
    each = [{"examples": _sizes(r), **_settings(r.config)} for r in runs]
    for name in dict.fromkeys(name for one in each for name in one):
        values = [str(one.get(name)) for one in each]
        # No run sets it, such as --clip-norm.
        if set(values) == {"None"}:
            continue
        pairs = (f"{r.name}: {x}" for r, x in zip(runs, values, strict=True))
        shown[name] = values[0] if len(set(values)) == 1 else "; ".join(pairs)
    return shown


def environment(runs: Sequence[RunSet]) -> dict[str, str]:
    """Returns the versions and machines of all runs, those that tune among them."""
    found: dict[str, dict[str, None]] = {}
    for r in [x for each in runs for x in (each, *each.trials)]:
        for s in r.summaries.values():
            # Runs of earlier versions do not say their processor.
            processor = f" ({s['processor']})" if "processor" in s else ""
            own = {"machine": f"{s['devices']} × {s['platform']}{processor}"}
            for name, x in {**s.get("versions", r.config["versions"]), **own}.items():
                found.setdefault(name, {})[x] = None
    return {name: listed([*each]) for name, each in found.items()}


def _sizes(r: RunSet) -> str | None:
    """Returns the sizes of the data sets; None for runs of earlier versions."""
    sizes = r.any.get("examples")
    if not sizes:
        return None
    found = [f"{sizes['train']:,} for training", f"{sizes['test']:,} for testing"]
    tried = [x for x in r.trials if x.summaries]
    if tried:
        held_out = tried[0].any["examples"]["test"]
        found.append(f"{held_out:,} training examples held out for tuning")
    return ", ".join(found)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings to show of a config.json; None for those without one."""
    names = PHRASES["settings"]
    own = config["settings"]
    return {
        # Runs of earlier versions lack some.
        **{name: own.get(key) for key, name in names.items()},
        names["sync_until"]: own["sync_until"] or None,
        "backend": config["backend"],
        "devices": f"{config['devices']} × {config['platform']}",
        "devices of a worker": terminal.mesh_text(config.get("mesh") or {}) or None,
        **{f"task: {k}": x for k, x in config["task_arguments"].items() if x != ""},
    }


def remarks(
    config: StudyConfig, runs: Sequence[RunSet], report: Report
) -> Iterator[str]:
    """Yields the warnings that a reader of the figures needs."""
    lost_rows = [row for row in report.rows if lost(row)]
    loss_lines = [f"{row.name}: {lost(row)}." for row in lost_rows]
    if any(row.measure for row in lost_rows):
        loss_lines[-1] += f" {say('others')}"
    yield from loss_lines
    if config.seeds < MIN_SEEDS:
        yield say("few_seeds", seeds=counted(config.seeds), enough=MIN_SEEDS)
    yield from _on_missing(config, runs)
    yield from _on_tuning(config, runs, report.tuning)
    yield from _on_examples(config, runs, report)
    settings = [r.config["settings"] for r in runs]
    # Shards follow from the seed and the number of workers.
    kinds = {s["partition"] for s in settings}
    if kinds != {"iid"}:
        yield say("partition", partition=", ".join(sorted(kinds)))
    sizes = {(r.point, r.config["settings"]["batch_size"]) for r in runs}
    if len(sizes) > len({r.point for r in runs}):
        yield say("batches")
    if report.measure not in (statistics.ACCURACY, statistics.LOSS):
        yield say("measure", measure=report.measure.name)
    yield from _on_sends(runs)
    retuned_line = retuned(report)
    if retuned_line:
        yield retuned_line


def retuned(report: Report) -> str:
    """Returns the intervals that include other tuning seeds; "" if there are none."""
    by = report.measure
    intervals = []
    for row in report.rows:
        if row.comparison.retuned:
            low, high = row.comparison.retuned
            text, _ = interval(by.scale * low, by.scale * high)
            intervals.append(f"{row.name} {text}")
    if not intervals:
        return ""
    return say(
        "retuned",
        baseline=report.baseline,
        unit=by.difference_unit or by.name,
        intervals="; ".join(intervals),
    )


def _on_missing(config: StudyConfig, runs: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about runs that failed."""
    for r in (x for made in runs for x in (made, *made.trials)):
        count = len(r.seeds) - len(r.summaries)
        if count:
            name = f"{r.name} {r.trial}" if r.is_trial else r.name
            are = "is" if count == 1 else "are"
            yield say("missing", name=name, count=count, seeds=len(r.seeds), are=are)
    there = {(r.variant.label, r.point) for r in runs}
    planned = [(x.label, point) for x in config.variants for point in x.points]
    gone = [" at ".join(filter(None, x)) for x in planned if x not in there]
    if gone:
        yield say("no_runs", names=", ".join(gone))


def _on_tuning(
    config: StudyConfig, runs: Sequence[RunSet], scores: Sequence[Tuning]
) -> Iterator[str]:
    """Yields warnings about edges and trials."""
    edges = grouped((x for x in scores if x.at_edge), lambda x: (x.flag, x.chosen))
    for (flag, chosen), own in edges.items():
        name = ", ".join(" at ".join(filter(None, x[:2])) for x in own)
        yield say("edge", name=name, flag=flag, chosen=chosen)
    budgets = {len(r.trials) for r in runs}
    if len(budgets) > 1:
        yield _budgets(config, runs)
    followed = []
    for r in runs:
        flags = ", ".join(flag_of(x) for x in r.followed_flags)
        if flags:
            followed.append(f"{r.name} ({flags})")
    if followed:
        yield say("followed", names=", ".join(followed))
    several = [x for x in config.tuned if len(x.values) > 1] or config.tuned
    tuned = ", --".join(" or --".join(x.flags) for x in several)
    if tuned:
        yield say(
            "tuned" if max(budgets) > 1 else "untuned",
            tuned=tuned.replace("_", "-"),
            trials=" to ".join(map(str, sorted({min(budgets), max(budgets)}))),
            tune_seeds=plural(config.tune_seeds, "seed"),
            share=100 * TUNE_SHARE,
        )


def _budgets(config: StudyConfig, runs: Sequence[RunSet]) -> str:
    """Returns how many trials each row had, and which rows lack a tuned flag."""
    counts = []
    for count, equal_runs in grouped(runs, lambda r: len(r.trials)).items():
        counts.append(f"{_names(equal_runs)} {count:,}")
    text = say("budgets", counts="; ".join(counts))
    lacking = [r for r in runs if len(r.variant.tuned) < len(config.tuned)]
    if lacking:
        phrase = "lacks" if len(lacking) == 1 else "lack"
        text += f" {say(phrase, names=_names(lacking))}"
    return text


def _on_examples(
    config: StudyConfig, runs: Sequence[RunSet], report: Report
) -> Iterator[str]:
    """Yields warnings about test and validation data of few examples."""
    # Runs of earlier versions do not say the sizes of their data sets.
    sizes = [r.any["examples"]["test"] for r in runs if "examples" in r.any]
    if report.measure != statistics.ACCURACY or len(sizes) < len(runs):
        return
    test = min(sizes)
    found = [row.comparison.difference for row in report.rows]
    ends = [(d.low, d.high) for d in found if d]
    widths = [y - x for x, y in ends if x is not None and y is not None]
    if widths and 10 / test > min(widths):
        yield say("examples", points=100 / test, test=test)
    tried = [(r, x) for r in runs for x in r.trials if x.summaries]
    held_out = {(r.variant.label, r.point): x.any["examples"]["test"] for r, x in tried}
    near = []
    for t in report.tuning:
        own = [x for x in t.scores if x is not None]
        count = sum(max(own) - x < 1.5 / held_out[t.label, t.point] for x in own)
        near += [f"{named(t)} {count} of {len(t.scores)}"] * (count > 1)
    if near:
        points = 100 / min(held_out.values())
        advice = say("average") if config.tune_seeds < MIN_SEEDS else ""
        yield say("validation", points=points, near=listed(near)) + advice


def _on_sends(runs: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about steps after the last sync and about uncertain bytes."""
    # The center dates from the last sync: later local steps are not in it.
    whole = (r for r in runs if not r.any["diverged"])
    ends = grouped(whole, lambda r: (r.any["steps"], r.any["center_step"]))
    for (steps, center), own in ends.items():
        late = steps - center
        if late:
            key = "late_steps" if center else "no_sync"
            name = _names(own)
            yield say(key, name=name, steps=steps, late=late)
    by_data = [r for r in runs if len(r.sends or ()) > 1]
    if by_data:
        yield say("by_data", by_data=_names(by_data))
    unknown = [r for r in runs if r.any["sends"] is None]
    if unknown:
        yield say("unknown", unknown=_names(unknown))
    for more, own in grouped(runs, lambda r: r.any["not_counted"]).items():
        if more is not None:
            of = "" if len(own) == len(runs) else f" ({_names(own)})"
            yield say("not_counted", not_counted=more + of)


def _names(runs: Sequence[RunSet]) -> str:
    """Returns the names of runs."""
    return ", ".join(r.name for r in runs)
