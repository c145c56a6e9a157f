"""`describe` agrees with what strategies do: with counted sends, and with training."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.requirements import SHAPES, make, owed
from support.tiers import tiers

import syncalgos as sa

STEPS = 64
WORKERS = 4
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
SGD = optax.sgd(0.1, momentum=0.9)

# One of each kind; the others are of one of these kinds.
DEFAULT_NAMES = (
    "sync_sgd",
    "bmuf",
    "hierarchical",
    "streaming_diloco",
    "dynamic_averaging",
)
# Its reduce sends at some steps alone, which it does not declare.
UNDECLARED = {"zero_one_adam"}
# Their rounds have a rule of their own, which may give equal rounds.
BY_RULE = {"qsr", "scaffnew", "async_diloco", "heloco", "halos", "decoupled_diloco"}


def find_sending_steps(
    strategy: sa.Strategy, decisions: np.ndarray | None
) -> np.ndarray:
    """The local steps at which the ledger counts any byte, ascending."""
    counts = sa.communication(
        strategy, PARAMS, workers=WORKERS, steps=STEPS, taken=decisions
    )
    return np.flatnonzero(np.diff(counts.per_step, prepend=0.0))


@pytest.mark.parametrize("name", tiers(sa.ALGORITHMS, DEFAULT_NAMES, slow=None))
def test_an_algorithm_exchanges_at_the_steps_that_it_describes(name):
    description = sa.describe(make(name), workers=WORKERS)
    sends = find_sending_steps(make(name), owed(name).decisions(STEPS))
    if description.syncs and not description.combines_grads:
        assert description.landing_steps(STEPS).tolist() == sends.tolist()
        assert set(sends) <= set(description.acting_steps(STEPS))
    gaps = set(np.diff(sends))
    if name not in UNDECLARED | BY_RULE:
        assert description.period == (gaps.pop() if len(gaps) == 1 else None)
    else:
        assert description.period is None


def reduce_grads(strategy: sa.Strategy, grads: Any) -> Any:
    """What a worker's step makes of its gradients, and of its replica."""

    def step(params: Any, grads: Any) -> Any:
        replica = sa.Replica(params, SGD.init(params))
        if strategy.sees_loss:
            replica = replica._replace(loss=jax.numpy.float32(0))
        state = strategy.init(params)
        reduced, state = strategy.reduce(grads, replica, state, 0)
        return reduced

    mapped = jax.vmap(step, axis_name=sa.WORKERS[1])
    mapped = jax.vmap(mapped, axis_name=sa.WORKERS[0])
    params = jax.tree.map(np.zeros_like, grads)
    return jax.jit(mapped)(params, grads)


@pytest.mark.parametrize("name", tiers(sa.ALGORITHMS, ("sync_sgd", "bmuf"), slow=None))
def test_gradients_reach_other_workers_where_that_is_described(name):
    strategy = make(name)
    description = sa.describe(strategy)
    draws = np.random.default_rng(0)
    grads = {
        leaf: draws.normal(size=(WORKERS, 1, *shape)).astype(np.float32)
        for leaf, shape in SHAPES.items()
    }
    # Another gradient of the last worker alone.
    other_grads = {leaf: x.copy() for leaf, x in grads.items()}
    for x in other_grads.values():
        x[-1] *= -3
    first_worker = jax.tree.map(lambda x: x[0], reduce_grads(strategy, grads))
    first_worker_beside_other = jax.tree.map(
        lambda x: x[0], reduce_grads(strategy, other_grads)
    )
    differs = any(
        not np.array_equal(x, y)
        for x, y in zip(
            *map(jax.tree.leaves, (first_worker, first_worker_beside_other)),
            strict=True,
        )
    )
    # Whoever sends a quantized or sparse gradient may not send this one yet.
    assert differs <= description.combines_grads
    means = jax.tree.map(lambda x: x.mean(0), grads)
    is_mean = all(
        np.allclose(reduced, mean, atol=1e-6)
        for reduced, mean in zip(
            *map(jax.tree.leaves, (first_worker, means)), strict=True
        )
    )
    assert is_mean >= description.averages_grads


def test_members_have_the_names_of_the_functions_that_made_them():
    strategy = sa.chain(
        sa.until(sa.sync_sgd(), 8),
        sa.every(sa.average("opt_state"), 4),
        sa.every(sa.average(), 6),
        sa.Strategy(sync=lambda replica, state, step: (replica, state)),
    )
    members = sa.describe(strategy).members
    assert [*members] == ["until", "every", "every_2", "strategy"]
    assert members["every_2"].acting_steps(13).tolist() == [5, 11]
    assert members["until"].members["sync_sgd"].averages_grads
    levels = sa.hierarchical(16, inner_period=4)
    assert sa.describe(levels).periods == {4, 16}


