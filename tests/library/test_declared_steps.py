"""A strategy declares when it acts: elsewhere its sync hands on what it was given."""

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


def look(strategy, optimizer, params):
    """Whether the sync of each step may act, and whether it keeps everything."""

    def step(carry, number):
        replica, state = carry
        moved = jax.tree.map(lambda x: x * 1.5, replica.params)
        given = replica._replace(params=moved), state
        new = strategy.sync(*given, number)
        pairs = zip(*map(jax.tree.leaves, (new, given)), strict=True)
        same = [jnp.array_equal(x, y) for x, y in pairs]
        acts = jnp.asarray(introspection.acts(strategy, number))
        return new, (acts, jnp.array(same).all())

    start = sa.Replica(params, optimizer.init(params)), strategy.init(params)
    return jax.lax.scan(step, start, jnp.array(NUMBERS, jnp.int32))[1]


def seen(made):
    """Looks at pairs of a strategy and an optimizer, in one program.

    Returns:
        By name, whether each step declares that it acts, and whether it keeps all.
    """

    def all_of(params):
        return {name: look(*pair, params) for name, pair in made.items()}

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 2, 6, 1)), "b": rng.normal(size=(2, 2, 1))}
    inner = jax.vmap(all_of, axis_name="lanes")
    found = jax.jit(jax.vmap(inner, axis_name="devices"))(params)
    return jax.tree.map(np.asarray, found)


# Periods that grow, and a server's.
FEW = ("qsr", "halos")
REST = [name for name in sa.ALGORITHMS if name not in FEW]


@pytest.mark.parametrize(
    "names",
    [FEW, *(pytest.param(REST[i::4], marks=pytest.mark.slow) for i in range(4))],
    ids=lambda names: f"{names[0]} and more",
)
def test_an_algorithm_keeps_everything_at_steps_that_it_does_not_declare(names):
    """And of those that ever sync, each acts within its first steps."""
    made = {name: (make(name), owed(name).optimizer) for name in names}
    rest = {k: pair for k, pair in made.items() if introspection.rests(pair[0])}
    for name, (acts, same) in seen(rest).items():
        assert (same | acts).all(), name
        assert acts[..., :24].any() == introspection.ever_syncs(rest[name][0]), name


@pytest.fixture(scope="module")
def combined():
    """Looks at all combinations, and at a declaration that lies."""
    every_one = {**COMBINED, "lying": LYING}
    return seen({name: (each, OPTIMIZER) for name, each in every_one.items()})


@pytest.mark.parametrize("name", COMBINED)
def test_a_combination_keeps_everything_at_steps_that_it_does_not_declare(
    name, combined
):
    acts, same = combined[name]
    assert (same | acts).all()


def test_a_declaration_that_lies_is_seen(combined):
    acts, same = combined["lying"]
    assert not (same | acts).all()


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
