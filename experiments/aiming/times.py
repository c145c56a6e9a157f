"""The modelled time of steps and syncs, from the findings in a program."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.aiming import traffic
from experiments.aiming.targets import Target
from experiments.aiming.traffic import ACROSS, DISPATCH, INSIDE, STEP, SYNC, Row
from experiments.study.network import Network, cost, wall_clock
from experiments.training.measurements.sends import Sends, from_json

SMALL = 0.05  # the fraction of the time below which communication counts as small


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
            is less than a twentieth; None without a period, or if none is enough.
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
    record: Mapping[str, Any],
    target: Target,
    mfu: float,
    arguments: Mapping[str, Any],
    network: Network | None = None,
    step_seconds: float | None = None,
) -> Times | None:
    """Returns the modelled times of a program; None without a program or a peak.

    Args:
        record: the result of `prepare.compiled`.
        target: the machine.
        mfu: fraction of its chips' peak that products reach.
        arguments: arguments of the algorithm.
        network: network between workers, in place of the target's own; the chips of a
            worker share it.
        step_seconds: seconds of a local step's compute, in place of an estimate from
            its operations.
    """
    flops, compute = record.get("flops", {}), step_seconds
    if record.get("traffic") is None or not (compute or target.chip.flops):
        return None
    rows, peak = record["traffic"], mfu * (target.chip.flops or math.inf)
    compute = compute or flops["step"] / peak
    links = {"inside": target.chip.inside, "between": target.chip.between}
    waited, hidden = _seconds(traffic.of(rows, INSIDE, STEP), links)
    step = max(compute, hidden) + waited
    crossing = links
    if network:
        crossing = dict.fromkeys(links, network)
        rows = [_by_one_link(row, record) for row in rows]
    every, beside = _seconds(traffic.of(rows, ACROSS, STEP), crossing)
    every += max(0.0, beside - max(0.0, compute - hidden))
    once = sum(_seconds(traffic.of(rows, ACROSS, DISPATCH), crossing))
    once /= record["dispatch_steps"]
    branches = sum(_seconds(traffic.of(rows, ACROSS, SYNC), crossing))
    branches += sum(_seconds(traffic.of(rows, INSIDE, SYNC), links))
    branches += flops["sync"] / peak
    costs = [branches * share for share in shares(record, arguments)]
    # `every` already counts the waiting for what each step sends.
    ended = wall_clock(costs, step + every, record["delay"])
    mean = float(ended[-1]) / len(costs) + once
    return Times(
        network=network.name if network else "",
        compute=compute,
        step=step,
        every=every,
        sync=max(costs),
        mean=mean,
        share=1 - step / mean,
        period=_period(costs, arguments, step, every + once, record["delay"]),
    )


def _by_one_link(row: Row, record: Mapping[str, Any]) -> Row:
    """Returns a row as if all chips of a worker sent it together over one link."""
    if row["scope"] != ACROSS:
        return row
    chips = math.prod(record["mesh"].values())
    # A ring through all chips of the workers uses the link in one hop of `members`.
    members = max(1, row["group"] // (record["workers"] // record["lanes"]))
    size, group = row["bytes"] * chips / members, row["group"] // members
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


def shares(record: Mapping[str, Any], arguments: Mapping[str, Any]) -> Sequence[float]:
    """Returns the fraction of all branches' sends that each step of the run sends.

    A program shows all branches of a step; the ledger says which of them a step takes.
    The time of a branch is assumed to be proportional to its bytes.

    Args:
        record: the result of `prepare.compiled`.
        arguments: arguments of the algorithm.
    """
    steps, ledger = record["steps"], record["ledger"]
    if record["sends"] is None:  # only a run shows it: assume a sync at each chance
        period = _period_of(arguments) or 1
        return [float((i + 1) % period == 0) for i in range(steps)]
    found: Sends = from_json(record["sends"])
    always, whole = _bytes(ledger["always"]), _bytes(ledger["branched"])
    sent = [sum(size for size, _ in kind.values()) for kind in found.kinds]
    of_kinds = [max(0.0, x - always) / whole if whole else 0.0 for x in sent]
    return [of_kinds[kind] for kind in found.steps]


def _bytes(counts: Mapping[str, Sequence[float]]) -> float:
    return sum(size for size, _ in counts.values())


def _period_of(arguments: Mapping[str, Any]) -> int | None:
    """Returns an algorithm's period, if it has one."""
    period = arguments.get("period")
    return period if type(period) is int else None


def _period(
    costs: Sequence[float],
    arguments: Mapping[str, Any],
    step: float,
    every: float,
    delay: int,
) -> int | None:
    """Returns the smallest period at which communication takes less than SMALL.

    Args:
        costs: seconds of each step's sync.
        arguments: arguments of the algorithm.
        step: seconds of a local step.
        every: seconds per step that no period reduces, with those of each dispatch.
        delay: local steps that hide a sync.
    """
    period = _period_of(arguments)
    if period is None:
        return None
    # Only the later half of the rounds counts: the first ones may differ.
    rounds = max(1, len(costs) // period // 2)
    late = costs[-rounds * period :]
    if not any(late):
        return None
    # The sends of every step remain, however long the period.
    left = SMALL / (1 - SMALL) * step - every
    if delay >= period:  # each sync has a whole round, however long it is
        return max(1, math.ceil(max(late) / (step + left))) if left > 0 else None
    least = min(late) if period > 1 else 0.0
    left -= least
    waited = sum(max(0.0, x - least - delay * step) for x in late) / rounds
    return max(1, math.ceil(waited / left)) if left > 0 else None
