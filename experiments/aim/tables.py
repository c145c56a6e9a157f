"""The report: findings and modelled times, for a terminal or as Markdown."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from experiments.aim import times
from experiments.aim.answer import Answer, Findings, TrafficRow
from experiments.aim.config import MFU, PROGRAM, AimConfig, CompileJob, is_baseline
from experiments.aim.targets import Target
from experiments.aim.times import ACROSS, STEP, SYNC, Times
from experiments.command.terminal import MISSING, duration, format_bytes, mesh_text
from experiments.command.text_tables import Columns, format_text_table, wrap_text

ROUNDING = 1e-6  # relative error of sums of fractions
WIDENED = 16  # largest factor: sums double bytes, float32 takes 4 times, padding 2
_COUNTED_ROWS = ((ACROSS, STEP), (ACROSS, SYNC))  # scopes and times of counted rows
DETAILED = 3  # most programs of a target for which a terminal shows all details
# Columns whose cells may wrap in a narrow terminal, and those that it leaves out, the
# first ones first.
TEXT = "algorithm", "collectives across workers"
OPTIONAL = (
    *("collectives across workers", "compiled in", "ledger"),
    *("all-reduce", "below 5%", "sync", "step"),
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


class LedgerComparison(NamedTuple):
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


def compare_ledger(findings: Findings) -> LedgerComparison | None:
    """Compares the ledger's counts with those found in the program.

    Args:
        findings: the findings in the program.

    Returns:
        The comparison; None without a program, or if the ledger cannot count it.
    """
    ledger = findings.ledger
    if findings.traffic is None or ledger is None:
        return None
    # Metrics are averaged once, after all steps, and are not counted.
    sent_rows = [
        row for row in findings.traffic if (row.scope, row.when) in _COUNTED_ROWS
    ]
    ledger_counts = _sum_kinds([*ledger.always.items(), *ledger.branched.items()])
    program_counts = _sum_kinds((row.kind, (row.bytes, row.calls)) for row in sent_rows)
    rows = []
    for kind in sorted({*ledger_counts, *program_counts}):
        counted_bytes, counted_calls = ledger_counts.get(kind, (0.0, 0))
        program_bytes, program_calls = program_counts.get(kind, (0.0, 0))
        row = Beside(
            kind=kind,
            counted=counted_bytes,
            calls=counted_calls,
            found=program_bytes,
            collectives=program_calls,
        )
        rows.append(row)
    if all(is_close(row.counted, row.found) for row in rows):
        return LedgerComparison(tuple(rows), is_equal=True, why=())
    reasons = _explain(findings, rows, sent_rows)
    return LedgerComparison(tuple(rows), is_equal=False, why=reasons)


def _sum_kinds(
    counts: Iterable[tuple[str, Sequence[Any]]],
) -> dict[str, tuple[float, int]]:
    """Returns the bytes and the calls of each kind."""
    counts_by_kind: dict[str, list[Sequence[Any]]] = defaultdict(list)
    for kind, count in counts:
        counts_by_kind[kind].append(count)
    sums = {}
    for kind, kind_counts in counts_by_kind.items():
        num_bytes = math.fsum(size for size, _ in kind_counts)
        sums[kind] = (num_bytes, sum(calls for _, calls in kind_counts))
    return sums


def is_close(x: float, y: float) -> bool:
    """Whether two numbers of bytes are equal, up to rounding."""
    return math.isclose(x, y, rel_tol=ROUNDING, abs_tol=0.5)


def _explain(
    findings: Findings, rows: Sequence[Beside], sent_rows: Sequence[TrafficRow]
) -> tuple[str, ...]:
    """Returns the reasons for the difference."""
    differing = [x for x in rows if not is_close(x.counted, x.found)]
    kinds = {x.kind for x in differing}
    networks = {x.network for x in sent_rows}
    places = findings.workers // findings.lanes
    reasons = []
    promoted = sum(x.promoted for x in sent_rows)
    if promoted:
        reasons.append(
            f"in {promoted} of the collectives the compiler uses wider numbers than "
            "the algorithm does"
        )
    if findings.lanes > 1:
        reasons.append("a chip has several workers, and the ledger counts one on each")
    counted_bytes = math.fsum(x.counted for x in rows)
    program_bytes = math.fsum(x.found for x in rows)
    if is_close(counted_bytes, program_bytes):
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
    if "between" in networks and findings.slices > 1:
        if "inside" in networks:
            reasons.append(
                "between slices the compiler pads the parts that it sends, after "
                "reducing within each slice"
            )
        else:
            reasons.append("between slices the compiler pads the parts that it sends")
    is_less = all(x.found < x.counted for x in differing)
    if findings.mesh and kinds == {"all_reduce"} and is_less:
        reasons.append(
            "the compiler sends less: if each chip of a worker holds a whole array, "
            "each sends only a part, and the chips gather the parts"
        )
    wide_calls = sum(x.calls for x in sent_rows if x.group > places)
    if wide_calls:
        reasons.append(
            f"the compiler reduces within and across workers at once, in {wide_calls} "
            "of the collectives"
        )
    is_half = all(is_close(x.counted, 2 * x.found) for x in differing)
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
    extra_bytes = {x.kind: x.found - x.counted for x in differing}
    if extra_bytes.keys() != {"all_gather", "all_reduce"}:
        return 0.0, 0.0
    gathered_bytes = -extra_bytes["all_gather"]
    summed_bytes = extra_bytes["all_reduce"]
    if 0 < gathered_bytes <= summed_bytes <= WIDENED * gathered_bytes:
        return gathered_bytes, summed_bytes
    return 0.0, 0.0


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

    job: CompileJob
    answer: Answer
    is_asked: bool
    times: tuple[Times, ...]
    comparison: LedgerComparison | None

    @property
    def label(self) -> str:
        """Its name in tables."""
        label = self.job.variant.label
        return label if self.is_asked else f"{label} (for comparison)"

    @property
    def is_done(self) -> bool:
        """Whether the compiler gave a result, even that the run does not fit."""
        findings = self.answer.findings
        return findings is not None and (not findings.refused or findings.is_too_large)

    @property
    def traffic(self) -> Sequence[TrafficRow] | None:
        """The collectives of the program; None without one."""
        findings = self.answer.findings
        return None if findings is None else findings.traffic

    @property
    def chip_bytes(self) -> int | None:
        """The bytes on a chip while the program runs; None if they are not known."""
        findings = self.answer.findings
        return None if findings is None else findings.chip_bytes

    @property
    def fits(self) -> bool | None:
        """Whether these bytes fit on the chip; None if that is not known."""
        findings = self.answer.findings
        if findings is None:
            return None
        if findings.refused:
            return False if findings.is_too_large else None
        limit = self.job.target.chip.memory
        if findings.chip_bytes is None or limit is None:
            return None
        return findings.chip_bytes <= limit


def outcome(answer: Answer) -> str:
    """Returns how a compilation ended, in one line."""
    if answer.error is not None:
        return f"refused: {answer.error}"
    if answer.failed is not None:
        return f"failed: {answer.failed}"
    findings = answer.findings
    if findings is None:
        return f"given up after {answer.timeout:g} s (--timeout)"
    seconds = findings.compile_seconds
    if findings.is_too_large:
        return f"does not fit: the compiler refused it after {seconds:.1f} s"
    return quote_compiler(findings) or f"compiled in {seconds:.1f} s"


def quote_compiler(findings: Findings) -> str:
    """Returns the first line of a compiler's refusal, without its trace; "" if none."""
    refusal = findings.refused or ""
    if not refusal:
        return ""
    lines = [line.strip() for line in refusal.splitlines() if line.strip()]
    return f"the compiler: {lines[0]}" if lines else "the compiler: no reason"


