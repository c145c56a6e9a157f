"""Chooses the Dask workers on which the processes of a run start."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Seat(NamedTuple):
    """A Dask worker that may run a process.

    Attributes:
        address: by which the scheduler knows it.
        host: name, boot and network of its machine, which together identify it.
        folder: the checkout there.
        sees_out: whether the run's folder is the same as for the command.
    """

    address: str
    host: tuple[str, ...]
    folder: str
    sees_out: bool


def choose(
    free: Mapping[str, Seat], count: int, before: Sequence[Seat]
) -> list[Seat] | None:
    """Chooses a worker for each process.

    A process stays where it was, or at least on its host, as its checkpoints may lie
    there. The others lie evenly over the hosts, neighbours together.

    Args:
        free: by address.
        count: of the processes.
        before: the workers of the last attempt; empty before the first.

    Returns:
        A worker for each process; None if there are too few.
    """
    if len(free) < count:
        return None
    left = dict(sorted(free.items()))
    if not before:
        spread = [_take_from_emptiest(left, free) for _ in range(count)]
        # Hosts in the order of their first worker, each host's processes in a row.
        order = list(dict.fromkeys(seat.host for seat in spread))
        return sorted(spread, key=lambda seat: (order.index(seat.host), seat.address))
    found = [left.pop(seat.address, None) for seat in before]
    for process, seat in enumerate(found):
        if seat is None:
            found[process] = _take_from_host(left, before[process].host)
    return [seat or _take_from_emptiest(left, free) for seat in found]


def _take_from_host(left: dict[str, Seat], host: tuple[str, ...]) -> Seat | None:
    there = next((seat for seat in left.values() if seat.host == host), None)
    return None if there is None else left.pop(there.address)


def _take_from_emptiest(left: dict[str, Seat], free: Mapping[str, Seat]) -> Seat:
    """Takes a worker of the host of which the fewest are taken."""
    taken = Counter(seat.host for address, seat in free.items() if address not in left)
    return left.pop(min(left.values(), key=lambda seat: taken[seat.host]).address)
