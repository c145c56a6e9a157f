"""The content of a report in all of its formats, as tables and lines."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from experiments.aiming import traffic
from experiments.aiming.config import NOT_HERE, PROGRAM, AimConfig
from experiments.aiming.report.records import Result, compilers_words, outcome
from experiments.aiming.targets import Target
from experiments.aiming.times import Times, shares
from experiments.aiming.traffic import ACROSS, STEP, SYNC
from experiments.cli.terminal import MISSING, duration, mesh_text, size


class Table(NamedTuple):
    """A table of text; the first cell of a row names the row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Program(NamedTuple):
    """The details of a program.

    Attributes:
        label: its name in all tables.
        is_asked: whether the user requested it; others are only for the speed-up.
        reason: why there is no program, or why the ledger's counts differ; "" for
            others.
        lines: lines about its memory and the ledger.
        traffic: a table of its collectives.
    """

    label: str
    is_asked: bool
    reason: str
    lines: list[str]
    traffic: Table


class Section(NamedTuple):
    """The findings for a target.

    Attributes:
        head: a line about the target and its workers.
        tables: a table of findings in the programs; then tables of modelled times, for
            the target's own links and for each further network.
        programs: details of the programs.
        notes: notes on the tables.
    """

    head: str
    tables: list[Table]
    programs: list[Program]
    notes: list[str]


class Page(NamedTuple):
    """A report.

    Attributes:
        title: the title of the page.
        headline: its first sentence: how many programs compile, and how many fit.
        command: the command that repeats it.
        versions: sentences about the versions of compilers and packages.
        sections: a section for each target.
    """

    title: str
    headline: str
    command: str
    versions: list[str]
    sections: list[Section]


def page(config: AimConfig, argv: Sequence[str], results: Sequence[Result]) -> Page:
    """Returns the content of a report.

    Args:
        config: the config of the command.
        argv: the flags of the command, to repeat it.
        results: results of all programs, target by target.
    """
    done = [x for x in results if x.is_done]
    known = [x.fits for x in done if x.fits is not None]
    fitting = f", {sum(known)} of {len(known)} fit" if known else ""
    by_target = groupby(results, lambda result: result.job.target)
    return Page(
        title=f"{config.task} {NOT_HERE}",
        headline=f"{len(done)} of {len(results)} programs compile{fitting}.",
        command=shlex.join([*PROGRAM.split(), *argv]),
        versions=_versions(results),
        sections=[_section(config, target, [*group]) for target, group in by_target],
    )


def _versions(results: Iterable[Result]) -> list[str]:
    """Returns sentences about versions: several if --reuse took older programs."""
    labels = defaultdict(list)
    for x in results:
        if versions := x.answer.get("versions"):
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            labels[text].append(x.job.variant.label)
    if len(labels) == 1:
        return [f"With {text}." for text in labels]
    return [f"{', '.join(names)} with {text}." for text, names in labels.items()]


def _section(config: AimConfig, target: Target, results: list[Result]) -> Section:
    done = [(x.label, x) for x in results if x.is_done]
    tables = [_table("read off the program", READ, done)]
    between = (f"with {x.name} between workers" for x in config.networks)
    for i, links in enumerate(("with its own links", *between)):
        timed = [(x.label, x.times[i]) for x in results if x.times]
        tables.append(_table(f"modelled, {links}", MODELLED, timed))
    return Section(
        head=_head(target, results),
        tables=[table for table in tables if table.rows],
        programs=[_program(x) for x in results],
        notes=_notes(target, config),
    )


def _table(
    title: str,
    columns: Mapping[str, Callable[[Any], str]],
    subjects: Iterable[tuple[str, Any]],
) -> Table:
    rows = [[label, *(cell(x) for cell in columns.values())] for label, x in subjects]
    return Table(title, ["algorithm", *columns], rows)


def _head(target: Target, results: Iterable[Result]) -> str:
    limit, peak = target.chip.memory, target.chip.flops
    figures = [] if limit is None else [f"{size(limit)} of memory"]
    figures += [] if peak is None else [f"{peak / 1e12:g} TFLOP/s"]
    line = f"{target.shown}: {_several(target.chips, 'chip')}"
    line += f" of {' and '.join(figures)}" if figures else ""
    done = next((x.answer for x in results if "workers" in x.answer), None)
    if done is None:
        return line
    each = target.chips * done["lanes"] // done["workers"]
    mesh = f" of {each} chips ({mesh_text(done['mesh'])})" if done["mesh"] else ""
    workers = f"{_several(done['workers'], 'worker')}{mesh}"
    return f"{line}; {workers}, batch {done['batch_size']}, {done['params']:,} params"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _held(result: Result) -> str:
    limit = result.job.target.chip.memory
    if result.held is None and result.fits is False and limit is not None:
        return f"over {size(limit)}"  # the compiler gave up
    return MISSING if result.held is None else size(result.held)


def _sent(result: Result, when: str) -> str:
    """Returns the bytes that a chip sends to other workers in each step or sync.

    If syncs differ, it is the one that sends the most.
    """
    rows = result.answer.get("traffic")
    if rows is None:
        return MISSING
    sent = sum(row["bytes"] for row in traffic.of(rows, ACROSS, when))
    if when == SYNC and sent:
        sent *= max(shares(result.answer, result.job.config.arguments))
        if not sent:  # the run is too short for a sync
            return MISSING
    return size(sent)


def _agreement(result: Result) -> str:
    """Returns whether the ledger and the compiler agree, in one or two words."""
    compared = result.comparison
    if compared is None:
        return MISSING if result.answer.get("traffic") is None else "not counted"
    return "equal" if compared.is_equal else "explained" if compared.why else "differs"


