"""Traffic of a compiled program: when, between whom and over which network."""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from experiments.aiming import hlo, targets

ACROSS, INSIDE = "across workers", "inside a worker"
SYNC, STEP, DISPATCH = "sync", "step", "dispatch"


class Row(NamedTuple):
    """Collectives of one kind.

    Attributes:
        scope: "across workers", or "inside a worker" whose devices alone take part.
        when: "sync", only in a branch; "step", at each local step; "dispatch", once a
            program, outside of the loop over local steps.
        network: "inside" a slice or host, or "between" them, where any of those that
            take part are in different ones.
        kind: as the ledger names it.
        calls: collectives in one such sync, step or dispatch.
        group: the number of devices that take part together; of a permutation 2.
        bytes: that a device sends by rings, in one sync, step or dispatch; of the
            device that sends most, where permutations are of some devices alone.
        overlapped: those of the calls that go on while something is computed.
        rings: of "between", the devices of a group in one place. As many rings can pass
            from place to place, each by its own device's adapter, which then carries
            bytes / rings, as with NCCL. 1 for permutations and all-to-alls, and for
            TPU slices, where the compiler itself cuts arrays for all devices.
        choice: the conditional of a sync. Of the rows with the same choice, those of
            one branch are sent at a step.
        branch: which.
        dtypes: of what is sent.
        promoted: those of the calls whose type the compiler has made wider.
    """

    scope: str
    when: str
    network: str
    kind: str
    calls: int
    group: int
    bytes: Fraction
    overlapped: int
    rings: int = 1
    choice: str = ""
    branch: str = ""
    dtypes: tuple[str, ...] = ()
    promoted: int = 0


def traffic(
    program: hlo.Program,
    devices: Sequence[targets.Device],
    each: int,
) -> list[Row]:
    """Returns what a program sends, alike collectives together.

    Args:
        program: compiled for more than one local step: without a loop all of a step is
            of the dispatch.
        devices: in the order of the program's mesh, those of a worker together.
        each: devices of a worker.

    A row's bytes count loops within a step, as those over layers.
    """
    rows: dict[Row, Row] = {}
    by_device: dict[tuple[Row, int], Fraction] = defaultdict(Fraction)
    ids = {device.id: i for i, device in enumerate(devices)}
    places = [targets.place_of(device) for device in devices]
    for sent in program.collectives:
        groups = _positions(sent, ids)
        row = _row(sent, groups, places, each)
        # All but what adds up.
        key = row._replace(calls=0, bytes=Fraction(), overlapped=0, promoted=0)
        senders = [x[0] for x in groups] if sent.kind == "permute" else [0]
        for device in senders:
            by_device[key, device] += row.bytes
        before = rows.get(key, key)
        rows[key] = before._replace(
            calls=before.calls + row.calls,
            bytes=max(before.bytes, *(by_device[key, x] for x in senders)),
            overlapped=before.overlapped + row.overlapped,
            promoted=before.promoted + row.promoted,
        )
    return [row for row in rows.values() if row.group > 1]


def _positions(sent: hlo.Collective, ids: dict[int, int]) -> list[list[int]]:
    """The groups by positions. Those within a slice stand for all slices."""
    if not sent.slices:
        return sent.groups
    return [[ids[device] for device in group] for group in sent.groups]


def _row(
    sent: hlo.Collective, groups: list[list[int]], places: list[int], each: int
) -> Row:
    is_across = any(len({i // each for i in group}) > 1 for group in groups)
    crossing = [x for x in groups if len({places[i] for i in x}) > 1]
    choice, branch = sent.choices[-1] if sent.choices else ("", "")
    when = SYNC if sent.choices else STEP if sent.is_looped else DISPATCH
    return Row(
        scope=ACROSS if is_across else INSIDE,
        when=when,
        network="between" if crossing else "inside",
        kind=sent.kind,
        calls=sent.times,
        group=len(groups[0]),
        bytes=sent.times * sent.bytes,
        overlapped=sent.times if sent.overlapped else 0,
        rings=_rings(sent.kind, crossing, places),
        choice=choice,
        branch=branch,
        dtypes=sent.dtypes,
        promoted=sent.times if sent.promoted else 0,
    )


def _rings(kind: str, crossing: list[list[int]], places: list[int]) -> int:
    """The least number of devices of a group in one place, for what goes by rings."""
    if kind in ("permute", "all_to_all"):
        return 1
    members = [[places[i] for i in group] for group in crossing]
    return min((min(map(x.count, x)) for x in members), default=1)
