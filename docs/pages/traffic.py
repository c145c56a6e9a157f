"""Bytes that each algorithm sends, counted for one model."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos

WORKERS = 8
# So many that a start without compression or local steps weighs little in the mean.
STEPS = 4800
MODEL = {
    "kernel": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
    "bias": jax.ShapeDtypeStruct((1000,), jnp.float32),
}
PARAMS = sum(leaf.size for leaf in MODEL.values())
OPTIMIZER = optax.adam(1e-3)
LEARNING_RATE = 0.1  # of algorithms that need it; qsr has shorter rounds at higher ones


class Traffic(NamedTuple):
    """The mean of what a worker sends in a step, in bytes.

    Attributes:
        least_bytes: if no vote asks for a sync.
        most_bytes: if each of them does.
    """

    least_bytes: float
    most_bytes: float


def count_all() -> dict[str, Traffic]:
    """Counts what each algorithm of the registry sends."""
    return {name: count_sends(make) for name, make in syncalgos.ALGORITHMS.items()}


def count_sends(make: Callable[..., syncalgos.Strategy]) -> Traffic:
    """Counts what an algorithm sends with its defaults."""
    strategy = make(learning_rate=LEARNING_RATE) if needs_rate(make) else make()
    replica = syncalgos.Replica(MODEL, jax.eval_shape(OPTIMIZER.init, MODEL))

    def a_step(decisions=None) -> float:
        counts = syncalgos.communication(
            strategy, replica, workers=WORKERS, steps=STEPS, taken=decisions
        )
        return counts.bytes_per_worker / STEPS

    def decisions(params):
        return syncalgos.sync_metrics(strategy.init(params), 0)["decided"]

    if syncalgos.describe(strategy).decides:
        axes = [(name, 1) for name in syncalgos.WORKERS]
        trace = jax.make_jaxpr(decisions, axis_env=axes, return_shape=True)
        skips = np.zeros((STEPS, *trace(MODEL)[1].shape), bool)
        return Traffic(a_step(skips), a_step(~skips))
    mean = a_step()
    return Traffic(mean, mean)


def needs_rate(make: Callable[..., syncalgos.Strategy]) -> bool:
    """Says whether an algorithm has to know the learning rate."""
    return "learning_rate" in inspect.signature(make).parameters