def make_results(config: AimConfig, answers: Sequence[Answer]) -> tuple[Result, ...]:
    """Returns results in the order of the jobs, one for each answer so far."""
    results = []
    networks = (None, *config.networks)  # None: on the target's own links
    for job, answer in zip(config.jobs, answers, strict=False):
        modelled_times: list[Times] = []
        comparison = None
        if answer.findings is not None:
            comparison = compare_ledger(answer.findings)
            for network in networks:
                modelled = times.model_times(
                    answer.findings, job, network, config.step_time
                )
                if modelled is not None:
                    modelled_times.append(modelled)
        result = Result(
            job=job,
            answer=answer,
            is_asked=job.variant in config.variants,
            times=tuple(modelled_times),
            comparison=comparison,
        )
        results.append(result)
    baselines = {_work(x): x.times for x in results if is_baseline(x.job.variant)}
    return tuple(_add_speed_up(x, baselines.get(_work(x), ())) for x in results)


def _work(result: Result) -> tuple[Target, str]:
    """Returns the machine, and what a local step is: other steps are no speed-up."""
    config = result.job.config
    findings = result.answer.findings
    batch_size = None if findings is None else findings.batch_size
    mesh = None if findings is None else findings.mesh
    settings = (config.task_arguments, config.accumulate, config.optimizer)
    return result.job.target, str((batch_size, mesh, *settings))


