"""A plan of communication: how long a strategy's syncs take on a network."""

import functools
import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos import network as net
from syncalgos._calls import suggest_arguments
from syncalgos._description import describe
from syncalgos._ledger.counting import Communication, communication
from syncalgos.collectives import PyTree
from syncalgos.collectives._messages import AS_GLOO
from syncalgos.network import Network
from syncalgos.strategy import Replica, Strategy, check_strategy

PLANNED_ROUNDS = 8
MAX_WINDOW = 2**20  # local steps in which unlike periods have to meet
MAX_SEARCH_STEPS = 2**14  # local steps within which two syncs are looked for


class Plan(NamedTuple):
    """The communication of a strategy on a network; `str` of it is a paragraph.

    Attributes:
        workers: the number of workers.
        network: the link between any two of them.
        step_seconds: seconds of computation of one local step.
        steps: the local steps that are planned for.
        late: local steps that a message may take before a worker waits for it, if the
            program sends while it computes. No compiler of jax arranges that today.
        period: local steps between two syncs; None if they are not regular.
        syncs: the number of these steps at which anything is sent.
        bytes: bytes that a worker sends in a sync, on average; by recursive doubling
            more than `communication` counts, which assumes rings.
        messages: messages of a sync that follow one another, on average.
        seconds: seconds of a sync, on average.
        share: the fraction of the time that the workers wait for messages.
        limit: the share that was asked for.
        enough: the smallest period at which the share is at most `limit`; for a
            strategy that has no period, the steps of which one may send; None if there
            is none, or none is known.
        all_reduce: the algorithm of its all-reduces, "ring" or "recursive doubling",
            whichever is faster for the array, or "recursive doubling and ring"; "" if
            there are none.

    Example:
        >>> import numpy as np
        >>> import syncalgos
        >>> plan = syncalgos.plan(
        ...     syncalgos.bmuf(8),
        ...     np.zeros(10**6, np.float32),
        ...     workers=2,
        ...     step_seconds=0.1,
        ...     network="1Gbit/s, 1ms",
        ... )
        >>> str(plan)[:54]
        'A sync of 2 workers takes 33 ms on 1 Gbit/s, 1 ms: eac'
        >>> round(plan.share, 3), plan.enough
        (0.04, 7)
    """

    workers: int
    network: Network
    step_seconds: float
    steps: int
    late: int
    period: int | None
    syncs: int
    bytes: float
    messages: float
    seconds: float
    share: float
    limit: float
    enough: int | None
    all_reduce: str = ""

    def __str__(self) -> str:
        sync_time = _format_seconds(self.seconds)
        size = _format_in_units(self.bytes, "B", "kB", "MB", "GB", "TB")
        step_time = _format_seconds(self.step_seconds)
        mean_step_time = _format_seconds(self.step_seconds / (1 - self.share))
        metrics_seconds = net.cost({"all_reduce": (4.0, 1)}, self.network, self.workers)
        metrics_time = _format_seconds(metrics_seconds)
        percent = 100 * round(self.share, 9)
        plural = "" if self.messages == 1 else "s"
        latency_note = ""
        if self.network.latency == 0:
            latency_note = ", without a latency"
        algorithm_note = ""
        if self.all_reduce:
            algorithm_note = f" (all-reduces by {self.all_reduce})"
        overlap_note = ""
        if self.late:
            overlap_note = (
                f", beside {self.late} local steps of computation if these overlap "
                "(no compiler of jax arranges that today)"
            )
        if self.period is not None and self.period > 1:
            frequency = f"a period of {self.period:,} local steps"
        else:
            frequency = f"{self.syncs:,} syncs in {self.steps:,} local steps"
        return (
            f"A sync of {self.workers} workers takes {sync_time} on "
            f"{self.network.name}{latency_note}: each worker sends {size}, in "
            f"{self.messages:.3g} message{plural} one after the other{algorithm_note}"
            f"{overlap_note}. "
            f"With {frequency} of "
            f"{step_time}, communication takes {percent:.3g} % of the time (a step "
            f"takes {mean_step_time} on average); {self._describe_enough()}. Each call "
            f"of `step` or `run` also averages the metrics, in {metrics_time}, so take "
            "many steps in a `run`. Left out: packet headers and acknowledgements "
            "(measured links took up to 27 % longer); other traffic; the arithmetic of "
            "means and of compression; waiting for slower workers; evaluation; what "
            "the loss sends."
        )

    def _describe_enough(self) -> str:
        """Returns the clause about the smallest period that is long enough."""
        limit = f"{100 * self.limit:.3g} %"
        if self.enough and self.period == 1:
            return f"it is at most {limit} if one step in {self.enough:,} sent"
        if self.enough:
            return f"it is at most {limit} with a period of {self.enough:,} or more"
        if self.period:
            return f"no period brings that to {limit}"
        return "no period is known"


