"""A plan of communication: how long a strategy's syncs take on a network."""

import math
from bisect import bisect_left
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos import network as net
from syncalgos.collectives import PyTree
from syncalgos.collectives.axes import noting
from syncalgos.collectives.messages import AS_GLOO
from syncalgos.ledger.counting import communication
from syncalgos.network import Network
from syncalgos.strategy import Replica, Strategy, check_strategy

ROUNDS = 8  # to plan for
FARTHEST = 2**14  # local steps within which two syncs are looked for
_MESSAGE = Network("seconds are messages", math.inf, 1.0)


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
        bytes: bytes that a worker sends in a sync, on average.
        messages: messages of a sync that follow one another, on average.
        seconds: seconds of a sync, on average.
        share: the fraction of the time that the workers wait for messages.
        limit: the share that was asked for.
        enough: the smallest period at which the share is at most `limit`; for a
            strategy that has no period, the steps of which one may send; None if there
            is none, or none is known.

    Example:
        >>> import numpy as np
        >>> import syncalgos
        >>> own = {"workers": 2, "step_seconds": 0.1, "network": "1Gbit/s, 1ms"}
        >>> plan = syncalgos.plan(syncalgos.bmuf(8), np.zeros(10**6, np.float32), **own)
        >>> str(plan)[:54]
        'A sync of 2 workers takes 34 ms on 1 Gbit/s, 1 ms: eac'
        >>> round(plan.share, 3), plan.enough
        (0.041, 7)
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

    def __str__(self) -> str:
        times = self.seconds, self.step_seconds
        took, step = (_in_units(1e3 * x, "ms", "s") for x in times)
        size = _in_units(self.bytes, "B", "kB", "MB", "GB", "TB")
        hidden = f", beside {self.late} local steps of computation if these overlap "
        hidden = f"{hidden}(no compiler of jax arranges that today)" * bool(self.late)
        share = 100 * round(self.share, 9)
        often = f"{self.syncs:,} syncs in {self.steps:,} local steps"
        period, limit = self.period, f"{100 * self.limit:.3g} %"
        often = f"a period of {period:,} local steps" if (period or 1) > 1 else often
        enough = f"no period brings that to {limit}" if period else "no period is known"
        if self.enough:
            regular = f"with a period of {self.enough:,} or more"
            rarely = f"if one step in {self.enough:,} sent"
            enough = f"it is at most {limit} {rarely if period == 1 else regular}"
        messages = f"{self.messages:.3g} message{'s' * (self.messages != 1)}"
        mean = _in_units(1e3 * self.step_seconds / (1 - self.share), "ms", "s")
        metrics = net.cost({"all_reduce": (4.0, 1)}, self.network, self.workers)
        return (
            f"A sync of {self.workers} workers takes {took} on {self.network.name}: "
            f"each worker sends {size}, in {messages} one after the other{hidden}. "
            f"With {often} of {step}, communication takes {share:.3g} % of "
            f"the time (a step takes {mean} on average); {enough}. Each call of `step` "
            "or `run` also averages the metrics, in "
            f"{_in_units(1e3 * metrics, 'ms', 's')}, so take many steps in a `run`. "
            "Left out: packet headers and acknowledgements (measured links took up to "
            "27 % longer); other traffic; the arithmetic of means and of compression; "
            "waiting for slower workers; evaluation; what the loss sends."
        )


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
    plus a latency for each message that has to follow another (`syncalgos.network`).

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
            all-reduce, and 40 kB in others.
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
        >>> own = {"workers": 8, "step_seconds": 0.2, "network": "100Mbit/s, 20ms"}
        >>> plan = syncalgos.plan(syncalgos.diloco(64), gpt2, **own)
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
    given = strategy.made_by and strategy.made_by.bound.arguments.get("period")
    period = given if isinstance(given, int) else None
    by_gloo = net.GLOO in link.name

    def count(strategy=strategy, *, steps):
        own = {"workers": workers, "steps": steps, "taken": taken}
        with noting(AS_GLOO, by_gloo):
            return communication(strategy, replica, **own)

    planned = ROUNDS * (period or ROUNDS) if steps is None else steps
    sent = count(steps=planned)
    while sent.syncs < 2 and not steps and planned <= FARTHEST:
        planned, sent = 2 * planned, count(steps=2 * planned)
    if not sent.syncs:
        raise ValueError(f"plan: the strategy sends nothing in {planned} local steps")
    if period is None:
        gaps = {*np.diff(np.flatnonzero(np.diff(sent.per_step, prepend=0.0))).tolist()}
        period = gaps.pop() if len(gaps) == 1 else None
        if period and not steps and planned < ROUNDS * period:
            sent = count(steps=(planned := ROUNDS * period))

    def seconds(sent, link):
        def cost(name, moved):
            joins = name == "all_reduce" and not by_gloo
            joined = joins if fused is None else fused
            return net.cost({name: moved}, link, workers, joined)

        kinds, steps = net.sends(sent)
        return np.array([sum(cost(*x) for x in each.items()) for each in kinds])[steps]

    costs, messages = seconds(sent, link), seconds(sent, _MESSAGE)
    late = strategy.late
    clock = net.wall_clock(costs.tolist(), step_seconds, late)
    enough = None
    if period and isinstance(given, int) and not late and taken is None:

        def lasting(period, last):
            # A first phase may differ, so only the last of many steps count.
            steps = last * max(2, FARTHEST // last)
            many = count(_at_period(strategy, period), steps=steps)
            return seconds(many, link)[-last:]

        last = 2 * ROUNDS * period
        found = lasting(given, last)
        acts = found > 0
        if not (acts.any() and (acts[given:] == acts[:-given]).all()):
            period, last = None, max(last, FARTHEST // 2)
            found = lasting(given, last)
        often, seldom = (math.fsum(x) / last for x in (found, lasting(2 * given, last)))
        left = share / (1 - share) * step_seconds
        if period:
            # What a doubled period does not halve, no period does: each step sends it.
            left -= 2 * seldom - often
            if left > 0:
                enough = max(1, math.ceil(2 * given * (often - seldom) / left))
        elif often > seldom:  # messages by chance, or of unlike workers, are tried

            def is_enough(x):
                allowed = _taken_from(x, strategy, given) or x
                return math.fsum(lasting(allowed, last)) / last <= left

            longest = math.ceil(4 * given * often / left) + 1
            tried = 1 + bisect_left(range(1, longest), True, key=is_enough)
            enough = tried if is_enough(tried) else None
        enough = enough and _taken_from(enough, strategy, given)
    elif period:
        # An algorithm's own delay follows its period; that of a combinator may not.
        of = step_seconds, share, late, 0.0, bool(given)
        enough = net.smallest_period(costs.tolist(), period, *of)
        if enough and isinstance(given, int):
            enough = _taken_from(enough, strategy, given)
    return Plan(
        workers=workers,
        network=link,
        step_seconds=step_seconds,
        steps=planned,
        late=late,
        period=period,
        syncs=sent.syncs,
        bytes=sent.bytes_per_worker / sent.syncs,
        messages=float(messages.sum()) / sent.syncs,
        seconds=float(costs.sum()) / sent.syncs,
        share=1 - planned * step_seconds / float(clock[-1]),
        limit=share,
        enough=enough,
    )


def _at_period(strategy: Strategy, period: int) -> Strategy:
    """Repeats the call that made a strategy, with another period."""
    assert strategy.made_by is not None
    bound = strategy.made_by.bound
    bound.arguments["period"] = period
    return strategy.made_by.function(*bound.args, **bound.kwargs)


def _taken_from(least: int, strategy: Strategy, given: int) -> int | None:
    """Returns the smallest period from here on that the strategy's call takes."""
    for period in range(least, least + given):  # a multiple of the given one is taken
        with suppress(ValueError):
            _at_period(strategy, period)
            return period
    return None


def _in_units(x: float, *units: str) -> str:
    """Shows a number in three digits and in the unit, each 1,000 times the last."""
    while x >= 999.5 and units[1:]:
        x, units = x / 1000, units[1:]
    return f"{float(f'{x:.3g}'):,g} {units[0]}"
