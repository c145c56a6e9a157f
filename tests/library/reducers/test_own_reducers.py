"""Reducers that users write with `factory` follow the axis of their strategy."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from syncalgos import Replica, Strategy, average, every, outer_step, reduce_with
from syncalgos.reducers import error_feedback, late
from syncalgos.writing import WORKERS, Axis, Reducer, collectives, factory

X = np.float32([[1.4, -2.0, 0.6], [0.4, 3.3, 0.6], [2.2, 1.4, -0.6]])  # (workers, 3)


@factory
def rounded(axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' values, each rounded to a whole number."""

    def combine(updates: Any, state: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        sent_updates = jax.tree.map(jnp.round, updates)
        return collectives.mean(sent_updates, axis), sent_updates, state

    return Reducer(combine)


def reduce_twice(strategy: Strategy) -> np.ndarray:
    """The reduced gradients X of two local steps: (steps, workers, 3)."""

    def worker(grads: jax.Array) -> jax.Array:
        state = strategy.init(grads)
        reduced_grads = []
        for step in range(2):
            reduced, state = strategy.reduce(grads, Replica(grads), state, step)
            reduced_grads.append(reduced)
        return jnp.stack(reduced_grads)

    mapped = jax.vmap(worker, axis_name="batch", out_axes=1)
    return np.asarray(mapped(X))


def sync_once(strategy: Strategy) -> np.ndarray:
    """The workers' params after a sync of params X, from anchors of 0."""

    def worker(params: jax.Array) -> jax.Array:
        state = strategy.init(jnp.zeros_like(params))
        replica, _ = strategy.sync(Replica(params), state, 0)
        return replica.params

    return np.asarray(jax.vmap(worker, axis_name="batch")(X))


FIRST_MEAN = np.round(X).mean(0)
SECOND_MEAN_WITH_FEEDBACK = np.round(2 * X - np.round(X)).mean(0)


@pytest.mark.parametrize(
    ("reducer", "first_mean", "second_mean"),
    [
        (rounded(), FIRST_MEAN, FIRST_MEAN),
        (error_feedback(rounded()), FIRST_MEAN, SECOND_MEAN_WITH_FEEDBACK),
        (late(error_feedback(rounded())), np.zeros(3), FIRST_MEAN),
        (pickle.loads(pickle.dumps(rounded())), FIRST_MEAN, FIRST_MEAN),
    ],
    ids=["alone", "feedback", "late", "pickled"],
)
def test_gradients_are_reduced_over_the_axis_of_the_strategy(
    reducer, first_mean, second_mean
):
    reduced = reduce_twice(reduce_with(reducer, axis="batch"))
    np.testing.assert_allclose(reduced[0], [first_mean] * 3, rtol=1e-6)
    np.testing.assert_allclose(reduced[1], [second_mean] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        average("params", rounded(), axis="batch"),
        every(outer_step(optax.sgd(1.0), rounded(), axis="batch"), 1),
    ],
    ids=["average", "outer_step"],
)
def test_params_are_reduced_over_the_axis_of_the_strategy(strategy):
    np.testing.assert_allclose(sync_once(strategy), [FIRST_MEAN] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "reducer", [rounded("batch"), rounded(axis="batch")], ids=["position", "name"]
)
def test_an_axis_that_the_reducer_was_made_with_stays(reducer):
    reduced = reduce_twice(reduce_with(reducer, axis="absent"))
    np.testing.assert_allclose(reduced[0], [FIRST_MEAN] * 3, rtol=1e-6)


def test_a_reducer_shows_its_call():
    assert repr(rounded()) == "rounded()"
    assert repr(average(reduce=rounded(axis="batch"))).endswith(
        "reduce=rounded(axis='batch'))"
    )


def test_a_factory_without_an_axis_is_refused():
    @factory
    def over_workers() -> Reducer:
        return Reducer(lambda updates, state, step: (updates, updates, state))

    with pytest.raises(
        ValueError, match=r"over_workers: .* must have the argument axis"
    ):
        over_workers()


def test_a_factory_of_something_else_is_refused():
    @factory
    def scaled(*, axis: Axis = WORKERS) -> optax.GradientTransformation:
        return optax.scale(2.0)

    with pytest.raises(ValueError, match=r"scaled: .* return a Strategy or a Reducer"):
        scaled()
