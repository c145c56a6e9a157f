"""The top of a report: the line, the numbers beside it, and the answer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.study import formats, results, statistics
from experiments.study.formats import capitalize_first, format_difference, join_words
from experiments.study.results import (
    ONE_NOMINAL,
    Ranking,
    Report,
    Row,
    Standing,
)
from experiments.study.runs import Tuning
from experiments.study.sentences import (
    describe_losses,
    join_labels,
    say,
    say_counted,
)
from experiments.study.statistics import Measure

# The line at the top.


def lead(report: Report) -> str:
    """Returns the answer in one line."""
    if report.terms == ONE_NOMINAL:
        return say("lead.one_nominal")
    if len(report.rankings) == 1:
        [ranking] = report.rankings.values()
        line = _lead_ranking(ranking, report.measure)
    else:
        line = _lead_sweep(report.rankings, report.measure)
    if report.terms:
        return say("lead.on_terms", terms=capitalize_first(report.terms), lead=line)
    return line


def _lead_ranking(ranking: Ranking, measure: Measure) -> str:
    """Returns the line about the best of these rows, and how certain it is."""
    top = ranking.top
    standings = ranking.standings
    num_others = len(ranking.rows) - 1
    if top is None:
        return say("lead.no_result")
    if len(standings[Standing.NO_RESULT]) == num_others:
        return say("lead.alone", best=top.label)
    ties = results.leaders(ranking.rows, measure)
    num_best = len(ties)
    best = _row_labels(ties)
    # All comparisons are paired: if one has too few seeds, the line must say so.
    if standings[Standing.NO_COMMON_SEED]:
        return say_counted(
            "lead.no_common_seed",
            num_best,
            best=best,
            top=top.label,
            other=_row_labels(standings[Standing.NO_COMMON_SEED]),
        )
    if standings[Standing.FEW_SEEDS]:
        seeds = min(
            len(top.final.keys() & row.final.keys())
            for row in standings[Standing.FEW_SEEDS]
        )
        if seeds == 1:
            return say_counted("lead.one_seed", num_best, best=best)
        return say_counted("lead.few_seeds", num_best, best=best, seeds=seeds)
    if standings[Standing.EQUAL_DIFFERENCES]:
        return say_counted("lead.equal_differences", num_best, best=best)
    losses = describe_losses(top)
    if losses:
        return say_counted("lead.lost", num_best, best=best, lost=losses, top=top.label)
    alike = [
        *standings[Standing.NOT_AFTER_CORRECTION],
        *standings[Standing.NOT_SEEN],
    ]
    if alike and len(alike) == num_others:
        return _lead_alike(top, alike, measure)
    # Rows of equal means lead together, and are none of the others.
    num_others -= num_best - 1
    alike = [row for row in alike if row not in ties]
    if len(alike) == 1:
        return say_counted(
            "lead.one_not_distinguished", num_best, best=best, other=alike[0].label
        )
    if alike:
        return say_counted(
            "lead.not_distinguished",
            num_best,
            best=best,
            count=len(alike),
            others=num_others,
        )
    at_edge = standings[Standing.AT_EDGE]
    if len(at_edge) == 1:
        return say_counted(
            "lead.one_at_edge", num_best, best=best, other=at_edge[0].label
        )
    if at_edge:
        return say_counted(
            "lead.at_edge", num_best, best=best, count=len(at_edge), others=num_others
        )
    if standings[Standing.BETTER]:
        return say_counted(
            "lead.best_in_mean", num_best, best=best, measure=measure.name
        )
    return say_counted("lead.best", num_best, best=best, measure=measure.name)


def _lead_alike(top: Row, alike: Sequence[Row], measure: Measure) -> str:
    """Returns the line where no row can be distinguished from the best."""
    unequal = [row for row in alike if row.final != top.final]
    second = results.leader(unequal or alike, measure) or top
    difference = statistics.find_difference(top.final, second.final)
    if not unequal and len(alike) > 1:
        return say("lead.all_equal", labels=_row_labels([top, *alike]))
    if not unequal or difference is None:
        return say("lead.equal", best=top.label, other=second.label)
    ties = results.leaders([top, *unequal], measure)
    if second in ties:
        return say("lead.equal_means", labels=_row_labels(ties))
    gap = " ".join(format_difference(difference, measure, measure.side))
    fields = {"best": top.label, "other": second.label, "gap": gap}
    is_seen_alone = results.classify_difference(difference, measure) is Standing.BETTER
    if measure.higher_is_better:
        if is_seen_alone:
            return say("lead.above_corrected", **fields)
        return say("lead.above", **fields)
    if is_seen_alone:
        return say("lead.below_corrected", **fields)
    return say("lead.below", **fields)


def _lead_sweep(points: Mapping[str, Ranking], measure: Measure) -> str:
    """Returns the best variants, and at how many values of a sweep each is best."""
    flag = next(iter(points)).partition("=")[0]
    tops: list[Row] = []
    for ranking in points.values():
        tops += results.leaders(ranking.rows, measure)
    if not tops:
        return say("lead.no_result")
    counts = Counter(top.label for top in tops).most_common()
    everywhere = [label for label, count in counts if count == len(points)]
    fields = {"measure": measure.name, "flag": flag}
    notes = []
    if any(describe_losses(top) for top in tops):
        notes.append(say("sweep.lost"))
    if len(counts) == len(everywhere) == 1:
        line = say("sweep.everywhere", best=everywhere[0], **fields)
    elif len(counts) == len(everywhere):
        line = say("sweep.equal_everywhere", best=join_words(everywhere), **fields)
    else:
        count_texts = [
            say("sweep.count", label=label, count=count) for label, count in counts
        ]
        line = say(
            "sweep.counts", counts=join_words(count_texts), values=len(points), **fields
        )
        if len(tops) > len(points):
            notes.append(say("sweep.ties"))
    return "; ".join([line, *notes])


# The answer.


def answer(report: Report) -> str:
    """Returns the answer in sentences; for each value of a sweep, if there is one."""
    terms = report.terms
    is_ranked = terms != ONE_NOMINAL
    lines = []
    if not is_ranked:
        times = formats.format_factor(report.rate_ratio)
        lines.append(say("answer.one_nominal", times=times))
    for point, ranking in report.rankings.items():
        text = headline(ranking, report.measure, is_ranked=is_ranked)
        if terms and is_ranked:
            text = say("answer.on_terms", terms=terms, answer=text)
        if point:
            text = say("answer.at_point", point=point, answer=text)
        elif terms:
            # A label at the start of a sentence gets no capital letter.
            text = capitalize_first(text)
        lines.append(text)
    return "\n".join(lines)


def headline(ranking: Ranking, measure: Measure, *, is_ranked: bool = True) -> str:
    """Returns the best row, how certain that is, and its cost, in two sentences.

    Args:
        ranking: one row or more.
        measure: the measure.
        is_ranked: whether a winner is named; otherwise only the range of means is.

    The cost is the smallest number of bytes sent by the best row and by those that
    cannot be distinguished from it, whether by chance or because of too few seeds.
    """
    rows = ranking.rows
    top = ranking.top
    if top is None or top.result is None:
        return say("answer.no_result", labels=join_words([row.label for row in rows]))
    if not is_ranked:
        rows_with_result = [row for row in rows if row.result is not None]
        means = [row.result.mean for row in rows if row.result]
        low = formats.format_value(min(means), measure)
        high = formats.format_value(max(means), measure)
        high_with_unit = formats.add_unit(high, measure)
        if low == high:
            result = say("answer.mean", measure=measure.name, mean=high_with_unit)
        else:
            result = say(
                "answer.range", measure=measure.name, low=low, high=high_with_unit
            )
        cost = write_cost(rows, rows_with_result)
        return f"{result} {cost}".rstrip()
    seeds = top.result.count
    fields = {
        "best": _labels_with_losses([top]),
        "measure": measure.name,
        "mean": formats.format_spread(top.result, measure),
        "seeds": say_counted("seeds", seeds, seeds=seeds),
        "standing": _write_standings(ranking),
    }
    ties = results.leaders(rows, measure)[1:]
    if ties:
        result = say_counted(
            "answer.best_tied", len(ties), ties=_labels_with_losses(ties), **fields
        )
    else:
        result = say("answer.best", **fields)
    cost = write_cost(rows, ranking.candidates)
    return f"{result} {cost}".rstrip()


def _write_standings(ranking: Ranking) -> str:
    """Returns how the other rows compare with the best one."""
    clauses = []
    for standing in Standing:
        rows = ranking.standings[standing]
        if rows:
            clauses.append(
                say(
                    f"standing.{standing}",
                    labels=_labels_with_losses(rows),
                    comparisons=ranking.comparisons,
                )
            )
    return "; ".join(clauses) or say("answer.alone")


def write_cost(rows: Sequence[Row], pool: Sequence[Row]) -> str:
    """Returns the cost of a pool of rows as a sentence; "" if no bytes are counted."""
    cost = find_cost(rows, pool)
    if cost is None:
        return ""
    cheapest_rows = [row for row in cost.cheapest_rows if row in pool]
    cost_text = _describe_cost(cost, cheapest_rows)
    labels = _row_labels(cheapest_rows)
    if len(pool) == 1:
        return say("cost.alone", cost=cost_text)
    if len(cheapest_rows) == len(pool):
        return say("cost.each", labels=labels, cost=cost_text)
    if len(pool) < len(rows):
        # A row that is worse may have sent less.
        pool_labels = _row_labels(pool)
        return say("cost.least_of", pool=pool_labels, labels=labels, cost=cost_text)
    return say("cost.least", labels=labels, cost=cost_text)


def _describe_cost(cost: "Cost", cheapest_rows: Sequence[Row]) -> str:
    """Returns the bytes of a pool's cheapest rows, and which share they are."""
    row = cheapest_rows[0]
    sent_bytes = formats.format_sent_bytes(row)
    if not cost.share:
        return say("cost.bytes", bytes=sent_bytes)
    fields = {
        "bytes": sent_bytes,
        "share": cost.share,
        "costliest": _row_labels(cost.costliest_rows),
        "syncs": row.syncs,
        "steps": row.steps,
    }
    # The number of syncs explains a share that is not round.
    has_one_count = len({cheap_row.syncs for cheap_row in cheapest_rows}) == 1
    has_few_syncs = has_one_count and row.syncs and row.syncs < row.steps
    if len(cost.costliest_rows) == 1:
        if has_few_syncs:
            return say("cost.share_syncs", **fields)
        return say("cost.share", **fields)
    if has_few_syncs:
        return say("cost.share_of_each_syncs", **fields)
    return say("cost.share_of_each", **fields)


