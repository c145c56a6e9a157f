"""What combinators refuse: a sentence for each combinator and kind of strategy.

A combinator asks `check` for the kinds that a strategy shows by itself. Kinds that
depend on the combinator's arguments, or on its other members, have a sentence here too,
which it raises by `make_error`.
"""

from collections.abc import Callable

from syncalgos._combinators import introspection
from syncalgos._combinators.introspection import Combination
from syncalgos.strategy import Strategy


def _any_member(holds: Callable[[Combination], bool]) -> Callable[[Strategy], bool]:
    """Makes a kind: strategies in which anything is so."""
    return lambda strategy: any(map(holds, introspection.combinations(strategy)))


def _never_syncs(strategy: Strategy) -> bool:
    return not introspection.ever_syncs(strategy)


def _is_no_pure_sync(strategy: Strategy) -> bool:
    # No vote would hold the reduce of a member back.
    leaves = introspection.leaf_strategies(strategy)
    return _never_syncs(strategy) or any(map(introspection.has_reduce, leaves))


def _combines_twice(strategy: Strategy) -> bool:
    return any(
        introspection.ever_syncs(leaf) and introspection.has_reduce(leaf)
        for leaf in introspection.leaf_strategies(strategy)
    )


def _weighs_workers(strategy: Strategy) -> bool:
    leaves = introspection.leaf_strategies(strategy)
    return any(introspection.combination(leaf).weights for leaf in leaves)


def _acts_at_each_step(strategy: Strategy) -> bool:
    return any(
        introspection.combination(member).works_at_each_step
        # Such a phase makes the state anew at each step outside of it.
        or (introspection.is_phase(member) and introspection.has_center(member))
        for member in introspection.walk_strategies(strategy)
    )


KINDS: dict[str, Callable[[Strategy], bool]] = {
    "decided by data": _any_member(lambda x: x.follow is not None),
    "steady": _any_member(lambda x: x.is_steady),
    "turns": _any_member(lambda x: x.turns is not None),
    "acts at each step": _acts_at_each_step,
    "averaged": _any_member(lambda x: x.clock is not None and x.clock.averages),
    "pulled": _any_member(lambda x: x.clock is not None and x.clock.pulls),
    "paced": _any_member(lambda x: x.clock is not None and x.clock.paces),
    "weighted": _weighs_workers,
    "stale": _any_member(lambda x: any(rounds.stale for rounds in x.weights)),
    "reduces": introspection.reduces,
    "never syncs": _never_syncs,
    "not only syncs": _is_no_pure_sync,
    "combines twice": _combines_twice,
}
"""Kinds of strategies by name; some combinators refuse some of them."""

_STEADY = (
    "this strategy acts at every local step, as async_diloco does to hold slower "
    "workers back: set the strategy's own period instead"
)
_BY_DATA = (
    "the steps at which this strategy syncs must be fixed, but here they depend on the "
    "workers' data (see `decided`)"
)
_TURNS = (
    "this strategy's graph changes with each exchange, so it must act at every local "
    "step, or at those of one every(…, period); topology='static_exponential' does not "
    "change"
)
_SKIPPED_ROWS = (
    "rows would learn from the data of workers that skip or rest: use no "
    "participating, fedavg or paced, or replicate the tables"
)

