"""The report: findings and modelled times, for a terminal or as Markdown."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid

from experiments.aiming import traffic
from experiments.aiming.config import MFU, PROGRAM, AimConfig
from experiments.aiming.report.records import Result, compilers_words, outcome
from experiments.aiming.targets import Target
from experiments.aiming.times import Times, shares
from experiments.aiming.traffic import ACROSS, STEP, SYNC
from experiments.cli.terminal import MISSING, duration, mesh_text, size

DETAILED = 3  # most programs of a target for which a terminal shows all details
WIDE = 10_000  # characters per line in a file or a pipe: nothing is wrapped


class Table(NamedTuple):
    """A table of text; the first cell of a row names the row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def text(config: AimConfig, results: Sequence[Result]) -> str:
    """Returns the text for a terminal, wrapped to its width.

    Args:
        config: the config of the command.
        results: results of all programs, target by target.
    """
    console = Console(markup=False, emoji=False, highlight=False, color_system=None)
    if not console.is_terminal:
        console.width = WIDE
    with console.capture() as captured:
        for shown, indent in _shown(config, results):
            block = _grid(shown) if isinstance(shown, Table) else shown or " "
            console.print(Padding(block, (0, 0, 0, indent), expand=False))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _shown(
    config: AimConfig, results: Sequence[Result]
) -> Iterator[tuple[str | Table, int]]:
    """Yields the lines and tables of a terminal, each with its indent."""
    for number, (target, found) in enumerate(_by_target(results)):
        yield from [("", 0)] * (number > 0)
        yield _head(target, found), 0
        for table in _tables(config, found):
            yield from (("", 2), (table.title, 2), (table, 2))
        asked = [x for x in found if x.is_asked]
        detailed = asked if len(asked) <= DETAILED else []
        for x in detailed:
            yield from (("", 2), (x.label, 2), *((line, 4) for line in _details(x)))
            rows = x.answer.get("traffic")
            yield from [(_traffic(rows), 4)] if rows else []
        reasons = _reasons(x for x in found if x not in detailed)
        reasons = ["", *reasons] if reasons else []
        yield from ((line, 2) for line in (*reasons, "", *_notes(target, config)))


def _grid(table: Table) -> Grid:
    """Returns a table as a terminal shows it."""
    shown = Grid(*table.heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.columns[0].no_wrap = True
    for row in table.rows:
        shown.add_row(*row)
    return shown


def markdown(config: AimConfig, argv: Sequence[str], results: Sequence[Result]) -> str:
    """Returns Markdown, to be put into a page of documentation.

    Args:
        config: the config of the command.
        argv: the flags of the command, to repeat it.
        results: results of all programs, target by target.
    """
    command = shlex.join([*PROGRAM.split(), *argv])
    parts = [f"```sh\n{command}\n```", *_versions(results)]
    for target, found in _by_target(results):
        parts.append(f"## {_head(target, found)}")
        for table in _tables(config, found):
            lines = [table.heads, ["---"] * len(table.heads), *table.rows]
            grid = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            parts += [f"**{table.title}**", grid]
        for lines in (_reasons(found), _notes(target, config)):
            parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _by_target(results: Iterable[Result]) -> list[tuple[Target, list[Result]]]:
    return [(key, [*group]) for key, group in groupby(results, lambda x: x.job.target)]


def _tables(config: AimConfig, results: Iterable[Result]) -> list[Table]:
    """Returns a table of findings in the programs, and tables of modelled times.

    The times are for the target's own links, then for each further network.
    """
    done = [(x.label, x) for x in results if x.is_done]
    tables = [_table("read off the program", READ, done)]
    between = (f"with {x.name} between workers" for x in config.networks)
    for i, links in enumerate(("with its own links", *between)):
        timed = [(x.label, x.times[i]) for x in results if x.times]
        tables.append(_table(f"modelled, {links}", MODELLED, timed))
    return [table for table in tables if table.rows]


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


def _details(result: Result) -> list[str]:
    """Returns lines about a program's memory and the ledger, or why there is none."""
    if not result.is_done:
        return [outcome(result.answer)]
    return [*_of_memory(result), *_of_ledger(result)]


def _reasons(results: Iterable[Result]) -> list[str]:
    """Returns why programs are missing, or differ from the ledger's counts."""
    return [
        f"{x.label}: {'; '.join(_of_ledger(x) if x.is_done else _details(x))}"
        for x in results
        if not x.is_done or (x.comparison and not x.comparison.is_equal)
    ]


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
    compute = f"matrix products at {MFU:g} of the peak"
    if config.step_time is not None:
        compute = f"{duration(config.step_time)} a local step (--step-time)"
    elif chip.flops is None:
        return [*notes, "no times: the chip has no published peak; set --step-time"]
    notes.append(f"modelled: {compute}, plus the sends that a step waits for")
    links = {"inside": chip.inside, "between": chip.between}
    for (name, x), source in zip(links.items(), chip.link_sources, strict=True):
        link = f"{size(x.bandwidth)}/s, {duration(x.latency)} a hop"
        notes.append(f"{name}: {x.name}, {link}; {source}")
    return notes
