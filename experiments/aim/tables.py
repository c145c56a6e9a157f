"""The report: findings and modelled times, for a terminal or as Markdown."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from experiments.aim import times
from experiments.aim.config import MFU, PROGRAM, AimConfig, Job, is_baseline
from experiments.aim.targets import Target
from experiments.aim.times import ACROSS, DISPATCH, STEP, SYNC, Answer, Times
from experiments.command.terminal import MISSING, duration, mesh_text, size
from experiments.command.text_tables import Columns, table, wrapped

ROUNDING = 1e-6  # relative error of sums of fractions
WIDENED = 16  # largest factor: sums double bytes, float32 takes 4 times, padding 2
DETAILED = 3  # most programs of a target for which a terminal shows all details
# Columns whose cells may wrap in a narrow terminal, and those that it leaves out, the
# first ones first.
TEXT = "algorithm", "collectives across workers"
OPTIONAL = (
    *("collectives across workers", "compiled in", "ledger"),
    *("below 5%", "sync", "step"),
    *("type", "group", "overlapped", "network"),
)
Row = dict[str, str]  # text by column; the first column names the row
Table = list[Row]


class Beside(NamedTuple):
    """One kind of collective of a device, in a step and all of its branches.

    Attributes:
        kind: kind of collective.
        counted: bytes that the ledger counts.
        calls: number of arrays that the ledger counts.
        found: bytes in the compiled program.
        collectives: number of collectives in the program: XLA may join arrays in one.
    """

    kind: str
    counted: float
    calls: int
    found: float
    collectives: int


class Comparison(NamedTuple):
    """The ledger compared with the compiled program.

    Attributes:
        rows: a row for each kind of collective.
        is_equal: whether all kinds have the same bytes.
        why: the reasons for the difference; () if there is no difference or no known
            reason.
    """

    rows: tuple[Beside, ...]
    is_equal: bool
    why: tuple[str, ...]


def compared(answer: Answer) -> Comparison | None:
    """Compares the ledger's counts with those found in the program.

    Args:
        answer: the result of `compile.compiled`.

    Returns:
        The comparison; None without a program, or if the ledger cannot count it.
    """
    traffic = answer.get("traffic")
    ledger = answer.get("ledger")
    if traffic is None or ledger is None:
        return None
    # Metrics are averaged once, after all steps, and are not counted.
    sent = [x for x in traffic if x["scope"] == ACROSS and x["when"] != DISPATCH]
    found = [(x["kind"], (x["bytes"], x["calls"])) for x in sent]
    counted = [*ledger["always"].items(), *ledger["branched"].items()]
    kinds = sorted({kind for kind, _ in counted + found})
    rows = tuple(Beside(x, *_total(counted, x), *_total(found, x)) for x in kinds)
    is_equal = all(_same(x.counted, x.found) for x in rows)
    return Comparison(rows, is_equal, () if is_equal else _why(answer, rows, sent))


def _total(sent: Iterable[tuple[str, Sequence[Any]]], kind: str) -> tuple[float, int]:
    """Returns the bytes and the calls of one kind."""
    of_kind = [x for name, x in sent if name == kind]
    return math.fsum(size for size, _ in of_kind), sum(calls for _, calls in of_kind)


def _same(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=ROUNDING, abs_tol=0.5)


def _why(
    answer: Answer, rows: Sequence[Beside], sent: Sequence[times.Row]
) -> tuple[str, ...]:
    """Returns the reasons for the difference."""
    differing = [x for x in rows if not _same(x.counted, x.found)]
    kinds = {x.kind for x in differing}
    networks = {x["network"] for x in sent}
    places = answer["workers"] // answer["lanes"]
    reasons = []
    promoted = sum(x.get("promoted", 0) for x in sent)
    if promoted:
        reasons.append(
            f"in {promoted} of the collectives the compiler uses wider numbers than "
            "the algorithm does"
        )
    if answer["lanes"] > 1:
        reasons.append("a chip has several workers, and the ledger counts one on each")
    counted_bytes = math.fsum(x.counted for x in rows)
    program_bytes = math.fsum(x.found for x in rows)
    if _same(counted_bytes, program_bytes):
        reasons.append(
            "the compiler uses other collectives for the same bytes: "
            f"{' and '.join(sorted(kinds))}"
        )
    gathered_bytes, summed_bytes = _gathered_by_sums(differing)
    if gathered_bytes:
        reasons.append(
            f"the compiler turns small all-gathers ({gathered_bytes:,.0f} B) into "
            f"all-reduces ({summed_bytes:,.0f} B)"
        )
    if "between" in networks and answer["slices"] > 1:
        if "inside" in networks:
            reasons.append(
                "between slices the compiler pads the parts that it sends, after "
                "reducing within each slice"
            )
        else:
            reasons.append("between slices the compiler pads the parts that it sends")
    is_less = all(x.found < x.counted for x in differing)
    if answer["mesh"] and kinds == {"all_reduce"} and is_less:
        reasons.append(
            "the compiler sends less: if each chip of a worker holds a whole array, "
            "each sends only a part, and the chips gather the parts"
        )
    wide_calls = sum(x["calls"] for x in sent if x["group"] > places)
    if wide_calls:
        reasons.append(
            f"the compiler reduces within and across workers at once, in {wide_calls} "
            "of the collectives"
        )
    is_half = all(_same(x.counted, 2 * x.found) for x in differing)
    if places == 2 and kinds == {"permute"} and is_half:
        reasons.append(
            "each of two workers is both neighbours of the other, and gets one message"
        )
    return tuple(reasons)


def _gathered_by_sums(differing: Iterable[Beside]) -> tuple[float, float]:
    """Returns the bytes of missing gathers, and those of the sums that replace them.

    Summing arrays that are zero except for a worker's own part gathers these parts. It
    takes twice the bytes, or more if the type becomes wider.
    """
    by_kind = {x.kind: x.found - x.counted for x in differing}
    if by_kind.keys() != {"all_gather", "all_reduce"}:
        return 0.0, 0.0
    less = -by_kind["all_gather"]
    more = by_kind["all_reduce"]
    return (less, more) if 0 < less <= more <= WIDENED * less else (0.0, 0.0)


class Result(NamedTuple):
    """The findings about a program.

    Attributes:
        job: the program to compile.
        answer: the answer of its process: findings, or why there is no program.
        is_asked: whether the user requested it; others are only for the speed-up.
        times: modelled times on the target's own links, then on each further network;
            () if they are not known.
        comparison: the comparison of ledger and compiler; None without a program.
    """

    job: Job
    answer: Answer
    is_asked: bool
    times: tuple[Times, ...]
    comparison: Comparison | None

    @property
    def label(self) -> str:
        """Its name in tables."""
        label = self.job.variant.label
        return label if self.is_asked else f"{label} (for comparison)"

    @property
    def is_done(self) -> bool:
        """Whether the compiler gave a result, even that the run does not fit."""
        is_told = not self.answer.get("refused") or is_too_large(self.answer)
        return "compile_seconds" in self.answer and is_told

    @property
    def held(self) -> int | None:
        """The bytes on a chip while the program runs; None if they are not known.

        Outputs that replace arguments, such as the donated state, count once.
        """
        memory = self.answer.get("memory")
        if memory is None:
            return self.answer.get("needed")
        total = memory["arguments"] + memory["outputs"] - memory["aliased"]
        return total + memory["temporary"] + memory["code"]

    @property
    def fits(self) -> bool | None:
        """Whether these bytes fit on the chip; None if that is not known."""
        if self.answer.get("refused"):
            return False if is_too_large(self.answer) else None
        limit = self.job.target.chip.memory
        return None if self.held is None or limit is None else self.held <= limit


def is_too_large(answer: Answer) -> bool:
    """Whether the compiler refused a program because memory does not suffice."""
    text = answer.get("refused") or ""
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def outcome(answer: Answer) -> str:
    """Returns how a compilation ended, in one line."""
    if "error" in answer:
        return f"refused: {answer['error']}"
    if "failed" in answer:
        return f"failed: {answer['failed']}"
    if "timeout" in answer:
        return f"given up after {answer['timeout']:g} s (--timeout)"
    seconds = answer["compile_seconds"]
    if is_too_large(answer):
        return f"does not fit: the compiler refused it after {seconds:.1f} s"
    return compilers_words(answer) or f"compiled in {seconds:.1f} s"


def compilers_words(answer: Answer) -> str:
    """Returns the first line of a compiler's refusal, without its trace; "" if none."""
    refusal = answer.get("refused") or ""
    if not refusal:
        return ""
    lines = [line.strip() for line in refusal.splitlines() if line.strip()]
    return f"the compiler: {lines[0]}" if lines else "the compiler: no reason"