class Cost(NamedTuple):
    """The bytes that the cheapest row of a pool sent, beside those of all rows.

    Attributes:
        cheapest_rows: all rows, in the pool or not, that sent as little as the one of
            the pool that sent the least.
        costliest_rows: all rows that sent the most.
        share: the least as a fraction of the most, in words; "" if nothing is saved.
    """

    cheapest_rows: Sequence[Row]
    costliest_rows: Sequence[Row]
    share: str


def find_cost(rows: Sequence[Row], pool: Sequence[Row]) -> Cost | None:
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
    share = ""
    if 0 < least_bytes < most_bytes:
        share = formats.format_share(least_bytes / most_bytes)
    return Cost(
        [row for row in rows if row.bytes_per_worker == least_bytes],
        [row for row in rows if row.bytes_per_worker == most_bytes],
        share,
    )


# The numbers at the top.


def numbers(report: Report) -> list[tuple[str, str]]:
    """Returns up to three numbers beside the line: value and meaning."""
    rows = report.rows
    measure = report.measure
    top = report.top
    is_swept = len(report.rankings) > 1
    if top is None or top.result is None:
        return []
    rows_with_result = [row for row in rows if row.result]
    best_mean = formats.format_value(top.result.mean, measure)
    best_number = (
        formats.add_unit(best_mean, measure),
        say(
            "number.best",
            measure=measure.name,
            rows=_row_names(results.leaders(rows, measure)),
        ),
    )
    range_number = (
        formats.format_range(rows_with_result, measure),
        say("number.range", measure=measure.name),
    )
    if report.terms == ONE_NOMINAL:
        ratio = formats.format_factor(report.rate_ratio)
        first_numbers = [range_number, (ratio, say("number.rates"))]
        pool = rows_with_result
    elif is_swept:
        first_numbers = [best_number, range_number]
        pool = rows
    else:
        first_numbers = [best_number, *_difference_number(report)]
        [ranking] = report.rankings.values()
        pool = ranking.candidates
    if is_swept:
        return [*first_numbers, *_sent_range_number(rows)]
    return [*first_numbers, *_cost_number(rows, pool)]


