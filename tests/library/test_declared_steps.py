"""A strategy declares when it acts: elsewhere its sync hands on what it was given."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.requirements import make, owed

import syncalgos as sa
from syncalgos._combinators import introspection
from syncalgos._combinators.schedule import sync_every

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
BY_HAND = sa.Strategy(
    sync=lambda replica, state, step: jax.lax.cond(
        step % 3 == 1,
        lambda: (sa.average().sync(replica, (), step)[0], state + 1),
        lambda: (replica, state),
    ),
    init=lambda params: jnp.int32(0),
    acts=lambda step: step % 3 == 1,
)
LYING = sa.model_averaging(1)._replace(acts=lambda step: step % 3 == 1)
NOTHING = sa.Strategy()

COMBINED = {
    "by hand": BY_HAND,
    "chain": sa.chain(BY_HAND, sa.every(sa.reset(OPTIMIZER), 5)),
    "chain of reductions": sa.chain(sa.sync_sgd(), sa.sync_sgd()),
    "when": sa.when(BY_HAND, lambda step: step % 2 == 0),
    "schedule": sa.every(sa.average(), lambda step: 2 + step // 5),
    "offset": sa.every(sa.average(), 7, offset=2),
    "sync alone": sync_every(BY_HAND, 4),
    "until": sa.until(BY_HAND, 9),
    "until with a center": sa.until(sa.bmuf(4), 9),
    "after": sa.after(BY_HAND, 9),
    "after with a center": sa.after(sa.bmuf(4), 9),
    "until paced": sa.until(sa.paced(BY_HAND, [1, 2, 2, 1]), 9),
    "masked": sa.masked(sa.bmuf(4), {"w": True, "b": False}),
    "delayed": sa.delayed(sa.bmuf(6), 2),
    "delayed by hand": sa.delayed(BY_HAND, 2),
    "ema": sa.ema(BY_HAND, 0.9),
    "participating": sa.participating(sa.every(sa.average(), 4), sa.sampled(0.5)),
    "paced": sa.paced(BY_HAND, [1, 2, 2, 1]),
    "at syncs": sa.at_syncs(BY_HAND, sa.reset(OPTIMIZER)),
    "decided": sa.every(
        sa.decided(sa.average(), lambda replica, state, step: step > 5), 4
    ),
}


# The first steps, and some far ones.
NUMBERS = [*range(24), *sorted(np.random.default_rng(0).integers(24, 2**12, 40))]


class Look(NamedTuple):
    """What a strategy declares of its steps, and what it does; booleans by step."""

    acts: jax.Array
    keeps_all: jax.Array


def look(
    strategy: sa.Strategy, optimizer: optax.GradientTransformation, params: Any
) -> Look:
    """Whether the sync of each step may act, and whether it keeps everything."""

    def step(carry: tuple[Any, Any], number: jax.Array) -> tuple[Any, Look]:
        replica, state = carry
        moved_params = jax.tree.map(lambda x: x * 1.5, replica.params)
        moved_replica = replica._replace(params=moved_params)
        synced = strategy.sync(moved_replica, state, number)
        is_same = jax.tree.map(jnp.array_equal, synced, (moved_replica, state))
        return synced, Look(
            acts=jnp.asarray(introspection.acts(strategy, number)),
            keeps_all=jnp.array(jax.tree.leaves(is_same)).all(),
        )

    start = sa.Replica(params, optimizer.init(params)), strategy.init(params)
    return jax.lax.scan(step, start, jnp.array(NUMBERS, jnp.int32))[1]


def look_at_all(
    pairs: dict[str, tuple[sa.Strategy, optax.GradientTransformation]],
) -> dict[str, Look]:
    """Looks at pairs of a strategy and an optimizer, in one program.

    Returns:
        By name, whether each step declares that it acts, and whether it keeps all.
    """

    def look_at_pairs(params: Any) -> dict[str, Look]:
        return {name: look(*pair, params) for name, pair in pairs.items()}

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 2, 6, 1)), "b": rng.normal(size=(2, 2, 1))}
    over_lanes = jax.vmap(look_at_pairs, axis_name="lanes")
    looks = jax.jit(jax.vmap(over_lanes, axis_name="devices"))(params)
    return jax.tree.map(np.asarray, looks)


# Periods that grow, and a server's.
DEFAULT_NAMES = ("qsr", "halos")
SLOW_NAMES = [name for name in sa.ALGORITHMS if name not in DEFAULT_NAMES]


@pytest.mark.parametrize(
    "names",
    [
        DEFAULT_NAMES,
        *(pytest.param(SLOW_NAMES[i::4], marks=pytest.mark.slow) for i in range(4)),
    ],
    ids=lambda names: f"{names[0]} and more",
)
def test_an_algorithm_keeps_everything_at_steps_that_it_does_not_declare(names):
    """And of those that ever sync, each acts within its first steps."""
    pairs = {name: (make(name), owed(name).optimizer) for name in names}
    resting_pairs = {
        k: pair for k, pair in pairs.items() if introspection.rests(pair[0])
    }
    for name, (acts, keeps_all) in look_at_all(resting_pairs).items():
        strategy, _ = pairs[name]
        assert (keeps_all | acts).all(), name
        assert acts[..., :24].any() == introspection.ever_syncs(strategy), name


@pytest.fixture(scope="module")
def combined() -> dict[str, Look]:
    """Looks at all combinations, and at a declaration that lies."""
    strategies = {**COMBINED, "lying": LYING}
    return look_at_all(
        {name: (strategy, OPTIMIZER) for name, strategy in strategies.items()}
    )


@pytest.mark.parametrize("name", COMBINED)
def test_a_combination_keeps_everything_at_steps_that_it_does_not_declare(
    name, combined
):
    acts, keeps_all = combined[name]
    assert (keeps_all | acts).all()


def test_a_declaration_that_lies_is_seen(combined):
    acts, keeps_all = combined["lying"]
    assert not (keeps_all | acts).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chain", {1, 4, 7, 10, 9}),
        ("chain of reductions", set()),
        ("when", {4, 10}),
        ("until", {1, 4, 7}),
        ("after", {10}),
        ("after with a center", {0, 1, 2, 3, 4, 5, 6, 7, 8, 11}),
        ("delayed by hand", {1, 3, 4, 6, 7, 9, 10}),
        ("ema", set(range(12))),
        ("at syncs", {1, 4, 7, 10}),
    ],
)
def test_combinators_declare_what_follows_from_their_members(name, expected):
    strategy = COMBINED[name]
    assert {s for s in range(12) if introspection.acts(strategy, s)} == expected
    assert introspection.rests(strategy) == (len(expected) < 12)


def test_four_plain_functions_may_act_at_every_step():
    plain = sa.Strategy(BY_HAND.init, BY_HAND.reduce, BY_HAND.sync, BY_HAND.center)
    assert introspection.acts(plain, 0) and not introspection.rests(plain)
    assert not introspection.acts(NOTHING, 0) and introspection.rests(NOTHING)


def test_acts_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"acts of a Strategy must be a function.* 16"):
        sa.chain(sa.average()._replace(acts=16))


LATE = {
    "no delay": (lambda: sa.bmuf(4), 0),
    "gradients on the way": (lambda: sa.delayed(sa.sync_sgd(), 2), 2),
    "a late mean of gradients": (lambda: sa.sync_sgd(reduce=sa.reducers.late()), 1),
    "co2": (lambda: sa.co2(8), 8),
    "a late outer step": (lambda: sa.diloco(8, reduce=sa.reducers.late()), 8),
    "a late outer step, by hand": (
        lambda: sa.every(sa.outer_step(optax.sgd(0.7), sa.reducers.late()), 8),
        8,
    ),
    # Workers wait for the member that waits.
    "two delays": (
        lambda: sa.chain(
            sa.delayed(sa.sync_sgd(), 5), sa.delayed(sa.model_averaging(9), 3)
        ),
        3,
    ),
    "a delay beside none": (
        lambda: sa.chain(sa.delayed(sa.sync_sgd(), 5), sa.model_averaging(4)),
        0,
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_strategy_is_as_late_as_its_first_message_to_be_used(name):
    make_strategy, late = LATE[name]
    assert make_strategy().late == late
