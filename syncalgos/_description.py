"""What a strategy does, and when: the answers that can be had without training."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos import steps as sets
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import arrivals, introspection, rules
from syncalgos.collectives import Axis
from syncalgos.steps import ALWAYS, NEVER, Steps
from syncalgos.strategy import Strategy, check_strategy

MAX_CYCLE = 2**16  # local steps after which the sets of a strategy have to repeat


@dataclass(frozen=True, repr=False, eq=False)
class Description:
    """What a strategy does, and when; `str` of it is a paragraph.

    Attributes:
        strategy: the strategy.
        workers: the number of workers; None: it was not given.
        acts: local step -> whether `sync` may do anything at this step.
        lands: local step -> whether the replicas receive the result of a sync at this
            step. A delayed strategy sends at other steps. If the workers' data decide,
            these are the steps at which they may decide to sync.
        period: local steps between any two exchanges of gradients or replicas; None if
            they differ, or are not known from the strategy alone.
        periods: the periods of the sets of which `acts` is made, such as 4 and 16 of
            `hierarchical(16, inner_period=4)`.
        late: local steps until a message is used; 0: the workers wait for it.
        combines_grads: whether a worker's gradients may reach other workers.
        averages_grads: whether gradients become their plain mean over all workers.
        syncs: whether it ever changes replicas, and not only gradients.
        decides: whether the workers' data decide when it syncs (see `decided`).
        has_center: whether it has a center of its own, for some leaves at least; else
            the center is the mean of the replicas.
        sees_loss: whether it reads the loss of a local step.
        unit_steps: whether a step moves entries by about the learning rate, whatever
            the gradient, as with Adam.
        own_momentum: whether its own momentum replaces that of the inner optimizer.
        own_steps: whether only plain SGD at `learning_rate` may be inside.
        learning_rate: the inner optimizer's learning rate as given to the strategy, a
            number or a schedule of local steps; None: none was given.
        axis: the mapped axis or axes over which the workers lie.
        members: the strategies inside that a combinator can reach, by name. A name that
            comes again gets a number: "every", "every_2".

    `acts` and `lands` of workers that do not wait, as in `async_diloco`, can be called
    only over the strategy's axis; `acting_steps` and `landing_steps` anywhere.

    Example:
        >>> import syncalgos
        >>> strategy = syncalgos.post_local_sgd(dense_steps=8, period=4)
        >>> description = syncalgos.describe(strategy)
        >>> description.combines_grads, description.has_center, description.periods
        (True, False, frozenset({4}))
        >>> description.acting_steps(20)  # after 12, 16 and 20 local steps
        array([11, 15, 19])
        >>> [*description.members]
        ['until', 'after']
    """

    strategy: Strategy
    workers: int | None
    acts: Callable[[Any], Any]
    lands: Callable[[Any], Any]
    period: int | None
    periods: frozenset[int]
    late: int
    combines_grads: bool
    averages_grads: bool
    syncs: bool
    decides: bool
    has_center: bool
    sees_loss: bool
    unit_steps: bool
    own_momentum: bool
    own_steps: bool
    learning_rate: checks.LearningRate | None
    axis: Axis
    members: Mapping[str, "Description"]

    def acting_steps(self, steps: int) -> np.ndarray:
        """Returns those of the first local steps at which `sync` may do anything.

        Args:
            steps: the number of local steps.

        Returns:
            The numbers of the steps, which count from 0, in ascending order.

        Raises:
            ValueError: they depend on the number of workers, which was not given.
        """
        return self._find_steps(self.acts, steps)

    def landing_steps(self, steps: int) -> np.ndarray:
        """Returns those of the first local steps at which the result of a sync arrives.

        Args:
            steps: the number of local steps.

        Returns:
            The numbers of the steps, which count from 0, in ascending order.

        Raises:
            ValueError: they depend on the number of workers, which was not given.
        """
        return self._find_steps(self.lands, steps)

    def included_steps(
        self, steps: int, undeclared: ArrayLike | None = None
    ) -> np.ndarray:
        """Returns the last local step that the center includes after each step.

        If the workers' data decide, they are taken to sync whenever they may.

        Args:
            steps: the number of local steps.
            undeclared: whether each local step ends a round, (steps,) booleans, for a
                strategy that has its own center but does not declare when it acts; None
                stands for all steps.

        Returns:
            (steps + 1,) whole numbers, after 0, 1, …, `steps` local steps; 0 stands for
            the initial model, which includes no step.

        Raises:
            ValueError: they depend on the number of workers, which was not given.

        Example:
            >>> import syncalgos
            >>> description = syncalgos.describe(syncalgos.bmuf(4))
            >>> description.included_steps(9)  # the center is that of the last sync
            array([0, 0, 0, 0, 4, 4, 4, 4, 8, 8])
        """
        checks.whole("included_steps: steps", steps, least=0)
        round_ends = ALWAYS
        if undeclared is not None:
            ends = np.asarray(undeclared, bool)
            if ends.shape != (steps,):
                raise ValueError(
                    f"included_steps: undeclared must be ({steps},) booleans, one for "
                    f"each local step, got shape {ends.shape}"
                )
            round_ends = sets.Where(functools.partial(_holds, ends))
        parts = arrivals.arrivals(self.strategy, round_ends)
        with _explain_axes():
            return arrivals.included(parts, steps, self.workers, self.axis)

    def __repr__(self) -> str:
        facts = [f"{name}={value!r}" for name, value in self._set_facts.items()]
        return f"Description({', '.join([repr(self.strategy), *facts])})"

    def __str__(self) -> str:
        sentences = [
            f"{self.strategy!r}: {self._describe_exchange()}.",
            self._describe_center(),
        ]
        if self.late:
            sentences.append(f"Messages are used {_count_steps(self.late)} later.")
        if self.sees_loss:
            sentences.append("It reads the loss of each local step.")
        if self.own_steps:
            sentences.append(
                "Inside it, only plain SGD at the strategy's learning rate may be used."
            )
        if self.own_momentum:
            sentences.append(
                "Its momentum replaces that of the inner optimizer: use one without."
            )
        return " ".join(sentences)

    @property
    def _set_facts(self) -> dict[str, Any]:
        """The facts to show: those that are not None, False, 0 or empty."""
        hidden = {"strategy", "acts", "lands", "periods", "axis", "members"}
        facts = {x.name: getattr(self, x.name) for x in fields(self)}
        return {
            name: value for name, value in facts.items() if value and name not in hidden
        }

    def _describe_exchange(self) -> str:
        """Says what is combined, and when."""
        if self.averages_grads and not self.syncs:
            combined = "it averages gradients"
        elif self.combines_grads and not self.syncs:
            combined = "it combines gradients"
        elif self.combines_grads:
            combined = "it combines gradients and replicas"
        elif self.syncs:
            combined = "it syncs replicas"
        else:
            return "it combines nothing, so that each worker trains alone"
        if self.decides:
            return f"{combined} when the workers' data ask for it"
        if self.period == 1:
            return f"{combined} at each local step"
        if self.period is not None:
            return f"{combined} every {self.period:,} local steps"
        return f"{combined} at steps that are not equally far apart"

    def _describe_center(self) -> str:
        """Says which model is evaluated and shipped."""
        if self.has_center:
            return "It has a center of its own, which is evaluated and shipped."
        return "The mean of the replicas is evaluated and shipped."

    def _find_steps(self, steps: Callable[[Any], Any], count: int) -> np.ndarray:
        """Returns the members of a set among the first local steps."""
        checks.whole("steps", count, least=0)
        with _explain_axes():
            belongs = arrivals.trace_table(
                sets.as_steps(steps), count, self.workers, self.axis
            )
        return np.flatnonzero(belongs)


@suggest_arguments
def describe(strategy: Strategy, *, workers: int | None = None) -> Description:
    """Describes what a strategy does, and when; nothing is traced or trained.

    Args:
        strategy: the strategy, such as `diloco(64)` or a composition.
        workers: the number of workers, at least 1. It is needed for the steps of
            workers that do not wait for each other, as in `async_diloco`.

    Returns:
        A Description. It holds what the strategy declares. Of a strategy that you wrote
        without declarations, it says what is possible: that its sync may act at every
        step, for example.

    Raises:
        ValueError: the argument is not a Strategy, or `workers` is out of range.

    Example:
        >>> import syncalgos
        >>> description = syncalgos.describe(syncalgos.bmuf(16))
        >>> description.period, description.combines_grads, description.has_center
        (16, False, True)
        >>> print(description)  # doctest: +NORMALIZE_WHITESPACE
        bmuf(period=16, block_momentum=None, block_lr=1.0, nesterov=False): it syncs
        replicas every 16 local steps. It has a center of its own, which is evaluated
        and shipped.
    """
    check_strategy("describe", strategy)
    if workers is not None:
        workers = checks.whole("describe: workers", workers, least=1)
    acts = introspection.acting_steps(strategy)
    return Description(
        strategy=strategy,
        workers=workers,
        acts=acts,
        lands=introspection.landing_steps(strategy),
        period=_find_gap(_find_exchanges(strategy)),
        periods=frozenset(_find_periods(acts)),
        late=strategy.late,
        combines_grads=introspection.reduces(strategy),
        averages_grads=introspection.takes_mean(strategy),
        syncs=introspection.ever_syncs(strategy),
        decides=rules.KINDS["decided by data"](strategy),
        has_center=introspection.has_center(strategy),
        sees_loss=strategy.sees_loss,
        unit_steps=strategy.unit_steps,
        own_momentum=strategy.own_momentum,
        own_steps=strategy.own_steps,
        learning_rate=strategy.learning_rate,
        axis=introspection.find_axis(strategy),
        members=MappingProxyType(_describe_members(strategy, workers)),
    )


def _describe_members(
    strategy: Strategy, workers: int | None
) -> dict[str, Description]:
    """Describes the strategies inside, by the names of the functions that made them."""
    descriptions: dict[str, Description] = {}
    repetitions: Counter[str] = Counter()
    for member in introspection.combination(strategy).members:
        name = "strategy"  # one that was made by hand
        if member.call is not None:
            name = member.call.function.__name__
        repetitions[name] += 1
        if repetitions[name] > 1:
            name = f"{name}_{repetitions[name]}"
        descriptions[name] = describe(member, workers=workers)
    return descriptions


def _find_exchanges(strategy: Strategy) -> Steps | None:
    """Returns the steps at which gradients or replicas are sent; None: not known."""
    combination = introspection.combination(strategy)
    if not combination.members:
        return _find_own_exchanges(strategy)
    exchange_steps = NEVER
    for member in combination.members:
        member_steps = _find_exchanges(member)
        if member_steps is None:
            return None
        exchange_steps |= member_steps
    if combination.gate is not None:
        exchange_steps &= combination.gate.steps
    return exchange_steps


def _find_own_exchanges(strategy: Strategy) -> Steps | None:
    """Returns the steps at which a strategy without members sends; None: not known."""
    landing_steps = introspection.landing_steps(strategy)
    if introspection.combination(strategy).is_silent:
        landing_steps = NEVER
    if not introspection.reduces(strategy):
        return landing_steps
    if landing_steps in (NEVER, ALWAYS):
        return ALWAYS
    # Its reduce may send at some steps alone, as that of zero_one_adam does.
    return None


def _find_gap(steps: Steps | None) -> int | None:
    """Returns the local steps between any two neighbours of a set, if it is regular."""
    if steps is None:
        return None
    if steps.period is not None:
        return steps.period
    if not _repeats(steps):
        return None
    cycle = math.lcm(*_find_periods(steps))
    if cycle > MAX_CYCLE:
        return None
    belongs = [bool(steps(step)) for step in range(2 * cycle)]
    gaps = np.unique(np.diff(np.flatnonzero(belongs)))
    return int(gaps[0]) if len(gaps) == 1 else None


def _repeats(steps: Steps) -> bool:
    """Whether a set is made of regular ones alone."""
    match steps:
        case sets.Every():
            return True
        case sets.Complement(steps=inner_steps):
            return _repeats(inner_steps)
        case sets.Union(parts=parts):
            return all(_repeats(part) for part in parts)
        case sets.Intersection(left=left, right=right):
            return _repeats(left) and _repeats(right)
    return False


def _find_periods(steps: Steps) -> set[int]:
    """Returns the periods of all regular sets of which a set is made."""
    match steps:
        case sets.Every(period=period):
            return {period}
        case sets.Shifted(steps=inner_steps) | sets.Complement(steps=inner_steps):
            return _find_periods(inner_steps)
        case sets.Union(parts=parts):
            return set().union(*map(_find_periods, parts))
        case sets.Intersection(left=left, right=right):
            return _find_periods(left) | _find_periods(right)
    return set()


@contextmanager
def _explain_axes() -> Iterator[None]:
    """Says what to pass where a set of steps asks for the number of workers."""
    try:
        yield
    except NameError as error:  # jax raises it for an axis that is not mapped
        raise ValueError(
            "describe: these steps depend on the number of workers: use "
            "describe(strategy, workers=…)"
        ) from error


def _holds(table: np.ndarray, step: Any) -> Any:
    return jnp.asarray(table).at[step].get(mode="fill", fill_value=False)


def _count_steps(number: int) -> str:
    """Returns a number of local steps in words."""
    if number == 1:
        return "one local step"
    return f"{number:,} local steps"