def _collectives(result: Result) -> str:
    """Returns the collectives across workers: "a sync: 4 all_reduce f32 of 16"."""
    parts = []
    for when in (SYNC, STEP):
        calls, types = Counter(), defaultdict(set)
        for row in traffic.of(result.answer.get("traffic") or (), ACROSS, when):
            calls[row["kind"], row["group"]] += row["calls"]
            types[row["kind"], row["group"]].update(row["dtypes"])
        alike = [
            f"{calls[kind, group]} {kind} {'/'.join(sorted(dtypes))} of {group}"
            for (kind, group), dtypes in sorted(types.items())
        ]
        parts += [f"a {when}: {', '.join(alike)}"] if alike else []
    return "; ".join(parts) or MISSING


# Findings in programs and modelled times are kept apart, in two tables.
READ: Mapping[str, Callable[[Result], str]] = {
    "fits": lambda x: {None: MISSING, True: "yes", False: "no"}[x.fits],
    "a chip holds": _held,
    "sent a step": lambda x: _sent(x, STEP),
    "sent a sync": lambda x: _sent(x, SYNC),
    "ledger": _agreement,
    "compiled in": lambda x: f"{x.answer['compile_seconds']:.1f} s",
    "collectives across workers": _collectives,
}
MODELLED: Mapping[str, Callable[[Times], str]] = {
    "step": lambda x: duration(x.step),
    "sync": lambda x: duration(x.sync + x.every),
    "mean step": lambda x: duration(x.mean),
    "speed-up": lambda x: MISSING if x.speed_up is None else f"{x.speed_up:.3g}×",
    "below 5%": lambda x: MISSING if x.period is None else f"period {x.period}",
}


def _program(result: Result) -> Program:
    """Returns the details of a program, or the reason why there is none."""
    reason = lines = [outcome(result.answer)]
    if result.is_done:
        ledger = _of_ledger(result)
        is_equal = result.comparison is None or result.comparison.is_equal
        reason, lines = [] if is_equal else ledger, [*_of_memory(result), *ledger]
    table = _traffic(result.answer.get("traffic") or ())
    return Program(result.label, result.is_asked, "; ".join(reason), lines, table)


def _traffic(rows: Iterable[traffic.Row]) -> Table:
    """Returns a table of a program's collectives, with all branches joined."""
    merged = defaultdict(Counter)
    for row in rows:
        names = row["scope"], row["when"], row["network"], row["kind"]
        key = *names, " ".join(row["dtypes"]), str(row["group"])
        merged[key].update({x: row[x] for x in ("calls", "bytes", "overlapped")})
    cells = []
    for (*names, group), x in sorted(merged.items()):
        beside = f"{x['overlapped']} of {x['calls']}" if x["overlapped"] else "no"
        cells.append([*names, str(x["calls"]), group, size(x["bytes"]), beside])
    heads = "scope each network kind type calls group bytes overlapped"
    return Table("collectives", heads.split(), cells)


def _of_memory(result: Result) -> list[str]:
    """Returns lines about a chip's memory."""
    answer, lines = result.answer, []
    if memory := answer.get("memory"):
        shown = {name: size(count) for name, count in memory.items()}
        lines.append(
            f"a chip: arguments {shown['arguments']}, temporary {shown['temporary']}, "
            f"outputs {shown['outputs']}, of which {shown['aliased']} in place of "
            "arguments"
        )
        if host := memory["host_arguments"] + memory["host_temporary"]:
            lines.append(f"in its host's memory: {size(host)}")
    names = {"params": "params", "opt_state": "optimizer", "sync": "strategy"}
    parts = (f"{noun} {size(answer['state'][x])}" for x, noun in names.items())
    lines.append(f"of the arguments: {', '.join(parts)}")
    if result.fits is False:
        lines += filter(None, [compilers_words(answer)])
        leaves = [f"{x['name']} {size(x['bytes'])}" for x in answer["largest"]]
        lines.append(f"largest leaves on a chip: {', '.join(leaves)}")
    return lines


def _of_ledger(result: Result) -> list[str]:
    """Returns lines that compare the ledger's bytes with the compiler's."""
    compared = result.comparison
    if compared is None:
        why = result.answer.get("uncounted")
        return [f"ledger: {why}"] if why else []
    lines = [
        f"{row.kind}: the ledger counts {size(row.counted)} of "
        f"{_several(row.calls, 'array')}, the program sends {size(row.found)} by "
        f"{_several(row.collectives, 'collective')}"
        for row in compared.rows
    ]
    if compared.is_equal:
        return [*lines, "the ledger and the program are equal"]
    return [*lines, *(compared.why or ("the difference is not explained",))]


def _notes(target: Target, config: AimConfig) -> list[str]:
    """Returns notes on a target's tables."""
    chip = target.chip
    notes = [f"{chip.name}: {chip.source}"]
    compute = f"matrix products at {config.mfu:g} of the peak (--mfu)"
    if config.step_time is not None:
        compute = f"{duration(config.step_time)} a local step (--step-time)"
    elif chip.flops is None:
        return [
            *notes,
            "no times: the chip has no published peak; set --step-time",
        ]
    notes.append(f"modelled: {compute}, plus the sends that a step waits for")
    links = {"inside": chip.inside, "between": chip.between}
    for (name, x), source in zip(links.items(), chip.link_sources, strict=True):
        link = f"{size(x.bandwidth)}/s, {duration(x.latency)} a hop"
        notes.append(f"{name}: {x.name}, {link}; {source}")
    return notes