def results(config: AimConfig, answers: Sequence[Answer]) -> tuple[Result, ...]:
    """Returns results in the order of the jobs, one for each answer so far."""
    found = []
    each = (None, *config.networks)  # None: on the target's own links
    for job, answer in zip(config.jobs, answers, strict=False):
        modelled = [times.modelled(answer, job, x, config.step_time) for x in each]
        known = tuple(x for x in modelled if x is not None)
        is_asked = job.variant in config.variants
        found.append(Result(job, answer, is_asked, known, compared(answer)))
    baselines = {_work(x): x.times for x in found if is_baseline(x.job.variant)}
    return tuple(_sped_up(x, baselines.get(_work(x), ())) for x in found)


def _work(x: Result) -> tuple[Target, str]:
    """Returns the machine, and what a local step is: other steps are no speed-up."""
    c = x.job.config
    own = (x.answer.get("batch_size"), x.answer.get("mesh"))
    return x.job.target, str((*own, c.task_arguments, c.accumulate, c.optimizer))


def _sped_up(result: Result, baseline: Sequence[Times]) -> Result:
    """Returns a result with its speed-up over the baseline, if that has times."""
    pairs = zip(result.times, baseline, strict=False)
    faster = tuple(x._replace(speed_up=y.mean / x.mean) for x, y in pairs)
    return result._replace(times=faster or result.times)


