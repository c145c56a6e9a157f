"""The findings as Markdown, for a page among others."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from experiments.aiming.config import PROGRAM, AimConfig
from experiments.aiming.report import table
from experiments.aiming.report.records import Result, by_target, versions_of
from experiments.aiming.traffic import ACROSS
from experiments.cli.terminal import duration

# Of each network; the step itself is the same on all.
MEANS = table.MODELLED[-3:]
EACH = {"sync": "a sync", "step": "a step"}


def page(config: AimConfig, argv: Sequence[str], found: Sequence[Result]) -> str:
    """Returns what was found as the text of a Markdown file.

    Args:
        config: of the command.
        argv: its flags, by which it is repeated.
        found: of all programs, target by target.
    """
    parts = [f"```sh\n{shlex.join([*PROGRAM.split(), *argv])}\n```"]
    parts += versions_of(found)
    for target, own in by_target(found):
        parts += [f"## {table.head(target, own)}", f"**{table.FROM_COMPILER}**"]
        parts.append(_read_off([x for x in own if x.is_done]))
        parts += ["\n".join(x) for x in [_reasons(own)] if x]
        parts += _modelled(config, own)
        parts.append("\n".join(f"- {line}" for line in table.notes(target, config)))
    return "\n\n".join(parts) + "\n"


def _reasons(found: Iterable[Result]) -> list[str]:
    """Lists why there is no program, or why the ledger counts otherwise."""
    lines = []
    for x in found:
        is_equal = x.comparison is None or x.comparison.is_equal
        why = [] if is_equal else table.of_ledger(x)
        why += [] if x.is_done else [table.outcome(x.answer)]
        lines += [f"- {x.job.variant.label}: {'; '.join(why)}"] if why else []
    return lines


def _read_off(found: Iterable[Result]) -> str:
    heads = ("algorithm", *table.READ, "collectives across workers")
    return _grid(
        heads,
        [[x.job.variant.label, *table.read_off(x), collectives(x)] for x in found],
    )


def collectives(result: Result) -> str:
    """Returns the collectives across workers: "a sync: 4 all_reduce f32 of 16"."""
    shown = []
    for when, each in EACH.items():
        calls, types = Counter(), defaultdict(set)
        for row in result.answer.get("traffic") or ():
            if (row["scope"], row["when"]) == (ACROSS, when):
                alike = row["kind"], row["group"]
                calls[alike] += row["calls"]
                types[alike].update(row["dtypes"])
        own = [
            f"{calls[kind, group]} {kind} {'/'.join(sorted(of_group))} of {group}"
            for (kind, group), of_group in sorted(types.items())
        ]
        shown += [f"{each}: {', '.join(own)}"] if own else []
    return "; ".join(shown) or table.MISSING


def _modelled(config: AimConfig, found: Sequence[Result]) -> list[str]:
    """Returns a table of times, by the target's own links and by each network."""
    timed = [x for x in found if x.times]
    if not timed:
        return []
    heads = ["algorithm", table.MODELLED[0]]
    for name in ("its own links", *(x.name for x in config.networks)):
        heads += [f"{MEANS[0]}, {name}", *MEANS[1:]]
    rows = [
        [x.job.variant.label, duration(x.times[0].step)]
        + [cell for times in x.times for cell in table.modelled(times)[-len(MEANS) :]]
        for x in timed
    ]
    between = " and ".join(x.name for x in config.networks)
    return [
        f"**{table.FROM_MODEL}**, with its own links"
        + (f"; and with {between} between workers" if between else ""),
        _grid(heads, rows),
    ]


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
