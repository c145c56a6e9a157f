"""The tables that a terminal shows, and their words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.aiming.config import AimConfig
from experiments.aiming.report import comparison
from experiments.aiming.report.records import Result, by_target
from experiments.aiming.targets import Target
from experiments.aiming.times import Times, shares
from experiments.aiming.traffic import ACROSS
from experiments.cli.terminal import MISSING, duration, mesh_text, size

DETAILED = 3  # programs of a target of which a terminal shows everything
# What a compiler says and what a model says are kept apart in every table.
READ = ("fits", "a chip holds", "sent a step", "sent a sync", "ledger", "compiled in")
MODELLED = ("step", "sync", "mean step", "speed-up", "below 5%")
FROM_COMPILER, FROM_MODEL = "read off the program", "modelled"
TRAFFIC = ("scope", "each", "network", "kind", "type", "calls", "group", "bytes")
TRAFFIC += ("overlapped",)


def text(config: AimConfig, found: Sequence[Result]) -> str:
    """Returns all that a terminal shows, target by target."""
    parts = []
    for target, own in by_target(found):
        lines = [head(target, own), *_indented(_summary(own))]
        for number, network in enumerate(config.networks, 1):
            if any(x.times for x in own):
                lines += ["", f"  modelled with {network.name} between workers"]
                lines += _indented(_on_network(own, number))
        asked = [result for result in own if result.is_asked]
        if len(asked) <= DETAILED:
            lines += [line for x in asked for line in ("", *_indented(_details(x)))]
        lines += ["", *_indented(notes(target, config))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def head(target: Target, found: Sequence[Result]) -> str:
    """Returns a line about a target and its workers."""
    slices = f" × {target.slices} slices" if target.slices > 1 else ""
    limit, peak = target.chip.memory, target.chip.flops
    own = [] if limit is None else [f"{size(limit)} of memory"]
    own += [] if peak is None else [f"{peak / 1e12:g} TFLOP/s"]
    line = f"{target.text}{slices}: {_several(target.chips, 'chip')}"
    line += f" of {' and '.join(own)}" if own else ""
    done = next((x.answer for x in found if "workers" in x.answer), None)
    if done is None:
        return line
    each = target.chips * done["lanes"] // done["workers"]
    mesh = f" of {each} chips ({mesh_text(done['mesh'])})" if done["mesh"] else ""
    workers = f"{_several(done['workers'], 'worker')}{mesh}"
    return f"{line}; {workers}, batch {done['batch_size']}, {done['params']:,} params"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def label_of(result: Result) -> str:
    """Returns a program's name in a table."""
    return result.job.variant.label + ("" if result.is_asked else " (for comparison)")


def read_off(result: Result) -> list[str]:
    """Returns the cells of READ."""
    return [
        {None: MISSING, True: "yes", False: "no"}[result.fits],
        _held(result),
        *(_sent(result, when) for when in ("step", "sync")),
        agreement(result),
        f"{result.answer['compile_seconds']:.1f} s",
    ]


def _held(result: Result) -> str:
    limit = result.job.target.chip.memory
    if result.held is None and result.fits is False and limit is not None:
        return f"over {size(limit)}"  # the compiler gave up
    return MISSING if result.held is None else size(result.held)


def modelled(times: Times | None) -> list[str]:
    """Returns the cells of MODELLED."""
    if times is None:
        return [MISSING] * len(MODELLED)
    return [
        duration(times.step),
        duration(times.sync + times.every),
        duration(times.mean),
        MISSING if times.speed_up is None else f"{times.speed_up:.3g}×",
        MISSING if times.period is None else f"period {times.period}",
    ]


def _summary(found: Sequence[Result]) -> list[str]:
    """Returns the lines of a target's table."""
    heads = ["algorithm", *READ, *MODELLED]
    rows = [_row(result) for result in found]
    lines = _aligned([heads, *rows])
    above = f"{FROM_COMPILER:<{lines[0].index(MODELLED[0]) - lines[0].index(READ[0])}}"
    return [" " * lines[0].index(READ[0]) + above + FROM_MODEL, *lines]


def _row(result: Result) -> list[str]:
    if not result.is_done:
        return [label_of(result), outcome(result.answer)]
    times = result.times[0] if result.times else None
    return [label_of(result), *read_off(result), *modelled(times)]


def _on_network(found: Iterable[Result], number: int) -> list[str]:
    """Returns the lines of times on one further network."""
    rows = [[label_of(x), *modelled(x.times[number])] for x in found if x.times]
    return _aligned([["algorithm", *MODELLED], *rows])


def _sent(result: Result, when: str) -> str:
    """Returns what a chip sends to other workers in each step, or in a sync.

    Of syncs that differ it is the one that sends most.
    """
    answer = result.answer
    if answer.get("traffic") is None:
        return MISSING
    here = ACROSS, when
    sent = sum(x["bytes"] for x in answer["traffic"] if (x["scope"], x["when"]) == here)
    if when == "sync" and sent:
        sent *= max(shares(answer, result.job.config.arguments))
        if not sent:  # the run is too short for a sync
            return MISSING
    return size(sent)