def _add_speed_up(result: Result, baseline: Sequence[Times]) -> Result:
    """Returns a result with its speed-up over the baseline, if that has times."""
    pairs = zip(result.times, baseline, strict=False)
    new_times = tuple(x._replace(speed_up=y.mean / x.mean) for x, y in pairs)
    return result._replace(times=new_times or result.times)


def format_text(
    config: AimConfig, results: Sequence[Result], width: int | None = None
) -> str:
    """Returns the text for a terminal.

    Args:
        config: the config of the command.
        results: results of all programs, target by target.
        width: of the terminal; None wraps nothing, and keeps all columns.
    """
    lines: list[str] = []

    def show(indent: int, *texts: str) -> None:
        start = " " * indent
        for line in texts:
            lines.extend(wrap_text(f"{start}{line}", width, start))

    def show_table(indent: int, rows: Table) -> None:
        columns = Columns(TEXT, OPTIONAL, _locate_columns(config))
        table_width = None if width is None else width - indent
        for line in format_text_table(rows, columns, table_width):
            lines.append(f"{' ' * indent}{line}")

    for number, (target, target_results) in enumerate(_group_by_target(results)):
        if number:
            show(0, "")
        show(0, _head(target, target_results))
        for title, rows in _tables(target_results).items():
            show(2, "", title)
            show_table(2, rows)
        detailed = [result for result in target_results if result.is_asked]
        if len(detailed) > DETAILED:
            detailed = []
        for result in detailed:
            show(2, "", result.label)
            show(4, *_memory_lines(result), *_ledger_lines(result))
            if result.traffic:
                show_table(4, _traffic_table(result.traffic))
        reasons = _reasons(x for x in target_results if x not in detailed)
        if reasons:
            show(2, "", *reasons)
        show(2, "", *_notes(target, config))
    return "\n".join(line.rstrip() for line in lines)


def _locate_columns(config: AimConfig) -> str:
    """Returns where all columns are: a file that the command writes, or could write."""
    if config.json is not None:
        return f"all columns are in {config.json}"
    return "--json FILE writes all columns"


def format_markdown(
    config: AimConfig, argv: Sequence[str], results: Sequence[Result]
) -> str:
    """Returns Markdown, to be put into a page of documentation.

    Args:
        config: the config of the command.
        argv: the flags of the command, to repeat it.
        results: results of all programs, target by target.
    """
    command = shlex.join([*PROGRAM.split(), *argv])
    parts = [f"```sh\n{command}\n```", *_versions(results)]
    for target, target_results in _group_by_target(results):
        parts.append(f"## {_head(target, target_results)}")
        for title, rows in _tables(target_results).items():
            parts += [f"**{title}**", _markdown_table(rows)]
        for lines in (_reasons(target_results), _notes(target, config)):
            if lines:
                parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _markdown_table(rows: Table) -> str:
    """Returns a table in Markdown."""
    grid: list[Iterable[str]] = [rows[0].keys(), ["---"] * len(rows[0])]
    grid += [row.values() for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in grid)


def _group_by_target(results: Iterable[Result]) -> list[tuple[Target, list[Result]]]:
    return [(key, [*group]) for key, group in groupby(results, lambda x: x.job.target)]


def _versions(results: Iterable[Result]) -> list[str]:
    """Returns sentences about versions: several if --reuse took older programs."""
    labels = defaultdict(list)
    for result in results:
        findings = result.answer.findings
        if findings is not None and findings.versions:
            text = ", ".join(
                f"{name} {version}" for name, version in findings.versions.items()
            )
            labels[text].append(result.job.variant.label)
    if len(labels) == 1:
        return [f"With {text}." for text in labels]
    return [f"{', '.join(names)} with {text}." for text, names in labels.items()]


