"""Sentences of a report: each is an entry of phrases.toml, filled in."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.study.formats import MAX_LABELS, format_difference, join_words
from experiments.study.results import Basis, Comparison, Kind, Report, Row
from experiments.study.statistics import MIN_SEEDS, Measure

PHRASES = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("utf-8"))


def say(phrase: str, /, **fields: Any) -> str:
    """Returns an entry of phrases.toml, filled in.

    Args:
        phrase: its place, such as "lead.no_result".
        fields: its fields, and maybe others.
    """
    entry = PHRASES
    for key in phrase.split("."):
        entry = entry[key]
    assert isinstance(entry, str)
    return entry.format(**fields)


def say_counted(phrase: str, count: int, /, **fields: Any) -> str:
    """Returns the entry for one thing or for several, filled in."""
    if count == 1:
        return say(f"{phrase}.one", **fields)
    return say(f"{phrase}.several", **fields)


# A row against the baseline.


def write_clause(comparison: Comparison, measure: Measure, baseline: str) -> str:
    """Returns a comparison in words, such as "better by 0.80 points [0.50, 1.10]"."""
    difference = comparison.difference
    if comparison.basis is None or difference is None:
        return say(f"clause.{comparison.kind}", baseline=baseline)
    # If no difference is seen, the interval is of this row minus the other.
    side = difference.mean if comparison.kind.is_seen else 1.0
    amount, interval = format_difference(difference, measure, side)
    return say(
        f"clause.{comparison.kind}.{comparison.basis}",
        amount=amount,
        interval=interval,
        seeds=difference.count,
    )


def write_comparison(row: Row, base: Row) -> str:
    """Returns a row against the baseline as a sentence, and which runs have no result.

    Args:
        row: a row with its comparison.
        base: the row of the baseline that it is compared with.
    """
    sentences = [_comparison_sentence(row, base)]
    for compared_row in (row, base):
        losses = describe_losses(compared_row)
        if losses:
            sentences.append(say("lost.sentence", row=compared_row.name, lost=losses))
    return " ".join(sentences)


def _comparison_sentence(row: Row, base: Row) -> str:
    comparison = row.comparison
    names = {"row": row.name, "base": base.name, "clause": comparison.clause}
    difference = comparison.difference
    if difference is None:
        return say("comparison.no_common_seed", **names)
    if comparison.kind is Kind.EQUAL:
        return say("comparison.equal", **names)
    if comparison.basis is not Basis.INTERVAL:
        if difference.count < MIN_SEEDS:
            return say("comparison.few_seeds", **names)
        return say("comparison.equal_differences", **names)
    if comparison.p is None:
        return say("comparison.interval", **names, seeds=difference.count)
    return say(
        "comparison.corrected",
        **names,
        seeds=difference.count,
        comparisons=comparison.comparisons,
        p=describe_p(comparison),
    )


def describe_p(comparison: Comparison) -> str:
    """Returns the corrected p-value: "p = 0.012"; "" without one."""
    if comparison.p is None:
        return ""
    if comparison.p < 0.0001:
        return say("p.tiny")
    return say("p.value", p=f"{comparison.p:.2g}")


def describe_losses(row: Row) -> str:
    """Returns how many runs have no result, and why; "" if all have one."""
    with_result = row.result.count if row.result else 0
    undefined = row.seeds - row.diverged - with_result
    if undefined > 0 and row.diverged:
        return say(
            "lost.both", diverged=row.diverged, undefined=undefined, runs=row.seeds
        )
    if undefined > 0:
        return say("lost.undefined", undefined=undefined, runs=row.seeds)
    if row.diverged == row.seeds == 1:
        return say("lost.one_diverged")
    if row.diverged == row.seeds:
        return say("lost.all_diverged", runs=row.seeds)
    if row.diverged:
        return say("lost.diverged", diverged=row.diverged, runs=row.seeds)
    return ""


def difference_heading(report: Report) -> str:
    """Returns the heading of the differences: the baseline, and unfair terms."""
    if report.terms:
        return f"against {report.baseline}, {report.terms}"
    return f"against {report.baseline}"


def make_title(labels: Sequence[str], task: str) -> str:
    """Returns the title of a comparison, such as "sync_sgd and bmuf on digits"."""
    return say("title.algorithms", labels=join_labels(labels), task=task)


def join_labels(labels: Sequence[str], phrase: str = "labels.algorithms") -> str:
    """Returns labels joined as in a sentence; for many, a phrase with their number."""
    if len(labels) > MAX_LABELS:
        return say(phrase, count=len(labels))
    return join_words(labels)