def text(config: AimConfig, results: Sequence[Result], width: int | None = None) -> str:
    """Returns the text for a terminal.

    Args:
        config: the config of the command.
        results: results of all programs, target by target.
        width: of the terminal; None wraps nothing, and keeps all columns.
    """
    lines = []

    def show(indent: int, *texts: str) -> None:
        start = " " * indent
        for each in texts:
            lines.extend(wrapped(f"{start}{each}", width, start))

    def show_table(indent: int, rows: Table) -> None:
        columns = Columns(TEXT, OPTIONAL, _elsewhere(config))
        table_width = None if width is None else width - indent
        for line in table(rows, columns, table_width):
            lines.append(f"{' ' * indent}{line}")

    for number, (target, found) in enumerate(_by_target(results)):
        if number:
            show(0, "")
        show(0, _head(target, found))
        for title, rows in _tables(found).items():
            show(2, "", title)
            show_table(2, rows)
        asked = [x for x in found if x.is_asked]
        detailed = asked if len(asked) <= DETAILED else []
        for x in detailed:
            show(2, "", x.label)
            show(4, *_of_memory(x), *_of_ledger(x))
            rows = x.answer.get("traffic")
            if rows:
                show_table(4, _traffic(rows))
        reasons = _reasons(x for x in found if x not in detailed)
        if reasons:
            show(2, "", *reasons)
        show(2, "", *_notes(target, config))
    return "\n".join(line.rstrip() for line in lines)


def _elsewhere(config: AimConfig) -> str:
    """Returns where all columns are: a file that the command writes, or could write."""
    if config.json is not None:
        return f"all columns are in {config.json}"
    return "--json FILE writes all columns"


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
        for title, rows in _tables(found).items():
            lines = [[*rows[0]], ["---"] * len(rows[0]), *(x.values() for x in rows)]
            grid = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            parts += [f"**{title}**", grid]
        for lines in (_reasons(found), _notes(target, config)):
            if lines:
                parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _by_target(results: Iterable[Result]) -> list[tuple[Target, list[Result]]]:
    return [(key, [*group]) for key, group in groupby(results, lambda x: x.job.target)]