def _head(target: Target, results: Iterable[Result]) -> str:
    """Returns the target, and what its programs share; by name what they do not."""
    figures = []
    if target.chip.memory is not None:
        figures.append(f"{format_bytes(target.chip.memory)} of memory")
    if target.chip.flops is not None:
        figures.append(f"{target.chip.flops / 1e12:g} TFLOP/s")
    chips = _several(target.chips, "chip")
    if figures:
        line = f"{target.full_name}: {chips} of {' and '.join(figures)}"
    else:
        line = f"{target.full_name}: {chips}"
    layouts: dict[str, list[str]] = {}
    for result in results:
        if result.answer.findings is not None:
            layouts[result.label] = _layout(target, result.answer.findings)
    first_layout = next(iter(layouts.values()), [])
    shared = {*first_layout}.intersection(*layouts.values())
    labels_by_difference: dict[str, list[str]] = defaultdict(list)
    for label, layout in layouts.items():
        difference = ", ".join(x for x in layout if x not in shared)
        labels_by_difference[difference].append(label)
    parts = [line, ", ".join(x for x in first_layout if x in shared)]
    for difference, labels in labels_by_difference.items():
        if difference:
            parts.append(f"{', '.join(labels)}: {difference}")
    return "; ".join(part for part in parts if part)


def _layout(target: Target, findings: Findings) -> list[str]:
    """Returns the workers, the batch and the params of a program in words."""
    workers = _several(findings.workers, "worker")
    if findings.mesh:
        worker_chips = target.chips * findings.lanes // findings.workers
        workers = f"{workers} of {worker_chips} chips ({mesh_text(findings.mesh)})"
    batch = f"batch {findings.batch_size}"
    return [workers, batch, f"{findings.params:,} params"]


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _tables(results: Iterable[Result]) -> dict[str, Table]:
    """Returns tables by title: findings in the programs, apart from modelled times.

    The times are for the target's own links, then for each further network.
    """
    tables: dict[str, Table] = defaultdict(list)
    for result in results:
        findings = result.answer.findings
        if findings is None or not result.is_done:
            continue
        tables["read off the program"].append(_findings_row(result, findings))
        for modelled in result.times:
            if modelled.network:
                title = f"modelled, with {modelled.network} between workers"
            else:
                title = "modelled, with its own links"
            tables[title].append(_times_row(result, modelled))
    return tables


def _findings_row(result: Result, findings: Findings) -> Row:
    """Returns the findings in a program."""
    chip_memory = result.job.target.chip.memory
    if result.chip_bytes is not None:
        chip_bytes = format_bytes(result.chip_bytes)
    elif result.fits is False and chip_memory is not None:
        chip_bytes = f"over {format_bytes(chip_memory)}"  # the compiler gave up
    else:
        chip_bytes = MISSING
    return {
        "algorithm": result.label,
        "fits": {None: MISSING, True: "yes", False: "no"}[result.fits],
        "a chip holds": chip_bytes,
        "sent a step": _format_sent(result, findings, STEP),
        "sent a sync": _format_sent(result, findings, SYNC),
        "ledger": _agreement(result),
        "compiled in": f"{findings.compile_seconds:.1f} s",
        "collectives across workers": _collectives(findings.traffic or ()),
    }


def _times_row(result: Result, times: Times) -> Row:
    """Returns the modelled times of a program."""
    speed_up = times.speed_up
    period = times.period
    return {
        "algorithm": result.label,
        "step": duration(times.step),
        "sync": duration(times.sync + times.every),
        "mean step": duration(times.mean),
        "speed-up": MISSING if speed_up is None else f"{speed_up:.3g}×",
        "below 5%": MISSING if period is None else f"period {period}",
        "all-reduce": times.all_reduce or MISSING,
    }


def _format_sent(result: Result, findings: Findings, when: str) -> str:
    """Returns the bytes that a chip sends to other workers in each step or sync.

    If syncs differ, it is the one that sends the most.
    """
    if findings.traffic is None:
        return MISSING
    rows = times.select_rows(findings.traffic, ACROSS, when)
    sent_bytes = sum(row.bytes for row in rows)
    if when == SYNC and sent_bytes:
        sent_bytes *= max(times.shares(findings, result.job.period))
        if not sent_bytes:  # the run is too short for a sync
            return MISSING
    return format_bytes(sent_bytes)


def _agreement(result: Result) -> str:
    """Returns whether the ledger and the compiler agree, in one or two words."""
    comparison = result.comparison
    if comparison is None:
        return MISSING if result.traffic is None else "not counted"
    if comparison.is_equal:
        return "equal"
    return "explained" if comparison.why else "differs"


