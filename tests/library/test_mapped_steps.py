"""A local step that a user's vmap maps: workers would take different branches."""

import jax
import jax.numpy as jnp
import pytest

import syncalgos
from syncalgos import Replica, Strategy
from syncalgos.reducers import random_k

WORKERS = 4
STRATEGIES = {
    "a period": syncalgos.bmuf(4, axis="batch"),
    "a phase": syncalgos.after(syncalgos.sync_sgd(axis="batch"), 3),
    "a graph that changes": syncalgos.gossip("exponential", axis="batch"),
    "a common draw": syncalgos.sync_sgd(reduce=random_k(0.5), axis="batch"),
    "a schedule of compression": syncalgos.dgc(axis="batch"),
    "unlike speeds": syncalgos.async_diloco(4, axis="batch"),
    "a vote": syncalgos.dynamic_averaging(axis="batch"),
    "workers that rest": syncalgos.participating(
        syncalgos.sync_sgd(axis="batch"), syncalgos.sampled(0.5)
    ),
}


def take_step(strategy: Strategy, params: jax.Array, step: jax.Array) -> jax.Array:
    """One worker's reduce and sync, without an optimizer."""
    replica = Replica(params, ())
    grads, state = strategy.reduce(params, replica, strategy.init(params), step)
    replica, state = strategy.sync(replica._replace(params=grads), state, step)
    return replica.params


def map_steps(
    strategy: Strategy, steps: jax.Array, *, step_axis: int | None
) -> jax.Array:
    """The workers' params after a step, (workers, entries)."""
    params = jnp.arange(3.0 * WORKERS).reshape(WORKERS, 3)

    def worker_step(params: jax.Array, step: jax.Array) -> jax.Array:
        return take_step(strategy, params, step)

    mapped = jax.vmap(worker_step, in_axes=(0, step_axis), axis_name="batch")
    return mapped(params, steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_step_that_differs_between_workers_is_refused(name):
    with pytest.raises(ValueError, match="give it in_axes None"):
        map_steps(STRATEGIES[name], jnp.arange(WORKERS), step_axis=0)


def test_step_that_a_scan_carries_mapped_is_refused():
    def train(params, step):
        def body(carry, _):
            params, step = carry
            return (take_step(STRATEGIES["a period"], params, step), step + 1), None

        return jax.lax.scan(body, (params, step), None, length=2)[0]

    with pytest.raises(ValueError, match="give it in_axes None"):
        jax.jit(jax.vmap(train, axis_name="batch"))(jnp.ones((4, 3)), jnp.arange(4))


def test_one_step_of_all_workers_may_be_mapped_over_seeds():
    strategy = STRATEGIES["a period"]

    def of_seed(step: jax.Array) -> jax.Array:
        return map_steps(strategy, step, step_axis=None)

    by_seed = jax.vmap(of_seed, axis_name="seeds")(jnp.array([2, 3]))
    assert jnp.array_equal(
        by_seed[0], map_steps(strategy, jnp.int32(2), step_axis=None)
    )
    assert jnp.array_equal(
        by_seed[1], map_steps(strategy, jnp.int32(3), step_axis=None)
    )


def test_gradient_goes_through_a_step_that_is_checked():
    def total(params: jax.Array) -> jax.Array:
        worker_step = jax.vmap(
            lambda params: take_step(STRATEGIES["a period"], params, jnp.int32(3)),
            axis_name="batch",
        )
        return worker_step(params).sum()

    grads = jax.jit(jax.grad(total))(jnp.ones((WORKERS, 3)))
    assert jnp.isfinite(grads).all()
