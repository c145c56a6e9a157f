"""The traffic of a compiled program, and the modelled time of its steps and syncs."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.aim import hlo, targets
from experiments.aim.config import MFU, Job
from experiments.training.sends import from_json
from syncalgos.network import Network, cost, smallest_period, wall_clock

ACROSS = "across workers"
INSIDE = "inside a worker"
SYNC = "sync"
STEP = "step"
DISPATCH = "dispatch"
SMALL = 0.05  # the fraction of the time below which communication counts as small
Row = dict[str, Any]  # see `traffic`
Answer = Mapping[str, Any]  # of the process that compiled a program


def rows_of(rows: Iterable[Row], scope: str, when: str) -> list[Row]:
    """Returns the rows with a scope and a time."""
    return [row for row in rows if (row["scope"], row["when"]) == (scope, when)]


def traffic(
    collectives: Iterable[hlo.Collective], devices: Sequence[targets.Device], each: int
) -> list[Row]:
    """Returns what a program sends, with similar collectives in one row.

    Args:
        collectives: those of a program compiled for more than one local step: without
            a loop, all of a step would count as part of the dispatch.
        devices: the devices in the order of the program's mesh, worker by worker.
        each: number of devices of a worker.

    A row's bytes include repetitions in loops within a step, such as over layers. Its
    keys, as in JSON:

    scope: "across workers", or "inside a worker" if only its devices take part.
    when: "sync", only in a branch; "step", at each local step; "dispatch", once per
        program, outside of the loop over local steps.
    network: "inside" a slice or host, or "between" them if devices that take part
        are in different ones.
    kind: the collective's name in the ledger.
    calls: number of collectives in one such sync, step or dispatch.
    group: number of devices that take part together; 2 for a permutation.
    bytes: bytes that a device sends by rings in one sync, step or dispatch; if only
        some devices take part in permutations, those of the busiest device.
    overlapped: number of the calls during which something is computed.
    rings: for "between", the number of a group's devices in one place. As many
        rings can pass from place to place, each over its own device's adapter,
        which then carries bytes / rings, as with NCCL. 1 for permutations and
        all-to-alls, and for TPU slices, where the compiler itself cuts arrays for
        all devices.
    choice: the conditional of a sync. Of the rows with the same choice, a step
        sends those of one branch.
    branch: the branch of that conditional.
    dtypes: types of the sent arrays.
    promoted: number of the calls whose type the compiler has widened.
    """
    rows: dict[str, Row] = {}
    ids = {device.id: i for i, device in enumerate(devices)}
    places = [targets.place_of(device) for device in devices]
    for sent in collectives:
        groups = sent.groups
        if sent.slices:  # the groups within a slice stand for all slices
            groups = [[ids[device] for device in group] for group in groups]
        if len(groups[0]) == 1:
            continue
        new = _row(sent, groups, places, each)
        row = rows.setdefault(str(new), new)
        row["calls"] += sent.times
        row["overlapped"] += sent.times * sent.overlapped
        row["promoted"] += sent.times * sent.promoted
        for device in [x[0] for x in groups] if sent.kind == "permute" else [0]:
            row["bytes"][device] += sent.times * sent.bytes
    syncs = {x["choice"] for x in rows.values() if x["scope"] == ACROSS}
    for row in rows.values():
        row["bytes"] = float(max(row["bytes"].values()))
        # Compilers add conditionals that cut products into windows, in every step.
        if row["when"] == SYNC and row["choice"] not in syncs:
            row["when"] = STEP
    return [*rows.values()]


def _row(
    sent: hlo.Collective, groups: list[list[int]], places: list[int], each: int
) -> Row:
    """Returns the row of a collective, before anything is summed: bytes by device."""
    is_across = any(len({i // each for i in group}) > 1 for group in groups)
    on_places = [[places[i] for i in group] for group in groups]
    crossing = [x for x in on_places if len({*x}) > 1]
    # Permutations and all-to-alls use no rings. For the others, it is the smallest
    # number of devices of a group in one place.
    by_rings = crossing if sent.kind not in ("permute", "all_to_all") else ()
    choice, branch = sent.choices[-1] if sent.choices else ("", "")
    return {
        "scope": ACROSS if is_across else INSIDE,
        "when": SYNC if choice else STEP if sent.is_looped else DISPATCH,
        "network": "between" if crossing else "inside",
        "kind": sent.kind,
        "calls": 0,
        "group": len(groups[0]),
        "bytes": Counter(),
        "overlapped": 0,
        "rings": min((min(map(x.count, x)) for x in by_rings), default=1),
        "choice": choice,
        "branch": branch,
        "dtypes": [*sent.dtypes],
        "promoted": 0,
    }


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


def modelled(
    answer: Answer, job: Job, network: Network | None, step_time: float | None
) -> Times | None:
    """Returns the modelled times of a program; None without a program or a peak.

    Args:
        answer: the result of `compile.compiled`.
        job: what was compiled.
        network: network between workers, in place of the target's own; the chips of a
            worker share it.
        step_time: seconds of a local step's compute, in place of an estimate from its
            operations.
    """
    rows = answer.get("traffic")
    flops = answer.get("flops", {})
    chip = job.target.chip
    if rows is None or not (step_time or chip.flops):
        return None
    peak = MFU * (chip.flops or math.inf)
    compute = step_time or flops["step"] / peak
    own = {"inside": chip.inside, "between": chip.between}
    links = {INSIDE: own, ACROSS: own}
    if network:
        links[ACROSS] = dict.fromkeys(own, network)
        rows = [_by_one_link(row, answer) for row in rows]

    def seconds(scope: str, when: str) -> tuple[float, float]:
        return _seconds(rows_of(rows, scope, when), links[scope])

    waited, hidden = seconds(INSIDE, STEP)
    step = max(compute, hidden) + waited
    every, beside = seconds(ACROSS, STEP)
    every += max(0.0, beside - max(0.0, compute - hidden))
    once = sum(seconds(ACROSS, DISPATCH)) / answer["dispatch_steps"]
    branches = sum(seconds(ACROSS, SYNC)) + sum(seconds(INSIDE, SYNC))
    branches += flops["sync"] / peak
    costs = [branches * share for share in shares(answer, job.period)]
    # `every` already counts the waiting for what each step sends.
    ended = wall_clock(costs, step + every, answer["delay"])
    mean = float(ended[-1]) / len(costs) + once
    period = job.period
    own = job.config.arguments.items()
    # Syncs of another period do not become rarer with this one.
    if period and any(x for name, x in own if name.endswith("_period")):
        late = costs[-max(1, len(costs) // period // 2) * period :]
        period = None if len({*late}) > 2 else period
    return Times(
        network=network.name if network else "",
        compute=compute,
        step=step,
        every=every,
        sync=max(costs),
        mean=mean,
        share=1 - step / mean,
        period=period
        and smallest_period(costs, period, step, SMALL, answer["delay"], every + once),
    )


def _by_one_link(row: Row, answer: Answer) -> Row:
    """Returns a row as if all chips of a worker sent it together over one link."""
    if row["scope"] != ACROSS:
        return row
    chips = math.prod(answer["mesh"].values())
    # A ring through all chips of the workers uses the link in one hop of `members`.
    members = max(1, row["group"] // (answer["workers"] // answer["lanes"]))
    size = row["bytes"] * chips / members
    group = row["group"] // members
    return {**row, "bytes": size, "group": group, "rings": 1}


def _seconds(rows: Iterable[Row], links: Mapping[str, Network]) -> tuple[float, float]:
    """Returns the seconds of rows by the α-β model, one collective after the other.

    The first are waited for, the second overlap with other work.
    """
    waited = hidden = 0.0
    for row in rows:
        # Between hosts each ring uses a separate adapter.
        size = row["bytes"] / (row["rings"] if row["network"] == "between" else 1)
        sent = {row["kind"]: (size, row["calls"])}
        seconds = cost(sent, links[row["network"]], row["group"])
        beside = row["overlapped"] / row["calls"] if row["calls"] else 0.0
        waited += seconds * (1 - beside)
        hidden += seconds * beside
    return waited, hidden


def shares(answer: Answer, period: int | None) -> Sequence[float]:
    """Returns the fraction of all branches' sends that each step of the run sends.

    A program shows all branches of a step; the ledger says which of them a step takes.
    The time of a branch is assumed to be proportional to its bytes.

    Args:
        answer: the result of `compile.compiled`.
        period: the algorithm's period, if it has one.
    """
    if answer["sends"] is None:  # only a run shows it: assume a sync at each chance
        return [float((i + 1) % (period or 1) == 0) for i in range(answer["steps"])]
    found = from_json(answer["sends"])
    ledger = answer["ledger"]
    always = _bytes(ledger["always"])
    whole = _bytes(ledger["branched"])
    sent = map(_bytes, found.kinds)
    of_kinds = [max(0.0, x - always) / whole if whole else 0.0 for x in sent]
    return [of_kinds[kind] for kind in found.steps]


def _bytes(counts: Mapping[str, Sequence[float]]) -> float:
    return sum(size for size, _ in counts.values())