@suggest_arguments
def plan(
    strategy: Strategy,
    replica: Replica | PyTree,
    *,
    workers: int,
    step_seconds: float,
    network: str | Network,
    share: float = 0.05,
    steps: int | None = None,
    fused: bool | None = None,
    taken: ArrayLike | None = None,
) -> Plan:
    """Plans the communication of a strategy on a network; nothing is trained.

    It counts bytes as `communication` does, and models their time by bytes / bandwidth
    plus a latency for each message that has to follow another. An all-reduce takes the
    cheaper of ring and recursive doubling (`syncalgos.network.all_reduce`).

    Args:
        strategy: the strategy.
        replica: one worker's replica, or its params alone; arrays or their shapes.
        workers: N, at least 2.
        step_seconds: seconds of computation of one local step, above 0.
        network: the link between any two workers, such as "100Mbit/s, 20ms" or "dsl":
            see `syncalgos.network.parse`. The latency is one-way: half a ping. All
            sends take this link, also those within the groups of `hierarchical`.
        share: the fraction of the time that communication may take, above 0, below 1.
        steps: local steps to plan for, such as those of a whole run; by default eight
            periods.
        fused: whether the arrays of a collective are sent as one message. By default
            those of an all-reduce are, as XLA joins them on CPUs and TPUs; the arrays
            of others, as in gossip or reduce="int8", are messages of their own. With
            "gloo", messages are those of several processes: of at most 8 MB in an
            all-reduce, which is a ring, and 40 kB in others.
        taken: as for `communication`.

    Returns:
        A Plan. Its smallest period is one that the strategy takes. It assumes that a
        sync sends the same amount at any period, as it does with all algorithms of this
        library that take a period.

    Raises:
        ValueError: an argument outside its range, an unreadable network, nothing is
            sent, or the errors of `communication`.

    Example:
        >>> import jax
        >>> import syncalgos
        >>> gpt2 = jax.ShapeDtypeStruct((124_000_000,), "float32")
        >>> plan = syncalgos.plan(
        ...     syncalgos.diloco(64),
        ...     gpt2,
        ...     workers=8,
        ...     step_seconds=0.2,
        ...     network="100Mbit/s, 20ms",
        ... )
        >>> round(plan.seconds, 2), round(plan.share, 2), plan.enough
        (69.72, 0.84, 6624)

    Source: the model is that of Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", 2005.
    """
    check_strategy("plan", strategy)
    workers = checks.whole("plan: workers", workers, least=2)
    step_seconds = checks.real("plan: step_seconds", step_seconds, above=0)
    share = checks.real("plan: share", share, above=0, below=1)
    link = network if isinstance(network, Network) else net.parse(network)
    workload = _Workload(replica, workers, step_seconds, link, fused, taken)
    period_argument = _find_period_argument(strategy)
    own_period = period_argument if isinstance(period_argument, int) else None

    if steps is None:
        period, counts = _count_rounds(workload, strategy, own_period)
    else:
        counts = workload.count(strategy, steps)
        period = _find_period(counts) if own_period is None else own_period
    num_steps = len(counts.per_step)
    if not counts.syncs:
        raise ValueError(f"plan: the strategy sends nothing in {num_steps} local steps")

    transfers = workload.transfers_per_step(counts)
    sync_seconds = transfers.seconds
    clock = net.wall_clock(sync_seconds.tolist(), step_seconds, strategy.late)
    enough = None
    if period and own_period is not None and not strategy.late and taken is None:
        period, enough = _replan(workload, strategy, own_period, period, share)
    elif period:
        enough = net.smallest_period(
            sync_seconds.tolist(),
            period=period,
            step_seconds=step_seconds,
            share=share,
            delay=strategy.late,
            # An algorithm's own delay follows its period; that of a combinator may not.
            grows=bool(period_argument),
        )
    if enough and own_period is not None:
        enough = _round_up_period(enough, strategy, own_period)
    return Plan(
        workers=workers,
        network=link,
        step_seconds=step_seconds,
        steps=num_steps,
        late=strategy.late,
        period=period,
        syncs=counts.syncs,
        bytes=float(transfers.bytes.sum()) / counts.syncs,
        messages=float(transfers.messages.sum()) / counts.syncs,
        seconds=float(sync_seconds.sum()) / counts.syncs,
        # Rounding may leave a clock without messages just below the steps' own time.
        share=max(0.0, 1 - num_steps * step_seconds / float(clock[-1])),
        limit=share,
        enough=enough,
        all_reduce=" and ".join(transfers.algorithms),
    )


