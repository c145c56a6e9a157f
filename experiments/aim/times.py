"""The traffic of a compiled program, and the modelled time of its steps and syncs."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from experiments.aim import hlo, targets
from experiments.aim.answer import Counts, Findings, TrafficRow
from experiments.aim.config import MFU, CompileJob
from experiments.training.sends import from_json
from syncalgos.network import (
    Network,
    all_reduce_algorithms,
    cost,
    smallest_period,
    wall_clock,
)

ACROSS = "across workers"
INSIDE = "inside a worker"
SYNC = "sync"
STEP = "step"
DISPATCH = "dispatch"
SMALL = 0.05  # the fraction of the time below which communication counts as small


def select_rows(rows: Iterable[TrafficRow], scope: str, when: str) -> list[TrafficRow]:
    """Returns the rows with a scope and a time."""
    return [row for row in rows if (row.scope, row.when) == (scope, when)]


class _Placed(NamedTuple):
    """A collective, with its groups as positions in the program's mesh."""

    collective: hlo.Collective
    groups: list[list[int]]


def traffic(
    collectives: Iterable[hlo.Collective],
    devices: Sequence[targets.Device],
    worker_devices: int,
) -> list[TrafficRow]:
    """Returns what a program sends, with similar collectives in one row.

    Args:
        collectives: those of a program compiled for more than one local step: without
            a loop, all of a step would count as part of the dispatch.
        devices: the devices in the order of the program's mesh, worker by worker.
        worker_devices: number of devices of a worker.
    """
    collectives_by_row: dict[TrafficRow, list[_Placed]] = {}
    positions = {device.id: i for i, device in enumerate(devices)}
    places = [targets.device_place(device) for device in devices]
    for collective in collectives:
        groups = []
        for members in collective.groups:
            if collective.slices:  # the groups within a slice stand for all slices
                groups.append([positions[device_id] for device_id in members])
            else:
                groups.append(members)
        if len(groups[0]) == 1:
            continue
        row = _empty_row(collective, groups, places, worker_devices)
        similar_collectives = collectives_by_row.setdefault(row, [])
        similar_collectives.append(_Placed(collective, groups))
    sync_choices = {row.choice for row in collectives_by_row if row.scope == ACROSS}
    rows = []
    for row, similar_collectives in collectives_by_row.items():
        when = row.when
        # Compilers add conditionals that cut products into windows, in every step.
        if when == SYNC and row.choice not in sync_choices:
            when = STEP
        alike = [placed.collective for placed in similar_collectives]
        full_row = replace(
            row,
            when=when,
            calls=sum(x.times for x in alike),
            bytes=_busiest_bytes(similar_collectives),
            overlapped=sum(x.times * x.overlapped for x in alike),
            promoted=sum(x.times * x.promoted for x in alike),
        )
        rows.append(full_row)
    return rows


def _busiest_bytes(similar_collectives: Iterable[_Placed]) -> float:
    """Returns the bytes of the device that sends the most."""
    bytes_by_device: dict[int, Fraction] = defaultdict(Fraction)
    for collective, groups in similar_collectives:
        senders = [0]  # stands for all: each sends as much
        if collective.kind == "permute":
            senders = [pair[0] for pair in groups]
        for device in senders:
            bytes_by_device[device] += collective.times * collective.bytes
    return float(max(bytes_by_device.values()))


