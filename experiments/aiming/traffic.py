"""The traffic of a compiled program: when, between which devices, on which network.

A row of it has collectives of one kind, with these keys, as in JSON:

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

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.aiming import hlo, targets

ACROSS, INSIDE = "across workers", "inside a worker"
SYNC, STEP, DISPATCH = "sync", "step", "dispatch"


Row = dict[str, Any]  # see above


def of(rows: Iterable[Row], scope: str, when: str) -> list[Row]:
    """Returns the rows with a scope and a time."""
    return [row for row in rows if (row["scope"], row["when"]) == (scope, when)]


def traffic(
    program: hlo.Program, devices: Sequence[targets.Device], each: int
) -> list[Row]:
    """Returns what a program sends, with similar collectives in one row.

    Args:
        program: a program compiled for more than one local step: without a loop, all
            of a step would count as part of the dispatch.
        devices: the devices in the order of the program's mesh, worker by worker.
        each: number of devices of a worker.

    A row's bytes include repetitions in loops within a step, such as over layers.
    """
    rows: dict[str, Row] = {}
    by_device: dict[str, Any] = defaultdict(Counter)
    ids = {device.id: i for i, device in enumerate(devices)}
    places = [targets.place_of(device) for device in devices]
    for sent in program.collectives:
        groups = sent.groups
        if sent.slices:  # the groups within a slice stand for all slices
            groups = [[ids[device] for device in group] for group in groups]
        if len(groups[0]) == 1:
            continue
        names = _names(sent, groups, places, each)
        row = rows.setdefault(key := str(names), names)
        row["calls"] += sent.times
        row["overlapped"] += sent.times * sent.overlapped
        row["promoted"] += sent.times * sent.promoted
        for device in [x[0] for x in groups] if sent.kind == "permute" else [0]:
            by_device[key][device] += sent.times * sent.bytes
    for key, row in rows.items():
        row["bytes"] = float(max(by_device[key].values()))
    syncs = {x["choice"] for x in rows.values() if x["scope"] == ACROSS}
    for row in rows.values():
        # Compilers add conditionals that cut products into windows, in every step.
        if row["when"] == SYNC and row["choice"] not in syncs:
            row["when"] = STEP
    return [*rows.values()]


def _names(
    sent: hlo.Collective, groups: list[list[int]], places: list[int], each: int
) -> Row:
    """Returns the row of a collective, before anything is summed."""
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
        "bytes": 0.0,
        "overlapped": 0,
        "rings": min((min(map(x.count, x)) for x in by_rings), default=1),
        "choice": choice,
        "branch": branch,
        "dtypes": [*sent.dtypes],
        "promoted": 0,
    }
