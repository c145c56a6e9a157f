"""The cost of communication on a network, by the α-β model."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncalgos import checks

if TYPE_CHECKING:
    from syncalgos import Communication


class Sends(NamedTuple):
    """The sends of one worker at each local step of a run.

    Attributes:
        kinds: the kinds of steps, each with bytes and calls by collective; kind 0 sends
            nothing.
        steps: the kind of each local step.
    """

    kinds: list[dict[str, tuple[float, int]]]
    steps: list[int]


def sends(communication: "Communication") -> Sends:
    """Returns the sends at each step, with bytes rounded to thousandths."""
    by_collective = communication.by_collective
    # (1 + steps, collectives, 2); the first row, of zeros, sorts before all others.
    table = np.zeros((1 + len(communication.per_step), len(by_collective), 2))
    for i, counts in enumerate(by_collective.values()):
        # Running totals have rounding errors, by which equal steps would differ.
        table[1:, i, 0] = np.round(np.diff(counts.per_step, prepend=0.0), 3)
        table[1:, i, 1] = np.diff(counts.calls_per_step, prepend=0)
    rows, kind_of_step = np.unique(table, axis=0, return_inverse=True)

    kinds = []
    for row in rows:
        step_sends = {}
        for name, (size, calls) in zip(by_collective, row, strict=True):
            if size or calls:
                step_sends[name] = (float(size), int(calls))
        kinds.append(step_sends)
    return Sends(kinds, kind_of_step.reshape(-1)[1:].tolist())


class Network(NamedTuple):
    """A link between any two workers.

    Attributes:
        name: the name to show.
        bandwidth: bytes per second in each direction.
        latency: seconds of a hop, one way: half a ping.
        rings_only: whether all all-reduces go by rings, as by gloo, and where a chip
            reaches its neighbours alone.
    """

    name: str
    bandwidth: float
    latency: float
    rings_only: bool = False


PRESETS = {
    # 900 GB/s of an H100, half of it each way ("NVIDIA H100 Tensor Core GPU
    # architecture", 2022). A hop of a ring as NCCL's own cost model has it
    # (src/graph/tuning.cc: hwLat, NVLink, ring, simple protocol).
    "nvlink": "450GB/s, 3.4us",
    # IEEE 802.3ae. One way through Linux's TCP, 64 bytes (Belay et al., "IX: a
    # protected dataplane operating system", OSDI 2014).
    "10gbe": "10Gbit/s, 24us",
    # Between regions of the USA, 2 to 5 Gbit/s (Google DeepMind, "Decoupled DiLoCo",
    # 2026). Half of the 89 ms there and back between Azure's West Europe and East US
    # (AzNetworkLatency 0.0.4).
    "two-data-centres": "2Gbit/s, 44.5ms",
    # Upload, which bounds a ring: the median of British homes in 2021, most of them on
    # VDSL (Ofcom, "UK home broadband performance"). From home to home takes one line up
    # and one down, as does there and back on one line: 49 ms for DSL (FCC, "Measuring
    # broadband America", 2014).
    "dsl": "9.8Mbit/s, 49ms",
}
"""Networks by name. Real ones are slower: headers, other traffic and losses add up."""

# Before gloo sends a message, its receiver has to say that it is ready: a hop was
# measured to take two latencies of the link (docs/measured.md, "A real slow link").
GLOO = "gloo"
GLOO_LATENCIES = 2

_BYTES_PER_SECOND: dict[str, float] = {}
for _unit, _per_byte in (("bit/s", 8), ("B/s", 1)):
    for _i, _prefix in enumerate(("", "k", "M", "G", "T")):
        _BYTES_PER_SECOND[f"{_prefix}{_unit}"] = 1000.0**_i / _per_byte
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}  # 2 μ
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)", re.ASCII)


def parse(text: str) -> Network:
    """Returns the network with this name, or with this bandwidth and latency.

    Args:
        text: a name in PRESETS, or text such as "100Mbit/s, 20ms": a bandwidth in bit/s
            or B/s, with k, M, G or T before it, and a one-way latency in ns, us, ms or
            s, in any order; the latency defaults to 0. With "gloo" after them, a hop
            takes two latencies and all-reduces go by rings, as between processes on
            CPUs.

    Raises:
        ValueError: any other text, such as one without a unit or a bandwidth.
    """
    name = "-".join(text.lower().split())
    if name in PRESETS:
        return parse(PRESETS[name])._replace(name=name)
    parts = [part.strip() for part in text.split(",")]
    if parts[-1].lower() == GLOO and parts[1:]:
        link = parse(",".join(parts[:-1]))
        hop = GLOO_LATENCIES * link.latency
        return Network(f"{link.name}, {GLOO}", link.bandwidth, hop, rings_only=True)
    quantities = [_read_quantity(text, part) for part in parts]
    latencies = []
    rates = []
    for number, unit in quantities:
        if unit in _PER_SECOND:
            latencies.append(number / _PER_SECOND[unit])
        else:
            rates.append(number * _BYTES_PER_SECOND[unit])
    if len(latencies) > 1:
        raise _make_error(text, "two latencies")
    if len(rates) > 1:
        raise _make_error(text, "two bandwidths")
    if not rates:
        raise _make_error(text, "no bandwidth")
    if not 0 < rates[0] < math.inf:
        raise _make_error(text, "the bandwidth must be above 0 and finite")
    link_name = ", ".join(f"{number:.15g} {unit}" for number, unit in quantities)
    return Network(link_name, rates[0], sum(latencies, 0.0))


def _read_quantity(text: str, part: str) -> tuple[float, str]:
    """Returns the number and the unit of a part."""
    match = _QUANTITY.fullmatch(part)
    if not match:
        raise _make_error(text, f"{part!r} is neither a preset nor a number", part)
    number = float(match[1])
    unit = match[2]
    if not unit:
        raise _make_error(text, f"{match[1]} has no unit", part)
    if unit not in _BYTES_PER_SECOND and unit not in _PER_SECOND:
        raise _make_error(text, f"unknown unit {unit!r}", part, unit)
    if number < 0 or math.isinf(number):
        raise _make_error(text, f"{part} must be at least 0 and finite")
    return number, unit


def _make_error(text: str, reason: str, part: str = "", unit: str = "") -> ValueError:
    """Returns the error: the reason, all possible forms, and the nearest name."""
    units = [*_BYTES_PER_SECOND, *_PER_SECOND]
    suggestion = checks.nearest(part.lower(), PRESETS) or checks.nearest(unit, units)
    spelled_unit = unit.replace("bps", "bit/s").replace("Bps", "B/s")
    if spelled_unit != unit and spelled_unit in units:
        # MB/s is near by its letters alone.
        suggestion = f"; did you mean {spelled_unit!r}?"
    return ValueError(
        f"network {checks.shown(text)}: {reason}: give a bandwidth (bit/s or B/s, "
        "with k, M, G or T before it) and a latency (ns, us, ms or s), such as "
        f"'100Mbit/s, 20ms', or one of: {', '.join(PRESETS)}{suggestion}"
    )


# The number of messages in sequence of ring algorithms, for N workers.
HOPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "permute": lambda n: 1,
}
RING = "ring"
RECURSIVE_DOUBLING = "recursive doubling"


Kind = Mapping[str, tuple[float, int]]  # bytes and calls by collective


class Transfer(NamedTuple):
    """The messages of one collective in one step.

    Attributes:
        algorithm: "ring" or "recursive doubling"; "" if it is not an all-reduce.
        messages: messages that follow one another.
        bytes: bytes sent by the worker that sends the most.
        seconds: the time that they take.
    """

    algorithm: str
    messages: int
    bytes: float
    seconds: float


def all_reduce(size: float, network: Network, workers: int) -> Transfer:
    """Returns the cheaper of ring and recursive doubling for one all-reduce.

    With N workers, an array of n bytes, and α + bytes · β for each message, where α is
    the latency and β one over the bandwidth:

    - A ring takes 2 (N-1) messages of n/N bytes: 2 (N-1) α + 2 (N-1)/N n β.
    - Recursive doubling exchanges whole sums with the workers at distances 1, 2, 4, …:
      log₂ N (α + n β). If N is no power of two, the workers beyond the largest power
      first send their array to another worker, and receive the result at the end:
      (⌊log₂ N⌋ + 2) (α + n β).

    Each worker sends one message and receives one at a time, both at once. If both
    algorithms take equally long, it is the ring.

    Args:
        size: n, the bytes of the array.
        network: link between any two workers.
        workers: N, at least 2.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005, section 4.5. Its third algorithm, which halves and
    doubles recursively, is not considered: NCCL and gloo do not use it by default.
    """
    hops = HOPS["all_reduce"](workers)
    ring_bytes = hops / workers * size
    ring_seconds = hops * network.latency + ring_bytes / network.bandwidth
    ring = Transfer(RING, hops, ring_bytes, ring_seconds)
    if network.rings_only:
        return ring

    exchanges = workers.bit_length() - 1  # ⌊log₂ N⌋
    is_power_of_two = workers == 2**exchanges
    messages = exchanges if is_power_of_two else exchanges + 2
    # Of the two further messages, a worker sends one and receives the other.
    sent_messages = exchanges if is_power_of_two else exchanges + 1
    doubling = Transfer(
        RECURSIVE_DOUBLING,
        messages,
        sent_messages * size,
        messages * (network.latency + size / network.bandwidth),
    )
    return ring if ring.seconds <= doubling.seconds else doubling


def transfer(
    collective: str,
    size: float,
    calls: int,
    network: Network,
    workers: int,
    fused: bool = False,
) -> Transfer:
    """Returns the messages of one collective's calls in one step.

    Args:
        collective: a collective of HOPS.
        size: bytes that a worker sends by rings in all calls, as in `Sends`.
        calls: number of calls.
        network, workers, fused: as for `cost`.
    """
    arrays = min(calls, 1) if fused else calls
    if collective != "all_reduce" or not arrays:
        messages = HOPS[collective](workers) * arrays
        seconds = messages * network.latency + size / network.bandwidth
        return Transfer("", messages, size, seconds)
    ring_share = HOPS[collective](workers) / workers
    one_array = all_reduce(size / ring_share / arrays, network, workers)
    return Transfer(
        one_array.algorithm,
        arrays * one_array.messages,
        arrays * one_array.bytes,
        arrays * one_array.seconds,
    )


def cost(kind: Kind, network: Network, workers: int, fused: bool = False) -> float:
    """Returns the seconds of one step's collectives, one after the other.

    An all-reduce takes the cheaper of ring and recursive doubling (`all_reduce`). The
    time of others is bytes / bandwidth + latency · hops · calls, where a permutation
    has one hop and all others have N-1, as rings do.

    Args:
        kind: bytes and calls of a step by collective, as in `Sends`.
        network: link between any two workers.
        workers: N, the number of workers for which the bytes were counted.
        fused: whether all calls of one collective in a step are one message, as in
            frameworks that join arrays in buckets.

    The arithmetic of a reduction takes no time. All arrays of a collective in a step
    count as equally large. For collectives within groups of workers (`hierarchical`),
    the time is an upper bound: the bytes are those of the group, but its size is not
    known here.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005.
    """
    if workers == 1:
        return 0.0
    seconds = 0.0
    for collective, (size, calls) in kind.items():
        seconds += transfer(collective, size, calls, network, workers, fused).seconds
    return seconds


def all_reduce_algorithms(
    kinds: Iterable[Kind], network: Network, workers: int, fused: bool = False
) -> list[str]:
    """Returns the algorithms that all-reduces of steps take, each once, sorted.

    Args:
        kinds: bytes and calls of kinds of steps by collective, as in `Sends`.
        network, workers, fused: as for `cost`.
    """
    if workers == 1:
        return []
    algorithms: set[str] = set()
    for kind in kinds:
        for collective, (size, calls) in kind.items():
            messages = transfer(collective, size, calls, network, workers, fused)
            algorithms.add(messages.algorithm)
    return sorted(algorithms - {""})


def modelled_seconds(
    sends: Sends,
    network: Network,
    workers: int,
    step_seconds: float,
    delay: int = 0,
    fused: bool = False,
    since: int = 0,
) -> np.ndarray:
    """Returns the wall clock after each local step, (steps,), of identical workers.

    Without a delay, a step ends when its messages have arrived. With a delay, messages
    of step t must have arrived at the end of step t + delay, and computation continues
    until then. The link sends one message after the other, and a step waits for a late
    arrival.

    Args:
        sends: the sends of one worker.
        network: link between any two workers.
        workers: number of workers for which `sends` was counted; one worker only
            computes.
        step_seconds: seconds of computation of one local step.
        delay: local steps that a message may take, at least 0 (see
            `syncalgos.Strategy.late`).
        fused: as in `cost`.
        since: first local step, from 0, to which the delay applies, as with
            `--sync-until`.

    The last step does not wait for later arrivals, because no result uses them. Within
    a step, nothing overlaps: gradients are sent once all are computed.
    """
    costs = [cost(kind, network, workers, fused) for kind in sends.kinds]
    return wall_clock([costs[x] for x in sends.steps], step_seconds, delay, since)


def wall_clock(
    costs: Sequence[float], step_seconds: float, delay: int = 0, since: int = 0
) -> np.ndarray:
    """Returns the wall clock after each local step, (steps,).

    Args:
        costs: seconds that the messages of each step take.
        step_seconds, delay, since: as in `modelled_seconds`.
    """
    clock = free = 0.0  # the ends of the step and of the link's last message
    arrivals = []
    step_ends = []
    for step, seconds in enumerate(costs):
        clock += step_seconds
        if 0 < delay <= step:
            clock = max(clock, arrivals[step - delay])
        free = max(clock, free) + seconds
        arrivals.append(free)
        if not delay or step < since:
            clock = free
        step_ends.append(clock)
    return np.array(step_ends, float)


def smallest_period(
    costs: Sequence[float],
    period: int,
    step_seconds: float,
    share: float,
    delay: int = 0,
    every: float = 0.0,
    grows: bool = True,
) -> int | None:
    """Returns the smallest period at which communication takes less than a share.

    Args:
        costs: seconds of each step's messages, at a period of `period`.
        period: local steps between two syncs.
        step_seconds: seconds of computation of one local step.
        share: the fraction of the time that communication may take.
        delay: as in `modelled_seconds`.
        every: further seconds per step that no period reduces.
        grows: whether a delay of at least a period grows with it; False if that is
            not known: then the period is long enough in either case.

    Returns:
        The period; None if nothing is sent, or if no period is long enough because of
        what every step sends.
    """
    # Only the later half of the rounds counts: the first ones may differ.
    rounds = max(1, len(costs) // period // 2)
    late_costs = costs[-rounds * period :]
    hides_all = delay >= period
    least_seconds = 0.0 if hides_all or period == 1 else min(late_costs)
    # The sends of every step remain, however long the period.
    allowed_seconds = share / (1 - share) * step_seconds
    left_seconds = allowed_seconds - every - least_seconds
    if not any(late_costs) or left_seconds <= 0:
        return None
    smallest = max(late_costs) / (step_seconds + left_seconds) if hides_all else 0.0
    if not (hides_all and grows):
        waits = [max(0.0, x - least_seconds - delay * step_seconds) for x in late_costs]
        smallest = max(smallest, sum(waits) / rounds / left_seconds)
    return max(1, math.ceil(smallest))
