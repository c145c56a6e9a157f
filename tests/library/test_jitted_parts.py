"""Each function of a strategy may be put under jax.jit, in somebody's own loop."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa

QUICK = ("sync_sgd", "bmuf", "diloco", "fedprox", "halos", "gossip")

COMBINATIONS = {
    "at_end": lambda: sa.at_end(sa.bmuf(4), 5),
    "chain": lambda: sa.chain(sa.bmuf(4), sa.every(sa.average("opt_state"), 2)),
    "decided": lambda: sa.decided(sa.bmuf(4), lambda replica, state, step: True),
    "delayed": lambda: sa.delayed(sa.bmuf(4), 2),
    "ema": lambda: sa.ema(sa.bmuf(4), 0.5),
    "masked": lambda: sa.masked(sa.bmuf(4), lambda params: {"w": True}),
    "measured": lambda: sa.measured(sa.bmuf(4)),
    "paced": lambda: sa.paced(sa.bmuf(4), [1, 2]),
    "participating": lambda: sa.participating(sa.bmuf(4), sa.sampled(0.5)),
    "until": lambda: sa.until(sa.bmuf(4), 3),
}


def call_jitted_parts(strategy: sa.Strategy) -> None:
    """Traces each function under jax.jit with two workers, twice as a loop does."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def train_step(params: Any) -> tuple[Any, Any]:
        replica = sa.Replica(params, optimizer.init(params), loss=jnp.float32(1))
        state = strategy.init(params)
        step = jnp.int32(3)
        grads = params
        for _ in range(2):
            grads, state = jax.jit(strategy.reduce)(grads, replica, state, step)
            replica, state = jax.jit(strategy.sync)(replica, state, step)
        return jax.jit(strategy.center)(replica.params, state), grads

    on_lanes = jax.vmap(train_step, axis_name="lanes")
    on_devices = jax.vmap(on_lanes, axis_name="devices")
    jax.eval_shape(on_devices, {"w": jnp.ones((2, 1, 3))})


@pytest.mark.parametrize(
    "name", tiers(sa.ALGORITHMS, QUICK, [x for x in sa.ALGORITHMS if x not in QUICK])
)
def test_the_parts_of_an_algorithm_are_jitted(name):
    factory = sa.ALGORITHMS[name]
    if "learning_rate" in inspect.signature(factory).parameters:
        factory = functools.partial(factory, learning_rate=0.1)
    call_jitted_parts(factory())


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_parts_of_a_combination_are_jitted(name):
    call_jitted_parts(COMBINATIONS[name]())