def agreement(result: Result) -> str:
    """Returns whether the ledger and the compiler agree, in a word or two."""
    found = result.comparison
    if found is None:
        return "not counted" if result.answer.get("traffic") is not None else MISSING
    return "equal" if found.is_equal else "explained" if found.why else "differs"


def _details(result: Result) -> list[str]:
    """Returns all lines about one program."""
    if not result.is_done:
        return [label_of(result), *_indented([outcome(result.answer)])]
    lines = of_memory(result)
    if rows := of_traffic(result):
        lines += _aligned([list(TRAFFIC), *rows])
    return [label_of(result), *_indented([*lines, *of_ledger(result)])]


def of_memory(result: Result) -> list[str]:
    """Returns lines about what a chip holds."""
    answer, lines = result.answer, []
    if memory := answer.get("memory"):
        shown = {name: size(count) for name, count in memory.items()}
        lines.append(
            f"a chip: arguments {shown['arguments']}, temporary {shown['temporary']}, "
            f"outputs {shown['outputs']}, of which {shown['aliased']} in place of "
            "arguments"
        )
        if host := memory["host_arguments"] + memory["host_temporary"]:
            lines.append(f"its host, for it: {size(host)}")
    state = answer["state"]
    names = {"params": "params", "opt_state": "optimizer", "sync": "strategy"}
    parts = ", ".join(f"{noun} {size(state[name])}" for name, noun in names.items())
    lines.append(f"of the arguments: {parts}")
    if result.fits is not False:
        return lines
    if answer.get("refused"):
        lines.append(f"the compiler: {comparison.first_line(answer['refused'])}")
    leaves = [f"{x['name']} {size(x['bytes'])}" for x in answer["largest"]]
    return [*lines, f"largest leaves on a chip: {', '.join(leaves)}"]


def of_traffic(result: Result) -> list[list[str]]:
    """Returns the cells of TRAFFIC for each kind of collective of a program."""
    merged: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for row in result.answer.get("traffic") or ():
        names = [row[name] for name in ("scope", "when", "network", "kind")]
        key = (*names, " ".join(row["dtypes"]), str(row["group"]))
        before = merged.get(key, {"calls": 0, "bytes": 0, "overlapped": 0})
        merged[key] = {name: before[name] + row[name] for name in before}
    return [
        [
            *key[:-1],
            str(x["calls"]),
            key[-1],
            size(x["bytes"]),
            f"{x['overlapped']} of {x['calls']}" if x["overlapped"] else "no",
        ]
        for key, x in sorted(merged.items())
    ]


def of_ledger(result: Result) -> list[str]:
    """Returns lines about the ledger's bytes beside the compiler's."""
    found = result.comparison
    if found is None:
        why = result.answer.get("uncounted")
        return [f"ledger: {why}"] if why else []
    lines = [
        f"{row.kind}: the ledger counts {size(row.counted)} of "
        f"{_several(row.calls, 'array')}, the program sends {size(row.found)} by "
        f"{_several(row.collectives, 'collective')}"
        for row in found.rows
    ]
    if found.is_equal:
        return [*lines, "the ledger and the program are equal"]
    return [*lines, *(found.why or ("the difference is not explained",))]


def outcome(answer: Mapping[str, Any]) -> str:
    """Returns in a line how a compilation ended."""
    if "error" in answer:
        return f"refused: {answer['error']}"
    if "failed" in answer:
        return f"failed: {answer['failed']}"
    if "timeout" in answer:
        return f"given up after {answer['timeout']:g} s (--timeout)"
    seconds = f"{answer['compile_seconds']:.1f} s"
    if comparison.is_too_large(answer):
        return f"does not fit, as the compiler said after {seconds}"
    if answer.get("refused"):
        return f"the compiler: {comparison.first_line(answer['refused'])}"
    return f"compiled in {seconds}"


def notes(target: Target, config: AimConfig) -> list[str]:
    """Returns what a reader of a target's table must know."""
    chip = f"{target.chip.name}: {target.chip.source}"
    compute = f"products at {config.mfu:g} of the peak (--mfu)"
    if config.step_time is not None:
        compute = f"{duration(config.step_time)} a local step (--step-time)"
    elif target.chip.flops is None:
        return [chip, "no times: the chip has no published peak; give --step-time"]
    links = {"inside": target.inside, "between": target.between}
    return [
        chip,
        f"modelled: {compute}, then the sends that are waited for",
        *(
            f"{name}: {x.name}, {size(x.bandwidth)}/s, {duration(x.latency)} a hop; "
            f"{source}"
            for (name, x), source in zip(links.items(), target.sources, strict=True)
        ),
    ]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows in columns; one that is too short ends with its last cell."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in whole) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return [
        "  ".join(f"{x:<{n}}" for x, n in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
