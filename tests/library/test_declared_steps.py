"""A strategy declares when it acts: elsewhere its sync hands on what it was given."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owed import make, owed

import syncalgos
from syncalgos import (
    Replica,
    Strategy,
    after,
    average,
    bmuf,
    chain,
    checks,
    decided,
    delayed,
    ema,
    every,
    masked,
    model_averaging,
    paced,
    participating,
    reset,
    sampled,
    sync_sgd,
    until,
    when,
)
from syncalgos.combinators import introspection
from syncalgos.combinators.schedule import sync_every

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
BY_HAND = Strategy(
    sync=lambda replica, state, step: jax.lax.cond(
        step % 3 == 1,
        lambda: (average().sync(replica, (), step)[0], state + 1),
        lambda: (replica, state),
    ),
    init=lambda params: jnp.int32(0),
    acts=lambda step: step % 3 == 1,
)
LYING = model_averaging(1)._replace(acts=lambda step: step % 3 == 1)
NOTHING = Strategy()

COMBINED = {
    "by hand": BY_HAND,
    "chain": chain(BY_HAND, every(5, reset(OPTIMIZER))),
    "chain of reductions": chain(sync_sgd(), sync_sgd()),
    "when": when(lambda step: step % 2 == 0, BY_HAND),
    "schedule": every(lambda step: 2 + step // 5, average()),
    "offset": every(7, average(), offset=2),
    "sync alone": sync_every(4, BY_HAND),
    "until": until(9, BY_HAND),
    "until with a center": until(9, bmuf(4)),
    "after": after(9, BY_HAND),
    "after with a center": after(9, bmuf(4)),
    "until paced": until(9, paced(BY_HAND, [1, 2, 2, 1])),
    "masked": masked(bmuf(4), {"w": True, "b": False}),
    "delayed": delayed(bmuf(6), 2),
    "delayed by hand": delayed(BY_HAND, 2),
    "ema": ema(BY_HAND, 0.9),
    "participating": participating(every(4, average()), sampled(0.5)),
    "paced": paced(BY_HAND, [1, 2, 2, 1]),
    "at syncs": syncalgos.at_syncs(BY_HAND, reset(OPTIMIZER)),
    "decided": every(4, decided(lambda replica, state, step: step > 5, average())),
}


@functools.cache
def looks(strategy, optimizer):
    """steps -> whether the sync of each may act, and whether it keeps everything."""

    def look(params, numbers):
        def step(carry, number):
            replica, state = carry
            moved = jax.tree.map(lambda x: x * 1.5, replica.params)
            given = replica._replace(params=moved), state
            new = strategy.sync(*given, number)
            pairs = zip(*map(jax.tree.leaves, (new, given)), strict=True)
            same = [jnp.array_equal(x, y) for x, y in pairs]
            acts = jnp.asarray(introspection.acts(strategy, number))
            return new, (acts, jnp.array(same).all())

        start = Replica(params, optimizer.init(params)), strategy.init(params)
        return jax.lax.scan(step, start, numbers)[1]

    inner = jax.vmap(look, (0, None), axis_name="lanes")
    return jax.jit(jax.vmap(inner, (0, None), axis_name="devices"))


def seen(strategy, optimizer, numbers):
    """Whether the sync of each step declares that it acts, and whether it keeps all."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 2, 6, 1)), "b": rng.normal(size=(2, 2, 1))}
    steps = jnp.array(sorted(numbers), jnp.int32)
    return map(np.asarray, looks(strategy, optimizer)(params, steps))


def keeps_its_word(strategy, optimizer, numbers):
    acts, same = seen(strategy, optimizer, numbers)
    return bool((same | acts).all())


STEPS = st.lists(st.integers(0, 2**12), min_size=12, max_size=12)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
@settings(max_examples=5, deadline=None)
@given(numbers=STEPS)
def test_an_algorithm_keeps_everything_at_steps_that_it_does_not_declare(name, numbers):
    strategy = remembered(name)
    if introspection.rests(strategy):
        assert keeps_its_word(strategy, owed(name).optimizer, numbers)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_an_algorithm_acts_within_its_first_steps_if_it_ever_syncs(name):
    strategy = remembered(name)
    if introspection.rests(strategy):
        acts, same = seen(strategy, owed(name).optimizer, range(24))
        assert (same | acts).all()
        assert acts.any() == introspection.ever_syncs(strategy)


@functools.cache
def remembered(name):
    return make(name)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", COMBINED)
@settings(max_examples=5, deadline=None)
@given(numbers=STEPS)
def test_a_combination_keeps_everything_at_steps_that_it_does_not_declare(
    name, numbers
):
    assert keeps_its_word(COMBINED[name], OPTIMIZER, [*numbers[:-4], 1, 4, 9, 10])


def test_a_declaration_that_lies_is_seen():
    assert not keeps_its_word(LYING, OPTIMIZER, range(6))


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
    plain = Strategy(BY_HAND.init, BY_HAND.reduce, BY_HAND.sync, BY_HAND.center)
    assert introspection.acts(plain, 0) and not introspection.rests(plain)
    assert not introspection.acts(NOTHING, 0) and introspection.rests(NOTHING)


def test_what_follows_a_sync_made_by_hand_comes_at_its_steps():
    both = COMBINED["at syncs"]
    landed = [s for s in range(9) if introspection.lands(both, s)]
    assert landed == [1, 4, 7]


def test_acts_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"acts of a Strategy must be a function.* 16"):
        chain(average()._replace(acts=16))


NEED = ("slowmo", "scaffold", "qsr", "scaffnew")


@pytest.mark.parametrize("name", NEED)
def test_a_learning_rate_that_must_be_given_has_no_default(name):
    factory = syncalgos.ALGORITHMS[name]
    shown = inspect.signature(factory).parameters["learning_rate"]
    assert shown.default is checks.REQUIRED
    with pytest.raises(ValueError, match=f"^{name}: learning_rate must be given"):
        factory()