class _Transfers(NamedTuple):
    """The messages of each step.

    Attributes:
        seconds, bytes, messages: of each step, (steps,).
        algorithms: the algorithms of all-reduces, sorted.
    """

    seconds: np.ndarray
    bytes: np.ndarray
    messages: np.ndarray
    algorithms: list[str]


@dataclass(frozen=True)
class _Workload:
    """What is trained, and on which network; strategies are counted on it.

    Attributes:
        replica, fused: as for `plan`.
        workers: N, the number of workers.
        step_seconds: seconds of computation of one local step.
        network: the link between any two workers.
        decisions: the decisions of a run, as for `communication`.
    """

    replica: Replica | PyTree
    workers: int
    step_seconds: float
    network: Network
    fused: bool | None
    decisions: ArrayLike | None

    def count(self, strategy: Strategy, steps: int) -> Communication:
        """Counts what the strategy sends in the first local steps."""
        with AS_GLOO.set_to(self._uses_gloo):
            return communication(
                strategy,
                self.replica,
                workers=self.workers,
                steps=steps,
                taken=self.decisions,
            )

    def seconds_per_step(self, counts: Communication) -> np.ndarray:
        """Returns the seconds of each step's messages, (steps,)."""
        return self.transfers_per_step(counts).seconds

    @property
    def _uses_gloo(self) -> bool:
        return net.GLOO in self.network.name

    def transfers_per_step(self, counts: Communication) -> _Transfers:
        """Returns the messages of each step on the network."""
        kinds, kind_of_step = net.sends(counts)
        figures = np.zeros((3, len(kinds)))  # seconds, bytes, messages
        algorithms: set[str] = set()
        for i, kind in enumerate(kinds):
            for collective, (size, calls) in kind.items():
                fused = self.fused
                if fused is None:
                    fused = collective == "all_reduce" and not self._uses_gloo
                transfer = net.transfer(
                    collective, size, calls, self.network, self.workers, fused
                )
                figures[:, i] += transfer.seconds, transfer.bytes, transfer.messages
                algorithms.add(transfer.algorithm)
        seconds, sent_bytes, messages = figures[:, kind_of_step]  # (steps,) each
        return _Transfers(seconds, sent_bytes, messages, sorted(algorithms - {""}))


def _count_rounds(
    workload: _Workload, strategy: Strategy, own_period: int | None
) -> tuple[int | None, Communication]:
    """Counts eight periods, or as many steps as it takes to see two syncs.

    Args:
        workload: the workload.
        strategy: the strategy.
        own_period: the period that its call was given; None if there is none.

    Returns:
        The period, None if the syncs are not regular; and the counts.
    """
    num_steps = PLANNED_ROUNDS * (own_period or PLANNED_ROUNDS)
    counts = workload.count(strategy, num_steps)
    while counts.syncs < 2 and num_steps <= MAX_SEARCH_STEPS:
        num_steps = 2 * num_steps
        counts = workload.count(strategy, num_steps)
    if own_period is not None or not counts.syncs:
        return own_period, counts
    period = _find_period(counts)
    if period and num_steps < PLANNED_ROUNDS * period:
        counts = workload.count(strategy, PLANNED_ROUNDS * period)
    return period, counts


def _find_period(counts: Communication) -> int | None:
    """Returns the steps between two syncs, if these are always the same."""
    sent_bytes = np.diff(counts.per_step, prepend=0.0)
    gaps = np.unique(np.diff(np.flatnonzero(sent_bytes)))
    return int(gaps[0]) if len(gaps) == 1 else None


