"""Whether learning rates make a comparison unfair, and the command that tunes them."""

import math
import shlex
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from experiments.study import config
from experiments.study.analysis.formatting import number
from experiments.study.analysis.results import BY_HAND, ONE_NOMINAL
from experiments.study.analysis.runs import Runs
from experiments.study.entries import Entry, groups_of_flags, parameter
from experiments.study.spec import Spec

APART = 1.5  # times: effective rates that differ by more are not those of one study
WIDTH, MOST = 8, 9  # what to tune over: at least so far to either side; values


class Rates(NamedTuple):
    """The part that learning rates have in a comparison of algorithms.

    Attributes:
        terms: ONE_NOMINAL or BY_HAND where rates were not tuned and effective ones
            differ; "" elsewhere.
        times: how far they differ at most.
        remarks: what to know, with the command that tunes them; () for nothing.
    """

    terms: str = ""
    times: float = 1.0
    remarks: Sequence[str] = ()


def rates(spec: Spec, runs: Sequence[Runs], command: str) -> Rates:
    """Compares the effective rates of the algorithms, at each value of the sweep.

    Args:
        spec: of the study.
        runs: those to report.
        command: that makes the study.
    """
    if any(each.flag == "lr" for each in spec.tune) or len(_without_lr(spec)) < 2:
        return Rates()
    points = [p for p in dict.fromkeys(r.cell.point for r in runs) if p] or [""]
    groups = [[r for r in runs if r.cell.point in (point, "")] for point in points]
    apart = [(_times(group), group) for group in groups]
    times, widest = max(apart, key=lambda each: each[0])
    way_out = f"To choose the best rate of each: {tuning_command(spec, runs, command)}"
    if times <= APART:
        if max(map(len, map(_known, groups))) > 1:
            return Rates()
        return Rates(remarks=[f"{_unknown(groups[0])} {way_out}"])
    unfair = [group for factor, group in apart if factor > APART]
    one_nominal = all(len({r.any["lr"] for r in group}) == 1 for group in unfair)
    terms = ONE_NOMINAL if one_nominal else BY_HAND
    return Rates(terms, times, [f"{_unfair(widest, terms, times)} {way_out}"])


def _known(group: Sequence[Runs]) -> list[Runs]:
    """Those that have an effective rate: sign methods have none."""
    effective = [(r, r.any["effective_lr"]) for r in group]
    return [r for r, x in effective if x is not None and 0 < x < math.inf]


def _times(group: Sequence[Runs]) -> float:
    """The largest effective rate by the smallest."""
    found = [r.any["effective_lr"] for r in _known(group)]
    return max(found) / min(found) if found else 1.0


def _unfair(group: Sequence[Runs], terms: str, times: float) -> str:
    """The first remark of a comparison at unlike rates."""
    known = sorted(_known(group), key=lambda r: r.any["effective_lr"])
    ends = (
        f"{number(r.any['effective_lr'])} of {r.name}" for r in (known[0], known[-1])
    )
    others = [r.name for r in group if r not in known]
    less = f" ({', '.join(others)}: none known)" if others else ""
    at = f" {number(group[0].any['lr'])}," if terms == ONE_NOMINAL else ""
    return (
        f"Learning rates were not tuned: {terms},{at} effective ones differ "
        f"{factor(times)}, from {' to '.join(ends)}{less}. So figures differ by the "
        "rate as well as by the algorithm."
    )


def factor(times: float) -> str:
    """A ratio in words: "8 times" or "2.5 times"."""
    return f"{number(float(f'{times:.2g}'))} times"


def _unknown(group: Sequence[Runs]) -> str:
    """The first remark of a comparison whose effective rates are not known."""
    names = ", ".join(r.name for r in group if r not in _known(group))
    return (
        f"Learning rates were not tuned, and of {names} no effective one is known: "
        "whether they can be compared is not known either."
    )


def tuning_command(spec: Spec, runs: Sequence[Runs], command: str) -> str:
    """The study's command with a rate of its own for each algorithm."""
    program, words = config.PROGRAM.split(), shlex.split(command)
    dropped, more = {"lr", "out", "overwrite"}, []
    if any(_has_lr(entry) for entry in spec.entries):
        dropped.add("algos")
        more += ["--algos", ", ".join(_without_lr(spec))]
    if spec.scale_lr != "none":
        dropped.add("scale_lr")
        more += ["--scale-lr", "none"]  # a preset may say otherwise
    if spec.sweep is not None and spec.sweep.flag == "lr":
        dropped.add("sweep")
        tried = ",".join(spec.sweep.values)
    else:
        tried = _range([r for r in runs if r.fine] or runs)
    groups = groups_of_flags(words[len(program) :])
    kept = [group for group in groups if parameter(group[0]) not in dropped]
    return shlex.join([*program, *chain(*kept), *more, "--tune", f"lr={tried}"])


def _range(runs: Sequence[Runs]) -> str:
    """Nominal rates in factors of 2, as --tune takes them.

    They give each algorithm the effective rates of all others, half and twice these.
    """
    nominal = [r.any["lr"] for r in runs]
    effective = [r.any["effective_lr"] for r in _known(runs)] or nominal
    gains = [r.any["effective_lr"] / r.any["lr"] for r in _known(runs)] or [1.0]
    low = min(min(effective) / max(gains) / 2, min(nominal) / WIDTH)
    high = max(max(effective) / min(gains) * 2, max(nominal) * WIDTH)
    count = min(round(math.log2(high / low)) + 1, MOST)
    return f"{low:.2g}:{high:.2g}:log:{count}"


def _has_lr(entry: Entry) -> bool:
    return any(parameter(group[0]) == "lr" for group in groups_of_flags(entry.words))


def _without_lr(spec: Spec) -> list[str]:
    """The algorithms as --algos has them, without rates, each once."""
    found: dict[tuple[str, ...], str] = {}
    for entry in spec.entries:
        groups = groups_of_flags(entry.words)
        own = chain(*(group for group in groups if parameter(group[0]) != "lr"))
        words = (entry.algo, *own)
        default = entry.label == " ".join([entry.algo, *entry.words])
        label = "" if default else f"{_quoted(entry.label)}="
        found.setdefault(words, label + shlex.join(words))
    return list(found.values())


def _quoted(label: str) -> str:
    """As shlex does it, with the other quotes: the whole of --algos has single ones."""
    quoted = shlex.quote(label)
    plain = quoted == label or set(label) & set("\"$`\\'")
    return quoted if plain else f'"{label}"'
