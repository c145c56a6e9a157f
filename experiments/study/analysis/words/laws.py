"""Laws in words: the best values of a tuned flag against a swept one."""

from collections.abc import Sequence

from experiments.study.analysis.formatting import number
from experiments.study.tuning import Tuning


def laws(scores: Sequence[Tuning]) -> list[str]:
    """Returns a sentence for each variant and tuned flag; none without a sweep.

    Such as "Best outer-lr of diloco: 0.8 at workers=2, 0.4 [0.4, 0.8] at workers=8."
    An interval is shown where it is more than the value itself.
    """
    return [
        f"Best {flag} of {label}: "
        + ", ".join(f"{_value(each)} at {each.point}" for each in found)
        + "."
        for (label, flag), found in _by_flag(scores).items()
    ]


def law(scores: Sequence[Tuning]) -> str:
    """Returns the first law in one line; "" without a sweep."""
    for (_, flag), found in _by_flag(scores).items():
        first, last = (
            f"{number(x.chosen)} at {x.point}" for x in (found[0], found[-1])
        )
        return f"Best {flag}: {first}, {last}"
    return ""


def _by_flag(scores: Sequence[Tuning]) -> dict[tuple[str, str], list[Tuning]]:
    """Returns the scores at swept values, by variant and flag."""
    found: dict[tuple[str, str], list[Tuning]] = {}
    for each in scores:
        if each.point and any(score is not None for score in each.scores):
            found.setdefault((each.label, each.flag), []).append(each)
    return {key: own for key, own in found.items() if len(own) > 1}


def _value(each: Tuning) -> str:
    """Returns the best value, and its interval where that has other ends."""
    if each.low is None or each.high is None or each.low == each.chosen == each.high:
        return number(each.chosen)
    return f"{number(each.chosen)} [{number(each.low)}, {number(each.high)}]"
