"""Each cell of the table of what combinators refuse, and its sentence."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import combinators
from support.problems.quadratics import START, unflatten

import syncalgos as sa
from syncalgos._combinators import rules
from syncalgos._engine import sharded_tables

AVERAGED = sa.model_averaging(4)
DECIDED = sa.dynamic_averaging(1)
LATE = sa.delayed(AVERAGED, 2)
LATER = sa.delayed(AVERAGED, 3)
FEDAVG = sa.fedavg(4, fraction=0.5)
PALSGD = sa.palsgd(4, learning_rate=0.1)
PACED = sa.paced(AVERAGED, [1, 2, 3, 4])
STEADY = sa.async_diloco(4, slowest=0.5)


def weigh_alike(step: jax.Array, workers: int) -> jax.Array:
    return jnp.ones(workers)


def vote(replica: sa.Replica, state: Any, step: jax.Array) -> bool:
    return True


def is_odd(step: jax.Array) -> jax.Array:
    return step % 2 == 1


def weigh(strategy: sa.Strategy) -> sa.Strategy:
    return sa.participating(strategy, weigh_alike)


def decide(strategy: sa.Strategy) -> sa.Strategy:
    return sa.decided(strategy, vote)


def follow_syncs(strategy: sa.Strategy) -> sa.Strategy:
    return sa.at_syncs(strategy, sa.average("opt_state"))


def pull(replica: sa.Replica, state: Any, step: jax.Array) -> tuple[sa.Replica, Any]:
    mean = sa.collectives.mean(replica.params)
    middle = jax.tree.map(lambda x, m: (x + m) / 2, replica.params, mean)
    return replica._replace(params=middle), state


def halve(values: Any, params: Any) -> Any:
    return jax.tree.map(lambda x, m: (x + m) / 2, values, sa.collectives.mean(values))


def average_bf16(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    return sa.average(reduce="bf16").sync(replica, state, step)


HALF = optax.stateless(halve)


def trace_step(strategy: sa.Strategy, buffers: object = ()) -> None:
    """Traces a step of four workers."""
    params = unflatten(START)
    replica = sa.Replica(params, (), buffers)
    sa.communication(strategy, replica, workers=4, steps=1)


def hide_tables(strategy: sa.Strategy) -> sa.Strategy:
    return sharded_tables.hide_tables(strategy, True, optax.sgd(0.1))


REFUSED: dict[tuple[str, str], Callable[[], object]] = {
    ("when", "steady"): lambda: sa.when(STEADY, is_odd),
    ("when", "irregular turns"): lambda: sa.when(sa.gossip(), is_odd),
    ("every", "counted turns"): lambda: sa.every(sa.every(sa.gossip(), 2), 4),
    ("every", "unmet period"): lambda: sa.every(sa.every(sa.average(), 4, offset=1), 4),
    ("until", "on the way"): lambda: sa.until(LATE, 8),
    ("at_end", "steady"): lambda: sa.at_end(STEADY, 20),
    ("at_end", "decided by data"): lambda: sa.at_end(DECIDED, 20),
    ("at_end", "delayed"): lambda: sa.at_end(LATE, 20),
    ("at_end", "fixed rounds"): lambda: sa.at_end(sa.scaffold(8, learning_rate=1.0), 9),
    ("chain", "paced after a sync"): lambda: sa.chain(sa.bmuf(4), PACED),
    ("delayed", "decided by data"): lambda: sa.delayed(DECIDED, 2),
    ("delayed", "steady"): lambda: sa.delayed(STEADY, 2),
    ("delayed", "delayed"): lambda: sa.delayed(LATE, 2),
    ("delayed", "frequent"): lambda: sa.delayed(AVERAGED, 4).init(unflatten(START)),
    ("decided", "steady"): lambda: decide(STEADY),
    ("decided", "turns"): lambda: decide(sa.gossip()),
    ("decided", "not only syncs"): lambda: decide(sa.sync_sgd()),
    ("decided", "acts at each step"): lambda: decide(LATE),
    ("decided", "weighted"): lambda: decide(FEDAVG),
    ("participating", "decided by data"): lambda: weigh(DECIDED),
    ("participating", "steady"): lambda: weigh(STEADY),
    ("participating", "weighted"): lambda: weigh(FEDAVG),
    ("participating", "combines twice"): lambda: weigh(sa.easgd(4)),
    ("participating", "unequal rounds"): lambda: weigh(
        sa.chain(sa.masked(AVERAGED, True), sa.masked(sa.model_averaging(3), True))
    ),
    ("participating", "own params"): lambda: trace_step(weigh(sa.Strategy(sync=pull))),
    ("participating", "own grads"): lambda: trace_step(weigh(sa.reduce_with(HALF))),
    ("participating", "own state"): lambda: trace_step(
        weigh(sa.average("buffers", HALF)), np.ones(2)
    ),
    ("participating", "hidden average"): lambda: trace_step(
        weigh(sa.Strategy(sync=average_bf16))
    ),
    ("paced", "never syncs"): lambda: sa.paced(sa.sync_sgd(), [1]),
    ("paced", "reduces"): lambda: sa.paced(sa.post_local_sgd(), [1]),
    ("paced", "averaged"): lambda: sa.paced(sa.chain(sa.ema(AVERAGED, 0.5)), [1]),
    ("paced", "pulled"): lambda: sa.paced(PALSGD, [1]),
    ("at_syncs", "never syncs"): lambda: follow_syncs(sa.sync_sgd()),
    ("at_syncs", "unequal delays"): lambda: follow_syncs(
        sa.chain(weigh(AVERAGED), sa.masked(LATE, True), sa.masked(LATER, True))
    ),
    ("measured", "paced"): lambda: sa.measured(sa.chain(PACED)),
    ("measured", "pulled"): lambda: sa.measured(sa.chain(PALSGD)),
    ("measured", "steady"): lambda: sa.measured(STEADY),
    ("tables", "weighted"): lambda: hide_tables(FEDAVG),
    ("tables", "paced"): lambda: hide_tables(PACED),
}

# A value in braces may be any number.
PATTERNS = {
    cell: re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(sentence))
    for cell, sentence in rules.RULES.items()
}


def test_each_cell_has_a_strategy_that_shows_it():
    assert {*REFUSED} == {*rules.RULES}


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: "-".join(cell))
def test_a_strategy_of_a_cell_is_refused_by_its_sentence(cell):
    combinator, _ = cell
    with pytest.raises(ValueError, match=rf"^{combinator}: {PATTERNS[cell]}(\n|$)"):
        REFUSED[cell]()


@pytest.mark.parametrize("kind", rules.KINDS)
def test_a_plain_average_is_of_no_kind_that_is_refused(kind):
    assert not rules.KINDS[kind](AVERAGED)


@pytest.mark.slow
@pytest.mark.parametrize("name", combinators.AROUND)
def test_algorithms_are_refused_by_sentences_of_the_table_alone(name):
    """All other algorithms are traced in a step of four workers."""
    sentences = [*PATTERNS.values(), ".* is not a mean over the workers.*"]
    for make in combinators.strategies().values():
        try:
            combinators.trace(combinators.AROUND[name](make()))
        except ValueError as error:
            _, _, sentence = str(error).partition(": ")
            assert any(re.fullmatch(x, sentence) for x in sentences), error