def _difference_number(report: Report) -> list[tuple[str, str]]:
    """Returns the difference of the best row from the baseline; none without one.

    If the baseline is best, the next best row shows the gap.
    """
    compared_rows = [
        row for row in report.rows if row.result and row.comparison.difference
    ]
    best = results.leader(compared_rows, report.measure)
    difference = best.comparison.difference if best else None
    if best is None or difference is None:
        return []
    comparison = best.comparison
    amount, interval = format_difference(difference, report.measure, difference.mean)
    if not comparison.kind.is_seen:
        amount = say("number.no_difference")
        _, interval = format_difference(difference, report.measure, 1.0)
    meaning = say(
        f"number.{comparison.kind}.{comparison.basis}",
        row=best.label,
        baseline=report.baseline,
        interval=interval,
        seeds=difference.count,
    )
    return [(amount, meaning)]


def _sent_range_number(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the fewest and the most bytes that a worker of these rows sent."""
    cost = find_cost(rows, rows)
    if cost is None:
        return []
    smallest = formats.format_sent_bytes(cost.cheapest_rows[0])
    largest = formats.format_sent_bytes(cost.costliest_rows[0])
    span = smallest if smallest == largest else f"{smallest} to {largest}"
    return [(span, say("number.sent"))]


def _cost_number(rows: Sequence[Row], pool: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the cost of a pool of rows as a share, or in bytes."""
    cost = find_cost(rows, pool)
    if cost is None:
        return []
    sent_bytes = formats.format_sent_bytes(cost.cheapest_rows[0])
    cheapest = _row_names(cost.cheapest_rows)
    if not cost.share:
        return [(sent_bytes, say("number.sent_by", rows=cheapest))]
    meaning = say(
        "number.share",
        costliest=_row_names(cost.costliest_rows),
        cheapest=cheapest,
        bytes=sent_bytes,
    )
    return [(cost.share, meaning)]


# A swept flag against a tuned one.


def laws(tunings: Sequence[Tuning]) -> tuple[str, list[str]]:
    """Returns the best values of tuned flags against a swept one.

    Args:
        tunings: the scores of the tuning.

    Returns:
        The first law in one line, such as "Best outer-lr: 0.8 at workers=2, 0.4 at
        workers=8"; and a sentence for each variant and tuned flag, such as "Best
        outer-lr of diloco: 0.8 at workers=2, 0.4 [0.4, 0.8] at workers=8." An interval
        is shown unless it holds only the value itself. Both are empty without a sweep.
    """
    swept_tunings = []
    for tuning in tunings:
        has_score = any(score is not None for score in tuning.scores)
        if tuning.point and has_score:
            swept_tunings.append(tuning)
    groups = formats.group_items(
        swept_tunings, lambda tuning: (tuning.label, tuning.flag)
    )
    line = ""
    sentences = []
    for (label, flag), variant in groups.items():
        if len(variant) < 2:
            continue
        values = [_describe_best(tuning, with_interval=True) for tuning in variant]
        sentences.append(
            say("law.sentence", flag=flag, label=label, values=", ".join(values))
        )
        if not line:
            ends = [
                _describe_best(tuning, with_interval=False)
                for tuning in (variant[0], variant[-1])
            ]
            line = say("law.line", flag=flag, values=", ".join(ends))
    return line, sentences


def _describe_best(tuning: Tuning, *, with_interval: bool) -> str:
    """Returns the best value, and its interval unless it holds only that value."""
    best = formats.format_number(tuning.chosen)
    low = tuning.low
    high = tuning.high
    if not with_interval or low is None or high is None:
        return say("law.value", value=best, point=tuning.point)
    if low == tuning.chosen == high:
        return say("law.value", value=best, point=tuning.point)
    return say(
        "law.value_interval",
        value=best,
        low=formats.format_number(low),
        high=formats.format_number(high),
        point=tuning.point,
    )


# Names of rows.


def _row_labels(rows: Sequence[Row]) -> str:
    return join_labels([row.label for row in rows])


def _labels_with_losses(rows: Sequence[Row]) -> str:
    """Returns labels with the number of lost runs; for many rows, their number."""
    labels = []
    for row in rows:
        label = row.label
        if row.result and describe_losses(row):
            label = say(
                "answer.label_with_losses", label=label, lost=describe_losses(row)
            )
        labels.append(label)
    return join_labels(labels, "labels.others")


def _row_names(rows: Sequence[Row]) -> str:
    """Returns rows with their points of the sweep; for many rows, their number."""
    return join_labels([formats.format_name(row) for row in rows], "labels.rows")