def _replan(
    workload: _Workload,
    strategy: Strategy,
    own_period: int,
    period: int,
    share: float,
) -> tuple[int | None, int | None]:
    """Finds the smallest period by counting the strategy at other periods.

    Args:
        workload: the workload.
        strategy: a strategy whose call was given a period.
        own_period: that period.
        period: the local steps between two syncs, at which it may differ.
        share: the fraction of the time that communication may take.

    Returns:
        The period, None if the syncs are not regular in the long run; and the smallest
        period, None if there is none.
    """

    @functools.cache  # each count traces the strategy
    def lasting_seconds(tried_period: int, window: int) -> np.ndarray:
        return _lasting_seconds(workload, strategy, tried_period, window)

    doubled = _with_period(strategy, 2 * own_period)
    common_periods = describe(strategy).periods & describe(doubled).periods
    common_period = math.lcm(*common_periods)
    # At multiples of all periods that do not follow the argument, time is a + b/period.
    law_period = math.lcm(own_period, common_period)
    window = 2 * PLANNED_ROUNDS * math.lcm(period, law_period)
    is_regular = False
    if window <= MAX_WINDOW:
        is_sync = lasting_seconds(own_period, window) > 0
        is_regular = _is_regular(is_sync, own_period, law_period)
    if not is_regular:
        law_period = own_period
        window = max(2 * PLANNED_ROUNDS * period, MAX_SEARCH_STEPS // 2)
    mean_seconds = math.fsum(lasting_seconds(law_period, window)) / window
    doubled_seconds = lasting_seconds(2 * law_period, window)
    mean_doubled_seconds = math.fsum(doubled_seconds) / window
    allowed_seconds = share / (1 - share) * workload.step_seconds
    saved_seconds = mean_seconds - mean_doubled_seconds

    def is_enough(candidate: int) -> bool:
        taken_period = _round_up_period(candidate, strategy, own_period) or candidate
        seconds = lasting_seconds(taken_period, window)
        return math.fsum(seconds) / window <= allowed_seconds

    if is_regular:
        # What a doubled period does not halve, no period does: each step sends it.
        law_seconds = allowed_seconds - (2 * mean_doubled_seconds - mean_seconds)
        if law_seconds <= 0:
            return period, None
        smallest = max(1, math.ceil(2 * law_period * saved_seconds / law_seconds))
        # Between multiples of the other periods, fewer syncs coincide than by the law.
        while smallest % common_period and not is_enough(smallest):
            smallest += 1
        return period, smallest
    if saved_seconds <= 0:
        return None, None

    # Messages by chance, or of unlike workers, are tried.
    longest = math.ceil(4 * own_period * mean_seconds / allowed_seconds) + 1
    smallest = 1 + bisect_left(range(1, longest), True, key=is_enough)
    return None, smallest if is_enough(smallest) else None


def _is_regular(is_sync: np.ndarray, own_period: int, common_period: int) -> bool:
    """Whether syncs repeat, with at least one at the same step of each own period.

    Args:
        is_sync: whether each step sends anything, (steps,) booleans.
        own_period: the period that the strategy's call was given.
        common_period: a multiple of this and of all other periods.
    """
    repeats = (is_sync[common_period:] == is_sync[:-common_period]).all()
    rounds = is_sync[:common_period].reshape(-1, own_period)  # (rounds, own_period)
    return bool(repeats and rounds.all(axis=0).any())


def _lasting_seconds(
    workload: _Workload, strategy: Strategy, period: int, num_last_steps: int
) -> np.ndarray:
    """Returns the seconds of the last steps' messages in the long run, one each."""
    # A first phase may differ, so only the last of many steps count.
    num_steps = num_last_steps * max(2, MAX_SEARCH_STEPS // num_last_steps)
    counts = workload.count(_with_period(strategy, period), num_steps)
    return workload.seconds_per_step(counts)[-num_last_steps:]


def _find_period_argument(strategy: Strategy) -> Any:
    """Returns the `period` that the strategy's call was given, if any."""
    if strategy.call is None:
        return None
    return strategy.call.arguments.get("period")


def _with_period(strategy: Strategy, period: int) -> Strategy:
    """Repeats the call that made a strategy, with another period."""
    assert strategy.call is not None
    return strategy.call.repeat(period=period)


def _round_up_period(least: int, strategy: Strategy, own_period: int) -> int | None:
    """Returns the smallest period from `least` on that the strategy's call takes."""
    # A multiple of its own period is taken.
    for period in range(least, least + own_period):
        with suppress(ValueError):
            _with_period(strategy, period)
            return period
    return None


def _format_seconds(seconds: float) -> str:
    """Shows a time in milliseconds, or in seconds if it is long."""
    return _format_in_units(1e3 * seconds, "ms", "s")


def _format_in_units(quantity: float, *units: str) -> str:
    """Shows a number in three digits, in the first of the units that it fits.

    Args:
        quantity: the number, in the first of the units.
        units: names of units, each 1,000 times as large as the one before.
    """
    exponent = 0
    while quantity >= 999.5 and exponent < len(units) - 1:
        quantity = quantity / 1000
        exponent += 1
    return f"{float(f'{quantity:.3g}'):,g} {units[exponent]}"
