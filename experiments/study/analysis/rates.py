"""Whether learning rates make a comparison unfair, and the command that tunes them."""

import math
import shlex
from collections.abc import Sequence
from itertools import chain

from experiments.cli.words import parameter, without
from experiments.study.analysis.comparison import by_point
from experiments.study.analysis.formatting import number, say
from experiments.study.analysis.results import BY_DEFAULT, BY_HAND, ONE_NOMINAL, Row
from experiments.study.config import PROGRAM, StudyConfig
from experiments.study.search_space import Range
from experiments.study.spec import Variant
from experiments.study.tuning import Tuning

# Effective rates whose ratio is larger are not comparable.
APART = 1.5
# The tuned range extends by at least this factor to either side of the nominal rates.
WIDTH = 8
# The largest number of values in that range.
MOST = 9
# The number of values to add beyond an end of a range that is the best value.
MORE = 4


def rates(
    config: StudyConfig, rows: Sequence[Row], command: str
) -> tuple[str, float, list[str]]:
    """Compares the effective rates of the variants, at each value of the sweep.

    Args:
        config: the study.
        rows: rows of the table.
        command: command that makes the study.

    Returns:
        ONE_NOMINAL, BY_HAND or BY_DEFAULT where rates were not tuned and effective ones
        differ, "" elsewhere; the ratio of the largest effective rate to the smallest;
        and remarks, with the command that tunes the rates.
    """
    is_tuned = any("lr" in each.flags for each in config.tuned)
    # One algorithm at several rates is a study of rates.
    if is_tuned or len(_without_lr(config.variants)) < 2:
        return "", 1.0, []
    groups = [*by_point(rows).values()]
    unfair = [group for group in groups if _times(group) > APART]
    if not unfair and max(len(_effective(group)) for group in groups) > 1:
        return "", 1.0, []
    widest = max(groups, key=_times)
    known, times, terms = _effective(widest), _times(widest), ""
    others = ", ".join(r.name for r in widest if r.name not in known)
    remark = say("rates_unknown", names=others)
    if unfair:
        is_given = any("lr" in variant.parameters for variant in config.variants)
        is_swept = config.swept is not None and config.swept.flag == "lr"
        terms = BY_HAND if is_swept or is_given else BY_DEFAULT
        if all(len({r.lr for r in group}) == 1 for group in unfair):
            terms = ONE_NOMINAL
        order = sorted(known, key=known.__getitem__)
        low, *_, high = (f"{number(known[name])} of {name}" for name in order)
        remark = say(
            "unfair",
            terms=terms,
            at=f" {number(widest[0].lr)}," if terms == ONE_NOMINAL else "",
            times=factor(times),
            low=low,
            high=high,
            less=f", and that of {others} is not known" if others else "",
        )
    way_out = tuning_command(config, rows, command)
    return terms, times, [f"{remark} To tune the rate of each algorithm: {way_out}"]


def _effective(group: Sequence[Row]) -> dict[str, float]:
    """Returns the effective rates by name; sign methods have none."""
    found = {r.name: r.effective_lr for r in group}
    return {k: x for k, x in found.items() if x is not None and 0 < x < math.inf}


def _times(group: Sequence[Row]) -> float:
    """Returns the ratio of the largest effective rate to the smallest."""
    found = _effective(group).values() or [1.0]
    return max(found) / min(found)


def factor(times: float) -> str:
    """Returns a ratio in words: "8 times" or "2.5 times"."""
    return f"{number(float(f'{times:.2g}'))} times"


def tuning_command(config: StudyConfig, rows: Sequence[Row], command: str) -> str:
    """Returns the study's command with the learning rate of each variant tuned."""
    program, words = PROGRAM.split(), shlex.split(command)
    dropped, more = {"lr", "out"}, []
    own = [group for variant in config.variants for group in variant.own_flags]
    if any(parameter(group[0]) == "lr" for group in own):
        # Labels that name a rate change, too.
        dropped |= {"algos", "baseline"}
        more += ["--algos", ", ".join(_without_lr(config.variants))]
    if config.swept is not None and config.swept.flag == "lr":
        dropped.add("sweep")
        tried = ",".join(config.swept.values)
    else:
        tried = _range([r for r in rows if r.measure] or rows)
    kept = without(words[len(program) :], dropped)
    return shlex.join([*program, *kept, *more, "--tune", f"lr={tried}"])


def further(config: StudyConfig, scores: Sequence[Tuning], command: str) -> str | None:
    """Returns the study's command with longer ranges where the best value is an end.

    Args:
        config: the study.
        scores: the scores of its tuning.
        command: command that makes the study.

    Returns:
        None where no logarithmic range has its best value at an end.
    """
    ranges = [_longer(each, scores) for each in config.tuned]
    if not any(old for old, new in ranges if old != new):
        return None
    program = PROGRAM.split()
    kept = without(shlex.split(command)[len(program) :], ("tune", "out"))
    tuned = chain(*(("--tune", new) for _, new in ranges))
    return shlex.join([*program, *kept, *tuned])


def _longer(tuned: Range, scores: Sequence[Tuning]) -> tuple[str, str]:
    """Returns a range as --tune takes it, and with more values at its best end."""
    each = (tuned, *tuned.others)
    text = "|".join(f"{x.flag}={','.join(x.values)}" for x in each)
    if tuned.bounds is None or not tuned.bounds[2]:
        return text, text
    low, high, _ = tuned.bounds
    count = len(tuned.values)
    step = (high / low) ** (1 / (count - 1))
    own = [x for x in scores if x.at_edge and x.flag.replace("-", "_") in tuned.flags]
    below = MORE * any(x.chosen == x.values[0] for x in own)
    above = MORE * any(x.chosen == x.values[-1] for x in own)
    ends = f"{low / step**below:.3g}:{high * step**above:.3g}"
    old = f"{tuned.flag}={low:.3g}:{high:.3g}:log:{count}"
    return old, f"{tuned.flag}={ends}:log:{count + below + above}"


def _range(rows: Sequence[Row]) -> str:
    """Returns nominal rates in factors of 2, as --tune takes them.

    The range covers, for each variant, the effective rates of all others, and half and
    twice these.
    """
    nominal = [r.lr for r in rows]
    known = _effective(rows)
    effective = [*known.values()] or nominal
    gains = [known[r.name] / r.lr for r in rows if r.name in known] or [1.0]
    low = min(min(effective) / max(gains) / 2, min(nominal) / WIDTH)
    high = max(max(effective) / min(gains) * 2, max(nominal) * WIDTH)
    count = min(round(math.log2(high / low)) + 1, MOST)
    return f"{low:.2g}:{high:.2g}:log:{count}"


def _without_lr(variants: Sequence[Variant]) -> list[str]:
    """Returns the algorithms as --algos has them, without rates, each once."""
    found: dict[tuple[str, ...], str] = {}
    for variant in variants:
        own = [group for group in variant.own_flags if parameter(group[0]) != "lr"]
        words = (variant.algo, *chain(*own))
        default = variant.label == " ".join([variant.algo, *variant.words])
        label = shlex.quote(variant.label)
        # In double quotes if possible: the whole value of --algos has single quotes.
        if label != variant.label and not set(variant.label) & set("\"$`\\'"):
            label = f'"{variant.label}"'
        label = "" if default else f"{label}="
        found.setdefault(words, label + shlex.join(words))
    return list(found.values())
