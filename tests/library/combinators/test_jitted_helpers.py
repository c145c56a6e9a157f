"""Helpers of a user's own under jax.jit, which keeps what it traced."""

from collections.abc import Callable
from typing import Any

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


def skip_first_worker(step: jax.Array, workers: int) -> jax.Array:
    return jnp.arange(workers) > 0


def linear(params: Any, batch: Any) -> jax.Array:
    return -params * jnp.mean(batch)


def train(strategy: sa.Strategy, steps: int = 2) -> tuple[sa.DataParallel, Any]:
    momentum = optax.chain(optax.trace(0.5), optax.sgd(1.0))
    trainer = sa.DataParallel(linear, momentum, strategy, workers=3, backend="vmap")
    state, _ = trainer.run(trainer.init(jnp.float32(0)), np.tile(MOVES, (steps, 1)))
    return trainer, state


def run_in_scan(function: Callable) -> Callable:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        return function(carry), None

    return lambda x: lax.scan(body, x, None, length=1)[0]


def run_in_branch(function: Callable) -> Callable:
    return lambda x: lax.cond(True, function, function, x)


def give_derivative(function: Callable) -> Callable:
    decorated = jax.custom_jvp(function)
    decorated.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return jax.jit(decorated)


TRACED_ONCE = {
    "jit": jax.jit,
    "jit in jit": lambda function: jax.jit(lambda x: jax.jit(function)(x)),
    "inlined": lambda function: jax.jit(function, inline=True),
    "checkpoint": jax.checkpoint,
    "scan": run_in_scan,
    "branch": run_in_branch,
    "custom_jvp": give_derivative,
}


@pytest.mark.parametrize("kind", ["plain", "weighted"])
@pytest.mark.parametrize("name", tiers(TRACED_ONCE, ["jit"]))
def test_weights_reach_a_helper_that_was_traced_before(name, kind):
    @TRACED_ONCE[name]
    def weighted_mean(x: jax.Array) -> jax.Array:
        return collectives.mean(collectives.weighted(x))

    def sync(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        moments = jax.tree.map(weighted_mean, replica.opt_state)
        params = collectives.mean(replica.params)
        return replica._replace(params=params, opt_state=moments), state

    plain = sa.every(sa.Strategy(sync=sync), 2)
    strategies = {"plain": plain, "weighted": participating(plain, skip_first_worker)}
    # Each worker's momentum is 1.5 times its gradient by the second step.
    expected = {"plain": -1.5 * 4, "weighted": -1.5 * 1.5}
    other_kind = {"plain": "weighted", "weighted": "plain"}[kind]
    for trained_kind in (kind, other_kind, kind):
        _, state = train(strategies[trained_kind])
        trace = state.replica.opt_state[0].trace
        np.testing.assert_allclose(trace, expected[trained_kind])


def exchange_params(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    params = (replica.params + collectives.shift(replica.params, 1)) / 2
    return replica._replace(params=params), state


def test_a_jitted_sync_that_takes_no_mean_is_refused_after_it_ran():
    strategy = sa.every(sa.Strategy(sync=jax.jit(exchange_params)), 2)
    train(strategy)
    with pytest.raises(ValueError, match="an exchange between single workers is not"):
        train(participating(strategy, skip_first_worker))


def make_sharding() -> shards.Sharding:
    cut = shards.Cut((("model",),), (2,))
    return shards.Sharding((shards.Leaf((jax.tree_util.DictKey("w"),), (4,), cut),))


SETTINGS = {
    "COUNTED": (COUNTED, sa.WORKERS),
    "AS_GLOO": (AS_GLOO, True),
    "sharding": (shards._SHARDING, make_sharding()),
    "an array's shape": (Setting("spec", None), {"w": PartitionSpec("model")}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_jit_sees_each_setting(name):
    setting, value = SETTINGS[name]

    @jax.jit
    def is_set() -> jax.Array:
        return jnp.array(setting.get() == value)

    for expected in (False, True, False):
        with setting.set_to(value if expected else setting.get()):
            assert bool(is_set()) == expected


def test_jit_sees_another_traced_share():
    """One traced array must not stand in for another."""

    @jax.jit
    def weighted(x: jax.Array) -> jax.Array:
        return collectives.weighted(x)

    @jax.jit
    def weigh_by_two_shares(
        x: jax.Array, share: jax.Array, other_share: jax.Array
    ) -> tuple[jax.Array | bool, ...]:
        with counting(share):
            first_product = weighted(x)
        with counting(other_share):
            second_product = weighted(x)
        return first_product, second_product, weighted(x), takes_part()

    assert [float(x) for x in weigh_by_two_shares(1.0, 2.0, 3.0)] == [2, 3, 1, 1]


def average_momentum(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    mean = collectives.mean(collectives.weighted(replica.opt_state))
    return replica._replace(opt_state=mean), state


WRAPPERS = {
    "participating": lambda member: participating(member, skip_first_worker),
    "delayed": lambda member: sa.delayed(member, 1),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_jitted_sync_that_leaves_params_alone_leaves_them_alone(name):
    def replica_after(sync: Callable) -> sa.Replica:
        strategy = sa.every(sa.Strategy(sync=sync), 2)
        return train(WRAPPERS[name](strategy), steps=3)[1].replica

    expected = replica_after(average_momentum)
    jitted = replica_after(jax.jit(average_momentum))
    jax.tree.map(np.testing.assert_array_equal, jitted, expected)
