"""Helpers of a user's own under jax.jit, which keeps what it traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from support.tiers import tiers

import syncalgos as sa
from syncalgos import collectives, participating
from syncalgos.collectives._axes import COUNTED, Setting
from syncalgos.collectives._messages import AS_GLOO
from syncalgos.collectives._shares import counting, takes_part
from syncalgos.reducers._stacking import shards

MOVES = np.array([9.0, 1, 2], np.float32)  # each worker's plain step


def first_is_away(step, workers):
    return jnp.arange(workers) > 0


def linear(params, batch):
    return -params * jnp.mean(batch)


def train(strategy, steps=2):
    momentum = optax.chain(optax.trace(0.5), optax.sgd(1.0))
    trainer = sa.DataParallel(linear, momentum, strategy, workers=3, backend="vmap")
    state, _ = trainer.run(trainer.init(jnp.float32(0)), np.tile(MOVES, (steps, 1)))
    return trainer, state


def in_a_scan(function):
    def body(carry, _):
        return function(carry), None

    return lambda x: lax.scan(body, x, None, length=1)[0]


def in_a_branch(function):
    return lambda x: lax.cond(True, function, function, x)


def with_own_derivative(function):
    decorated = jax.custom_jvp(function)
    decorated.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return jax.jit(decorated)


TRACED_ONCE = {
    "jit": jax.jit,
    "jit in jit": lambda function: jax.jit(lambda x: jax.jit(function)(x)),
    "inlined": lambda function: jax.jit(function, inline=True),
    "checkpoint": jax.checkpoint,
    "scan": in_a_scan,
    "branch": in_a_branch,
    "custom_jvp": with_own_derivative,
}


@pytest.mark.parametrize("first", ["plain", "weighted"])
@pytest.mark.parametrize("name", tiers(TRACED_ONCE, ["jit"]))
def test_weights_reach_a_helper_that_was_traced_before(name, first):
    @TRACED_ONCE[name]
    def weighted_mean(x):
        return collectives.mean(collectives.weighted(x))

    def sync(replica, state, step):
        moments = jax.tree.map(weighted_mean, replica.opt_state)
        params = collectives.mean(replica.params)
        return replica._replace(params=params, opt_state=moments), state

    plain = sa.every(sa.Strategy(sync=sync), 2)
    strategies = {"plain": plain, "weighted": participating(plain, first_is_away)}
    # Each worker's momentum is 1.5 times its gradient by the second step.
    expected = {"plain": -1.5 * 4, "weighted": -1.5 * 1.5}
    second = {"plain": "weighted", "weighted": "plain"}[first]
    for kind in (first, second, first):
        _, state = train(strategies[kind])
        np.testing.assert_allclose(state.replica.opt_state[0].trace, expected[kind])


def exchanging(replica, state, step):
    params = (replica.params + collectives.shift(replica.params, 1)) / 2
    return replica._replace(params=params), state


def test_a_jitted_sync_that_takes_no_mean_is_refused_after_it_ran():
    strategy = sa.every(sa.Strategy(sync=jax.jit(exchanging)), 2)
    train(strategy)
    with pytest.raises(ValueError, match="an exchange between single workers is not"):
        train(participating(strategy, first_is_away))


def a_sharding():
    cut = shards.Cut((("model",),), (2,))
    return shards.Sharding((shards.Leaf((jax.tree_util.DictKey("w"),), (4,), cut),))


SETTINGS = {
    "COUNTED": (COUNTED, sa.WORKERS),
    "AS_GLOO": (AS_GLOO, True),
    "sharding": (shards._SHARDING, a_sharding()),
    "an array's shape": (Setting("spec", None), {"w": PartitionSpec("model")}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_jit_sees_each_setting(name):
    setting, value = SETTINGS[name]

    @jax.jit
    def is_set():
        return jnp.array(setting.get() == value)

    for expected in (False, True, False):
        with setting.set_to(value if expected else setting.get()):
            assert bool(is_set()) == expected


def test_jit_sees_another_traced_share():
    """One traced array must not stand in for another."""

    @jax.jit
    def weighted(x):
        return collectives.weighted(x)

    @jax.jit
    def both(x, share, other):
        with counting(share):
            first = weighted(x)
        with counting(other):
            second = weighted(x)
        return first, second, weighted(x), takes_part()

    assert [float(x) for x in both(1.0, 2.0, 3.0)] == [2, 3, 1, 1]


def average_momentum(replica, state, step):
    mean = collectives.mean(collectives.weighted(replica.opt_state))
    return replica._replace(opt_state=mean), state


AROUND = {
    "participating": lambda member: participating(member, first_is_away),
    "delayed": lambda member: sa.delayed(member, 1),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_jitted_sync_that_leaves_params_alone_leaves_them_alone(name):
    def replica_after(sync):
        strategy = sa.every(sa.Strategy(sync=sync), 2)
        return train(AROUND[name](strategy), steps=3)[1].replica

    expected = replica_after(average_momentum)
    jitted = replica_after(jax.jit(average_momentum))
    jax.tree.map(np.testing.assert_array_equal, jitted, expected)