def _versions(results: Iterable[Result]) -> list[str]:
    """Returns sentences about versions: several if --reuse took older programs."""
    labels = defaultdict(list)
    for x in results:
        versions = x.answer.get("versions")
        if versions:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            labels[text].append(x.job.variant.label)
    if len(labels) == 1:
        return [f"With {text}." for text in labels]
    return [f"{', '.join(names)} with {text}." for text, names in labels.items()]


def _head(target: Target, results: Iterable[Result]) -> str:
    """Returns the target, and what its programs share; by name what they do not."""
    figures = []
    if target.chip.memory is not None:
        figures.append(f"{size(target.chip.memory)} of memory")
    if target.chip.flops is not None:
        figures.append(f"{target.chip.flops / 1e12:g} TFLOP/s")
    chips = _several(target.chips, "chip")
    if figures:
        line = f"{target.shown}: {chips} of {' and '.join(figures)}"
    else:
        line = f"{target.shown}: {chips}"
    layouts = {
        x.label: _layout(target, x.answer) for x in results if "workers" in x.answer
    }
    first_layout = next(iter(layouts.values()), [])
    shared = [x for x in first_layout if all(x in y for y in layouts.values())]
    labels_by_difference = defaultdict(list)
    for label, layout in layouts.items():
        difference = ", ".join(x for x in layout if x not in shared)
        labels_by_difference[difference].append(label)
    parts = [line, ", ".join(shared)]
    for difference, labels in labels_by_difference.items():
        if difference:
            parts.append(f"{', '.join(labels)}: {difference}")
    return "; ".join(part for part in parts if part)


def _layout(target: Target, answer: Answer) -> list[str]:
    """Returns the workers, the batch and the params of a program in words."""
    workers = _several(answer["workers"], "worker")
    if answer["mesh"]:
        worker_chips = target.chips * answer["lanes"] // answer["workers"]
        workers = f"{workers} of {worker_chips} chips ({mesh_text(answer['mesh'])})"
    return [workers, f"batch {answer['batch_size']}", f"{answer['params']:,} params"]


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _tables(results: Iterable[Result]) -> dict[str, Table]:
    """Returns tables by title: findings in the programs, apart from modelled times.

    The times are for the target's own links, then for each further network.
    """
    tables = defaultdict(list)
    for result in results:
        if result.is_done:
            tables["read off the program"].append(_findings(result))
            for x in result.times:
                if x.network:
                    title = f"modelled, with {x.network} between workers"
                else:
                    title = "modelled, with its own links"
                tables[title].append(_modelled(result, x))
    return tables


def _findings(result: Result) -> Row:
    """Returns the findings in a program."""
    chip_memory = result.job.target.chip.memory
    if result.held is not None:
        held_bytes = size(result.held)
    elif result.fits is False and chip_memory is not None:
        held_bytes = f"over {size(chip_memory)}"  # the compiler gave up
    else:
        held_bytes = MISSING
    return {
        "algorithm": result.label,
        "fits": {None: MISSING, True: "yes", False: "no"}[result.fits],
        "a chip holds": held_bytes,
        "sent a step": _sent(result, STEP),
        "sent a sync": _sent(result, SYNC),
        "ledger": _agreement(result),
        "compiled in": f"{result.answer['compile_seconds']:.1f} s",
        "collectives across workers": _collectives(result.answer.get("traffic") or ()),
    }


def _modelled(result: Result, times: Times) -> Row:
    """Returns the modelled times of a program."""
    faster = times.speed_up
    period = times.period
    return {
        "algorithm": result.label,
        "step": duration(times.step),
        "sync": duration(times.sync + times.every),
        "mean step": duration(times.mean),
        "speed-up": MISSING if faster is None else f"{faster:.3g}×",
        "below 5%": MISSING if period is None else f"period {period}",
    }