def _collectives(rows: Sequence[TrafficRow]) -> str:
    """Returns the collectives across workers: "a sync: 4 all_reduce f32 of 16"."""
    parts = []
    for when in (SYNC, STEP):
        calls: Counter[tuple[str, int]] = Counter()
        types: dict[tuple[str, int], set[str]] = defaultdict(set)
        for row in times.select_rows(rows, ACROSS, when):
            calls[row.kind, row.group] += row.calls
            types[row.kind, row.group].update(row.dtypes)
        collectives = [
            f"{calls[kind, group]} {kind} {'/'.join(sorted(dtypes))} of {group}"
            for (kind, group), dtypes in sorted(types.items())
        ]
        if collectives:
            parts.append(f"a {when}: {', '.join(collectives)}")
    return "; ".join(parts) or MISSING


def _traffic_table(rows: Iterable[TrafficRow]) -> Table:
    """Returns a table of a program's collectives, with all branches joined."""
    sums: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        dtypes = " ".join(row.dtypes)
        group = str(row.group)
        key = (row.scope, row.when, row.network, row.kind, dtypes, group)
        sums[key].update(
            calls=row.calls,
            bytes=row.bytes,  # pyright: ignore[reportArgumentType]: any number adds up
            overlapped=row.overlapped,
        )
    rows_of_table = []
    for (scope, when, network, kind, dtypes, group), totals in sorted(sums.items()):
        overlapped = "no"
        if totals["overlapped"]:
            overlapped = f"{totals['overlapped']} of {totals['calls']}"
        row_of_table = {
            "scope": scope,
            "each": when,
            "network": network,
            "kind": kind,
            "type": dtypes,
            "calls": str(totals["calls"]),
            "group": group,
            "bytes": format_bytes(totals["bytes"]),
            "overlapped": overlapped,
        }
        rows_of_table.append(row_of_table)
    return rows_of_table


def _reasons(results: Iterable[Result]) -> list[str]:
    """Returns why programs are missing, or differ from the ledger's counts."""
    reasons = []
    for result in results:
        differs = result.comparison is not None and not result.comparison.is_equal
        if differs or not result.is_done:
            reasons.append(f"{result.label}: {'; '.join(_ledger_lines(result))}")
    return reasons


def _memory_lines(result: Result) -> list[str]:
    """Returns lines about a chip's memory; none without a program."""
    findings = result.answer.findings
    lines: list[str] = []
    if findings is None or not result.is_done:
        return lines
    memory = findings.memory
    if memory is not None:
        lines.append(
            f"a chip: arguments {format_bytes(memory.arguments)}, temporary "
            f"{format_bytes(memory.temporary)}, outputs "
            f"{format_bytes(memory.outputs)}, of which "
            f"{format_bytes(memory.aliased)} in place of arguments"
        )
    state = findings.state
    lines.append(
        f"of the arguments: params {format_bytes(state['params'])}, optimizer "
        f"{format_bytes(state['opt_state'])}, strategy {format_bytes(state['sync'])}"
    )
    if result.fits is False:
        quotation = quote_compiler(findings)
        if quotation:
            lines.append(quotation)
        leaves = [
            f"{leaf.name} {format_bytes(leaf.bytes)}" for leaf in findings.largest
        ]
        lines.append(f"largest leaves on a chip: {', '.join(leaves)}")
    return lines


def _ledger_lines(result: Result) -> list[str]:
    """Returns lines that compare the ledger's bytes with those of the program.

    Without a program, it is the line that says why.
    """
    findings = result.answer.findings
    comparison = result.comparison
    if findings is None or not result.is_done:
        return [outcome(result.answer)]
    if comparison is None:
        return [f"ledger: {findings.uncounted}"] if findings.uncounted else []
    lines = [
        f"{row.kind}: the ledger counts {format_bytes(row.counted)} of "
        f"{_several(row.calls, 'array')}, the program sends "
        f"{format_bytes(row.found)} by {_several(row.collectives, 'collective')}"
        for row in comparison.rows
    ]
    if comparison.is_equal:
        return [*lines, "the ledger and the program are equal"]
    return [*lines, *(comparison.why or ("the difference is not explained",))]


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
            f"{name}: {link.name}, {format_bytes(link.bandwidth)}/s, "
            f"{duration(link.latency)} a hop; {source}"
        )
    return notes