RULES: dict[tuple[str, str], str] = {
    ("when", "steady"): _STEADY,
    ("when", "irregular turns"): _TURNS,
    ("every", "counted turns"): _TURNS,
    ("every", "unmet period"): (
        "a part of this strategy acts every {own_period} steps, but never at the end "
        "of a period of {period}: set the strategy's own period instead"
    ),
    ("until", "on the way"): (
        "with a delay of {delay}, params sent just before local step {end} would "
        "arrive only after that step: end the phase {delay} steps after a sync"
    ),
    ("at_end", "steady"): _STEADY,
    ("at_end", "decided by data"): _BY_DATA,
    ("at_end", "delayed"): (
        "strategy is delayed: its last sync would not arrive: leave out at_end, and "
        "train on after a sync for its delay of {delay}"
    ),
    ("at_end", "fixed rounds"): (
        "this strategy cannot sync after step {steps}: its rounds are not made by "
        "`every`, or have a fixed length: end at one of its own syncs"
    ),
    ("chain", "paced after a sync"): "put paced first, or around the whole chain",
    ("delayed", "decided by data"): _BY_DATA,
    ("delayed", "steady"): _STEADY,
    ("delayed", "delayed"): "strategy is delayed already: add up the delays",
    ("delayed", "frequent"): (
        "a result with a delay of {delay} would not arrive before the next sync, so no "
        "local step would be kept: use arrival='add'"
    ),
    ("decided", "steady"): _STEADY,
    ("decided", "turns"): _TURNS,
    ("decided", "not only syncs"): (
        "strategy must sync replicas and not reduce gradients: combine it with other "
        "strategies by chain"
    ),
    ("decided", "acts at each step"): (
        "strategy must not act at every step, but delayed, paced, ema and phases of a "
        "strategy with its own center do: put decided inside them"
    ),
    ("decided", "weighted"): (
        "the weights of `participating` (which fedavg uses, too) are for rounds whose "
        "end depends only on the step: use either weights or a decision"
    ),
    ("participating", "decided by data"): _BY_DATA,
    ("participating", "steady"): _STEADY,
    ("participating", "weighted"): (
        "this strategy already weights its workers, as fedavg and participating do: "
        "use one schedule, such as the product of both"
    ),
    ("participating", "combines twice"): (
        "strategy must not both reduce gradients and sync replicas; easgd and scaffold "
        "do both: only one mean can be weighted"
    ),
    ("participating", "unequal rounds"): (
        "members of this strategy average params at different steps, so that a worker "
        "has no single weight in the center: give them one period"
    ),
    ("participating", "own params"): (
        "strategy mixes the worker's own params with what the workers send, and its "
        "weight would multiply both: let sync return what was sent, and mix by "
        "delayed(…, 0, alpha=…) or in another member of a chain"
    ),
    ("participating", "own grads"): (
        "strategy mixes the worker's own gradients with what the workers send, and its "
        "weight would multiply both: let reduce return what was sent"
    ),
    ("participating", "own state"): (
        "this reducer mixes the worker's own values with what the workers send, and "
        "its weight would multiply both: let it return what was sent"
    ),
    ("participating", "hidden average"): (
        "average(…) of params by a reducer that is not the plain mean is called inside "
        "another sync, where its values are not weighted: make it a member of a chain, "
        "or use outer_step(optax.sgd(1.0), reduce)"
    ),
    ("paced", "never syncs"): (
        "strategy never syncs replicas: pace one that does, such as model_averaging"
    ),
    ("paced", "reduces"): (
        "this strategy reduces gradients, so workers that take no local step would "
        "send theirs: pace a strategy that only syncs replicas"
    ),
    ("paced", "averaged"): "a member is an ema: put ema around the whole strategy",
    ("paced", "pulled"): "palsgd would pull workers that rest, too: pace diloco",
    ("at_syncs", "never syncs"): (
        "this strategy reduces gradients and never syncs replicas, so there is no sync "
        "at which to apply `extra`, such as a reset of opt_state"
    ),
    ("at_syncs", "unequal delays"): (
        "the workers are weighted, and delays differ: use one delay for all parts"
    ),
    ("measured", "paced"): "a member is paced or palsgd: measure it alone",
    ("measured", "pulled"): "a member is paced or palsgd: measure it alone",
    ("measured", "steady"): "workers that rest have unknown moves: use diloco",
    ("tables", "weighted"): _SKIPPED_ROWS,
    ("tables", "paced"): _SKIPPED_ROWS,
}
"""The sentence of each refusal, by combinator and kind; names in braces are values."""


def check_combination(combinator: str, strategy: Strategy) -> None:
    """Refuses a strategy of a kind that a combinator does not take.

    Args:
        combinator: the combinator's name.
        strategy: the strategy that it was given.

    Raises:
        ValueError: the combinator refuses a kind of `KINDS` of which the strategy is.
    """
    for name, kind in RULES:
        if name == combinator and kind in KINDS and KINDS[kind](strategy):
            raise make_error(combinator, kind)


def make_error(combinator: str, kind: str, **values: object) -> ValueError:
    """Makes the refusal of a kind of strategies by a combinator.

    Args:
        combinator: the combinator's name.
        kind: the kind's name.
        values: what the sentence names in braces.
    """
    return ValueError(f"{combinator}: {RULES[combinator, kind].format(**values)}")