def _empty_row(
    collective: hlo.Collective,
    groups: list[list[int]],
    places: list[int],
    worker_devices: int,
) -> TrafficRow:
    """Returns the row of a collective, before anything is summed."""
    scope = INSIDE
    crossing_groups = []
    for group in groups:
        workers = {device // worker_devices for device in group}
        if len(workers) > 1:
            scope = ACROSS
        group_places = [places[device] for device in group]
        if len({*group_places}) > 1:
            crossing_groups.append(group_places)
    # Permutations and all-to-alls use no rings. For the others, it is the smallest
    # number of devices of a group in one place.
    num_rings = 1
    if crossing_groups and collective.kind not in ("permute", "all_to_all"):
        num_rings = min(min(Counter(x).values()) for x in crossing_groups)
    choice = ""
    branch = ""
    when = STEP if collective.is_looped else DISPATCH
    if collective.choices:
        choice, branch = collective.choices[-1]
        when = SYNC
    return TrafficRow(
        scope=scope,
        when=when,
        network="between" if crossing_groups else "inside",
        kind=collective.kind,
        group=len(groups[0]),
        rings=num_rings,
        choice=choice,
        branch=branch,
        dtypes=tuple(collective.dtypes),
    )


class Times(NamedTuple):
    """The modelled seconds of a run.

    Attributes:
        network: the network between workers; "" is the target's own.
        compute: seconds of a local step's products, at the assumed fraction of peak.
        step: seconds of a local step without communication between workers: compute,
            and communication between a worker's chips.
        every: seconds that each step waits for communication between workers.
        sync: seconds of the step that sends the most; 0 if nothing is sent but `every`.
        mean: mean seconds of a local step over the run, syncs included.
        share: the fraction of the mean taken by communication between workers.
        period: the smallest number of local steps between syncs at which this fraction
            is less than a twentieth; None without a period, if none is enough, or if
            some syncs follow another period.
        speed_up: the speed relative to sync_sgd on the same machine; None if unknown.
        all_reduce: the algorithms of all-reduces across workers, such as "ring"; "" if
            there are none in steps and syncs.
    """

    network: str
    compute: float
    step: float
    every: float
    sync: float
    mean: float
    share: float
    period: int | None
    speed_up: float | None = None
    all_reduce: str = ""


def model_times(
    findings: Findings,
    job: CompileJob,
    network: Network | None,
    step_time: float | None,
) -> Times | None:
    """Returns the modelled times of a program; None without a program or a peak.

    Args:
        findings: the findings in the program.
        job: what was compiled.
        network: network between workers, in place of the target's own; the chips of a
            worker share it.
        step_time: seconds of a local step's compute, in place of an estimate from its
            operations.
    """
    rows = findings.traffic
    chip = job.target.chip
    if rows is None or not (step_time or chip.flops):
        return None
    peak = MFU * (chip.flops or math.inf)
    compute = step_time or findings.flops.step / peak
    target_links = {"inside": chip.inside, "between": chip.between}
    links = {INSIDE: target_links, ACROSS: target_links}
    if network:
        links[ACROSS] = dict.fromkeys(target_links, network)
        rows = [_over_one_link(row, findings) for row in rows]

    def send_seconds(scope: str, when: str) -> SendSeconds:
        return _send_seconds(select_rows(rows, scope, when), links[scope])

    inside_seconds = send_seconds(INSIDE, STEP)
    step = max(compute, inside_seconds.hidden) + inside_seconds.waited
    across_seconds = send_seconds(ACROSS, STEP)
    remaining_compute = max(0.0, compute - inside_seconds.hidden)
    every = across_seconds.waited + max(0.0, across_seconds.hidden - remaining_compute)
    dispatch_seconds = send_seconds(ACROSS, DISPATCH).total / findings.dispatch_steps
    branch_seconds = send_seconds(ACROSS, SYNC).total + send_seconds(INSIDE, SYNC).total
    branch_seconds += findings.flops.sync / peak
    sync_costs = [branch_seconds * share for share in shares(findings, job.period)]
    # `every` already counts the waiting for what each step sends.
    step_ends = wall_clock(sync_costs, step + every, findings.delay)
    mean = float(step_ends[-1]) / len(sync_costs) + dispatch_seconds
    return Times(
        network=network.name if network else "",
        compute=compute,
        step=step,
        every=every,
        sync=max(sync_costs),
        mean=mean,
        share=1 - step / mean,
        period=_enough_period(
            sync_costs, job, step, findings.delay, every + dispatch_seconds
        ),
        all_reduce=_describe_all_reduces(rows, links[ACROSS]),
    )


def _describe_all_reduces(
    rows: Iterable[TrafficRow], links: Mapping[str, Network]
) -> str:
    """Returns the algorithms of all-reduces across workers in steps and syncs."""
    algorithms: set[str] = set()
    for row in rows:
        if row.scope == ACROSS and row.when != DISPATCH:
            kinds = [{row.kind: (_bytes_of_a_ring(row), row.calls)}]
            link = links[row.network]
            algorithms.update(all_reduce_algorithms(kinds, link, row.group))
    return " and ".join(sorted(algorithms))


def _bytes_of_a_ring(row: TrafficRow) -> float:
    """Returns the bytes of a row on one link: between hosts each ring has its own."""
    return row.bytes / (row.rings if row.network == "between" else 1)


def _enough_period(
    sync_costs: Sequence[float],
    job: CompileJob,
    step_seconds: float,
    delay: int,
    constant_seconds: float,
) -> int | None:
    """Returns the smallest period with little communication; see `Times.period`."""
    period = job.period
    if not period:
        return None
    arguments = job.config.arguments.items()
    # Syncs of another period do not become rarer with this one.
    if any(value for name, value in arguments if name.endswith("_period")):
        late_costs = sync_costs[-max(1, len(sync_costs) // period // 2) * period :]
        if len({*late_costs}) > 2:
            return None
    return smallest_period(
        sync_costs, period, step_seconds, SMALL, delay, constant_seconds
    )


def _over_one_link(row: TrafficRow, findings: Findings) -> TrafficRow:
    """Returns a row as if all chips of a worker sent it together over one link."""
    if row.scope != ACROSS:
        return row
    chips = math.prod(findings.mesh.values())
    # A ring through all chips of the workers uses the link in one hop of `members`.
    members = max(1, row.group // (findings.workers // findings.lanes))
    return replace(
        row,
        bytes=row.bytes * chips / members,
        group=row.group // members,
        rings=1,
    )


class SendSeconds(NamedTuple):
    """The modelled seconds of collectives.

    Attributes:
        waited: seconds that a step waits for.
        hidden: seconds that overlap with other work.
    """

    waited: float
    hidden: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.waited + self.hidden


def _send_seconds(
    rows: Iterable[TrafficRow], links: Mapping[str, Network]
) -> SendSeconds:
    """Returns the seconds of rows by the α-β model, one collective after the other."""
    waited = 0.0
    hidden = 0.0
    for row in rows:
        messages = {row.kind: (_bytes_of_a_ring(row), row.calls)}
        seconds = cost(messages, links[row.network], row.group)
        hidden_share = row.overlapped / row.calls if row.calls else 0.0
        waited += seconds * (1 - hidden_share)
        hidden += seconds * hidden_share
    return SendSeconds(waited, hidden)


def shares(findings: Findings, period: int | None) -> Sequence[float]:
    """Returns the fraction of all branches' sends that each step of the run sends.

    A program shows all branches of a step; the ledger says which of them a step takes.
    The time of a branch is assumed to be proportional to its bytes.

    Args:
        findings: the findings in the program.
        period: the algorithm's period, if it has one.
    """
    if findings.sends is None or findings.ledger is None:
        # Only a run shows them: assume a sync at each chance.
        sync_period = period or 1
        return [float((i + 1) % sync_period == 0) for i in range(findings.steps)]
    sends = from_json(findings.sends)
    always_bytes = _sum_bytes(findings.ledger.always)
    branched_bytes = _sum_bytes(findings.ledger.branched)
    shares_by_kind = []
    for messages in sends.kinds:
        extra_bytes = max(0.0, _sum_bytes(messages) - always_bytes)
        share = extra_bytes / branched_bytes if branched_bytes else 0.0
        shares_by_kind.append(share)
    return [shares_by_kind[kind] for kind in sends.steps]


def _sum_bytes(counts: Counts) -> float:
    return sum(size for size, _ in counts.values())