@pytest.mark.parametrize(
    ("strategy", "period"),
    [
        (sa.hierarchical(16, inner_period=4), 4),
        (sa.gossip_pga(16), 1),
        (sa.streaming_diloco(12, fragments=3), 4),
        (
            sa.chain(sa.every(sa.average(), 6), sa.every(sa.average("opt_state"), 4)),
            None,
        ),
        (sa.chain(sa.sync_sgd(), sa.every(sa.average("opt_state"), 4)), 1),
        (sa.delayed(sa.bmuf(16), 3), 16),
        (sa.post_local_sgd(dense_steps=8, period=4), None),
        (sa.every(sa.reset(SGD), 4), None),
        (sa.at_syncs(sa.bmuf(8), sa.reset(SGD)), 8),
        (sa.Strategy(), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_composition_has_a_period_where_its_exchanges_are_equally_far_apart(
    strategy, period
):
    assert sa.describe(strategy).period == period


def test_declarations_of_the_strategy_are_in_its_description():
    strategy = sa.slowmo(4, learning_rate=0.3)
    description = sa.describe(strategy)
    for field in dataclasses.fields(description):
        if field.name in strategy._fields and field.name not in ("acts", "axis"):
            assert getattr(description, field.name) == getattr(strategy, field.name)
    assert description.learning_rate == 0.3
    assert sa.describe(sa.co2(8)).late == 8
    assert sa.describe(sa.bmuf(axis="batch")).axis == "batch"


def vote(replica: sa.Replica, state: Any, step: jax.Array) -> jax.Array:
    return step > 5


@pytest.mark.parametrize(
    ("strategy", "decides"),
    [
        (sa.bmuf(4), False),
        (sa.dynamic_averaging(4), True),
        (sa.chain(sa.every(sa.decided(sa.average(), vote), 4), sa.gossip()), True),
    ],
)
def test_decisions_by_data_are_described(strategy, decides):
    assert sa.describe(strategy).decides == decides


def test_steps_of_unlike_clocks_need_the_number_of_workers():
    strategy = sa.async_diloco(4, axis="batch")
    with pytest.raises(ValueError, match=r"depend on .* use describe\(strategy, work"):
        sa.describe(strategy).landing_steps(8)
    with pytest.raises(ValueError, match=r"use describe\(strategy, workers=…\)"):
        sa.describe(strategy).included_steps(8)
    description = sa.describe(strategy, workers=WORKERS)
    expected = find_sending_steps(sa.async_diloco(4), None)
    assert description.landing_steps(STEPS).tolist() == expected.tolist()
    assert description.included_steps(8).shape == (9,)


def test_the_center_of_an_undeclared_strategy_follows_the_rounds_that_are_given():
    by_hand = sa.bmuf(1)._replace(acts=None)
    rounds = np.array([False, True, False, False, True])
    included = sa.describe(by_hand).included_steps(5, undeclared=rounds)
    assert included.tolist() == [0, 0, 2, 2, 2, 5]
    with pytest.raises(ValueError, match=r"undeclared must be \(4,\) booleans"):
        sa.describe(by_hand).included_steps(4, undeclared=rounds)


def test_a_description_is_shown_by_its_facts_and_told_in_words():
    description = sa.describe(sa.diloco(8, reduce=sa.reducers.late()), workers=2)
    facts = repr(description)
    assert facts.startswith("Description(diloco(8") or "diloco(period=8" in facts
    assert "workers=2, period=8, late=8, syncs=True, has_center=True" in facts
    assert "it syncs replicas every 8 local steps" in str(description)
    assert "Messages are used 8 local steps later." in str(description)
    words = str(sa.describe(sa.sync_sgd()))
    assert "it averages gradients at each local step. The mean of the rep" in words
    assert "each worker trains alone" in str(sa.describe(sa.Strategy()))


@pytest.mark.parametrize("wrong", ["bmuf", sa.bmuf, SGD])
def test_a_value_that_is_no_strategy_is_refused(wrong):
    with pytest.raises(ValueError, match="describe: expected a Strategy, got"):
        sa.describe(wrong)


def test_no_workers_are_refused():
    with pytest.raises(ValueError, match="describe: workers must be a whole number"):
        sa.describe(sa.bmuf(4), workers=0)