def _sent(result: Result, when: str) -> str:
    """Returns the bytes that a chip sends to other workers in each step or sync.

    If syncs differ, it is the one that sends the most.
    """
    rows = result.answer.get("traffic")
    if rows is None:
        return MISSING
    sent = sum(row["bytes"] for row in times.rows_of(rows, ACROSS, when))
    if when == SYNC and sent:
        sent *= max(times.shares(result.answer, result.job.period))
        if not sent:  # the run is too short for a sync
            return MISSING
    return size(sent)


def _agreement(result: Result) -> str:
    """Returns whether the ledger and the compiler agree, in one or two words."""
    comparison = result.comparison
    if comparison is None:
        return MISSING if result.answer.get("traffic") is None else "not counted"
    if comparison.is_equal:
        return "equal"
    return "explained" if comparison.why else "differs"


def _collectives(traffic: Iterable[times.Row]) -> str:
    """Returns the collectives across workers: "a sync: 4 all_reduce f32 of 16"."""
    parts = []
    for when in (SYNC, STEP):
        calls = Counter()
        types = defaultdict(set)
        for row in times.rows_of(traffic, ACROSS, when):
            calls[row["kind"], row["group"]] += row["calls"]
            types[row["kind"], row["group"]].update(row["dtypes"])
        alike = [
            f"{calls[kind, group]} {kind} {'/'.join(sorted(dtypes))} of {group}"
            for (kind, group), dtypes in sorted(types.items())
        ]
        parts += [f"a {when}: {', '.join(alike)}"] if alike else []
    return "; ".join(parts) or MISSING


def _traffic(rows: Iterable[times.Row]) -> Table:
    """Returns a table of a program's collectives, with all branches joined."""
    heads = ["scope", "each", "network", "kind", "type"]
    heads += ["calls", "group", "bytes", "overlapped"]
    merged = defaultdict(Counter)
    for row in rows:
        names = row["scope"], row["when"], row["network"], row["kind"]
        key = *names, " ".join(row["dtypes"]), str(row["group"])
        merged[key].update({x: row[x] for x in ("calls", "bytes", "overlapped")})
    rows_of_table = []
    for (*names, group), x in sorted(merged.items()):
        beside = f"{x['overlapped']} of {x['calls']}" if x["overlapped"] else "no"
        cells = *names, str(x["calls"]), group, size(x["bytes"]), beside
        rows_of_table.append(dict(zip(heads, cells, strict=True)))
    return rows_of_table


def _reasons(results: Iterable[Result]) -> list[str]:
    """Returns why programs are missing, or differ from the ledger's counts."""
    return [
        f"{x.label}: {'; '.join(_of_ledger(x))}"
        for x in results
        if not x.is_done or (x.comparison and not x.comparison.is_equal)
    ]


def _of_memory(result: Result) -> list[str]:
    """Returns lines about a chip's memory; none without a program."""
    answer = result.answer
    lines = []
    if not result.is_done:
        return lines
    memory = answer.get("memory")
    if memory:
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
    """Returns lines that compare the ledger's bytes with those of the program.

    Without a program, it is the line that says why.
    """
    compared = result.comparison
    if not result.is_done:
        return [outcome(result.answer)]
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
    if config.step_time is not None:
        notes.append(
            f"modelled: {duration(config.step_time)} a local step (--step-time), plus "
            "the sends that a step waits for"
        )
    elif chip.flops is None:
        return [*notes, "no times: the chip has no published peak; set --step-time"]
    else:
        notes.append(
            f"modelled: matrix products at {MFU:g} of the peak, plus the sends that a "
            "step waits for"
        )
    links = {"inside": chip.inside, "between": chip.between}
    for (name, link), source in zip(links.items(), chip.link_sources, strict=True):
        notes.append(
            f"{name}: {link.name}, {size(link.bandwidth)}/s, {duration(link.latency)} "
            f"a hop; {source}"
        )
    return notes
