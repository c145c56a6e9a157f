"""Times of all-reduces, against a schedule that is played message by message.

Each worker sends one message and receives one at a time, both at once.
"""

from typing import NamedTuple

import pytest

from syncalgos.network import Network, all_reduce, all_reduce_algorithms, cost

LATENCY = 0.25
BANDWIDTH = 1000.0
LINK = Network("a link", BANDWIDTH, LATENCY)
RINGS = LINK._replace(rings_only=True)
SIZES = (0.0, 4.0, 100.0, 1000.0, 3000.0, 1e6)
WORKERS = range(2, 17)


class Message(NamedTuple):
    """A part of the array on its way; the parts are numbered."""

    sender: int
    receiver: int
    part: int
    is_sum: bool  # whether it replaces the receiver's part, or is added to it


def make_ring(workers: int) -> list[list[Message]]:
    """The rounds of a ring of as many parts: sums go around once, results once more."""
    rounds = []
    for number in range(2 * (workers - 1)):
        messages = []
        for worker in range(workers):
            part = (worker - number) % workers
            receiver = (worker + 1) % workers
            messages.append(Message(worker, receiver, part, number >= workers - 1))
        rounds.append(messages)
    return rounds


def make_recursive_doubling(workers: int) -> list[list[Message]]:
    """The rounds of whole arrays: workers beyond a power of two send theirs first."""
    power = 1
    while 2 * power <= workers:
        power = 2 * power
    beyond = range(power, workers)
    rounds = []
    if beyond:
        rounds.append([Message(x, x - power, 0, False) for x in beyond])
    distance = 1
    while distance < power:
        rounds.append([Message(x, x ^ distance, 0, False) for x in range(power)])
        distance = 2 * distance
    if beyond:
        rounds.append([Message(x - power, x, 0, True) for x in beyond])
    return rounds


class Played(NamedTuple):
    """What a schedule took: seconds until the last arrival, most sends of a worker."""

    seconds: float
    sent_messages: int


def play(rounds: list[list[Message]], workers: int, parts: int, size: float) -> Played:
    """Plays a schedule by the times at which workers are free and have their data.

    Asserts that in the end each worker has the contribution of each worker once.
    """
    message_seconds = LATENCY + size / parts / BANDWIDTH
    send_free = [0.0] * workers
    receive_free = [0.0] * workers
    sent_messages = [0] * workers
    ready = [[0.0] * parts for _ in range(workers)]
    sums = []  # of each worker and part: the workers whose contributions it holds
    for worker in range(workers):
        sums.append([[worker] for _ in range(parts)])
    for messages in rounds:
        arrivals = []
        for message in messages:
            start = max(
                send_free[message.sender],
                receive_free[message.receiver],
                ready[message.sender][message.part],
            )
            arrival = start + message_seconds
            send_free[message.sender] = arrival
            receive_free[message.receiver] = arrival
            sent_messages[message.sender] += 1
            arrivals.append((message, arrival, [*sums[message.sender][message.part]]))
        for message, arrival, contributions in arrivals:
            earlier_contributions = (
                [] if message.is_sum else sums[message.receiver][message.part]
            )
            sums[message.receiver][message.part] = earlier_contributions + contributions
            ready[message.receiver][message.part] = arrival
    everyone = [*range(workers)]
    for worker_parts in sums:
        assert all(sorted(part) == everyone for part in worker_parts)
    return Played(max(map(max, ready)), max(sent_messages))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_all_reduce_takes_as_long_as_its_messages_one_by_one(workers):
    for size in SIZES:
        ring = play(make_ring(workers), workers, parts=workers, size=size)
        doubling = play(make_recursive_doubling(workers), workers, parts=1, size=size)
        faster = all_reduce(size, LINK, workers)
        by_ring = all_reduce(size, RINGS, workers)

        assert by_ring.seconds == pytest.approx(ring.seconds)
        assert by_ring.messages == ring.sent_messages
        assert faster.seconds == pytest.approx(min(ring.seconds, doubling.seconds))
        if faster.algorithm == "recursive doubling":
            assert doubling.seconds < ring.seconds
            assert faster.bytes == pytest.approx(doubling.sent_messages * size)
        else:
            assert faster == by_ring


def test_small_arrays_take_recursive_doubling_and_large_ones_a_ring():
    kinds = [{}, {"all_reduce": (14 / 8 * 100.0, 1)}, {"permute": (1e6, 1)}]
    large = {"all_reduce": (14 / 8 * 1e6, 1)}
    assert all_reduce_algorithms(kinds, LINK, 8) == ["recursive doubling"]
    assert all_reduce_algorithms([large], LINK, 8) == ["ring"]
    assert all_reduce_algorithms([*kinds, large], LINK, 8) == [
        "recursive doubling",
        "ring",
    ]
    assert all_reduce_algorithms(kinds, RINGS, 8) == ["ring"]
    assert all_reduce_algorithms(kinds, LINK, 1) == []


def test_the_array_of_a_call_decides_and_not_the_bytes_of_a_step():
    """Eight arrays of 100 bytes, each by three messages; fused, one of 800 bytes."""
    kind = {"all_reduce": (8 * 14 / 8 * 100.0, 8)}
    assert cost(kind, LINK, 8) == pytest.approx(8 * 3 * (LATENCY + 0.1))
    assert cost(kind, LINK, 8, fused=True) == pytest.approx(3 * (LATENCY + 0.8))


@pytest.mark.parametrize("workers", range(4, 65))
def test_the_cost_of_all_workers_bounds_that_of_groups(workers):
    """The ledger has the bytes of a group, and not its size."""
    for group in range(2, workers):
        if workers % group == 0:
            for size in SIZES:
                sent_bytes = 2 * (group - 1) / group * size
                seconds = cost({"all_reduce": (sent_bytes, 1)}, LINK, workers)
                group_seconds = all_reduce(size, LINK, group).seconds
                assert seconds >= group_seconds * (1 - 1e-12)
