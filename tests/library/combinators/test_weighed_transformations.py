"""Workers that skip, and what optax transformations do before their reducer weighs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import Replica, Strategy, participating, reducers

WEIGHTS = np.array([0.0, 1.0, 2.0])
GRADS = np.array([[-13.5, 4.0], [-1.5, 1.0], [-0.9, 2.0]], np.float32)
CLIPPED_MEAN = WEIGHTS @ np.clip(GRADS, -1, 1) / 3
PLAIN_MEAN = WEIGHTS @ GRADS / 3
MEAN = reducers.mean(axis="batch")
CLIP_THEN_MEAN = optax.chain(optax.clip(1.0), MEAN)


def one_to_two(step: jax.Array, workers: int) -> jax.Array:
    return jnp.asarray(WEIGHTS)


def weigh(strategy: Strategy) -> Strategy:
    return participating(strategy, one_to_two)


def reduce_twice(strategy: Strategy) -> np.ndarray:
    """What the workers' gradients become at the second step, (workers, entries)."""

    def worker(grads: jax.Array) -> jax.Array:
        params = jnp.zeros(2)
        state = strategy.init(params)
        _, state = strategy.reduce(grads, Replica(params), state, 0)
        return strategy.reduce(grads, Replica(params), state, 1)[0]

    return np.asarray(jax.vmap(worker, axis_name="batch")(jnp.asarray(GRADS)))


def sync_once(strategy: Strategy) -> np.ndarray:
    """The params after a round that moved each worker by its gradient."""

    def worker(grads: jax.Array) -> jax.Array:
        state = strategy.init(jnp.zeros(2))
        return strategy.sync(Replica(-grads), state, 0)[0].params

    return np.asarray(jax.vmap(worker, axis_name="batch")(jnp.asarray(GRADS)))


def test_clip_in_front_of_a_mean_sees_gradients_without_weights():
    strategy = weigh(sa.reduce_with(CLIP_THEN_MEAN, axis="batch"))
    np.testing.assert_allclose(reduce_twice(strategy), [CLIPPED_MEAN] * 3, rtol=1e-6)


def test_clip_in_front_of_an_outer_step_sees_moves_without_weights():
    strategy = weigh(sa.outer_step(optax.sgd(1.0), CLIP_THEN_MEAN, axis="batch"))
    np.testing.assert_allclose(sync_once(strategy), [-CLIPPED_MEAN] * 3, rtol=1e-6)


def test_momentum_in_front_of_a_mean_is_each_workers_own():
    momentum_then_mean = optax.chain(optax.trace(0.5), MEAN)
    strategy = weigh(sa.reduce_with(momentum_then_mean, axis="batch"))
    np.testing.assert_allclose(
        reduce_twice(strategy), [1.5 * PLAIN_MEAN] * 3, rtol=1e-6
    )


def test_worker_that_skips_sends_nothing_of_its_earlier_momentum():
    def leaves_after_a_step(step: jax.Array, workers: int) -> jax.Array:
        return jnp.where(step == 0, jnp.ones(workers), jnp.asarray(WEIGHTS))

    momentum_then_mean = optax.chain(optax.trace(0.5), MEAN)
    reduce = sa.reduce_with(momentum_then_mean, axis="batch")
    strategy = participating(reduce, leaves_after_a_step)
    np.testing.assert_allclose(
        reduce_twice(strategy), [1.5 * PLAIN_MEAN] * 3, rtol=1e-6
    )


def test_leaves_beside_a_mask_stay_each_workers_own():
    def worker(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        masked_mean = optax.masked(CLIP_THEN_MEAN, {"sent": True, "kept": False})
        strategy = weigh(sa.reduce_with(masked_mean, axis="batch"))
        state = strategy.init(grads)
        return strategy.reduce(grads, Replica(grads), state, 0)[0]

    grads = {"sent": jnp.asarray(GRADS), "kept": jnp.asarray(GRADS)}
    reduced = jax.vmap(worker, axis_name="batch")(grads)
    np.testing.assert_allclose(reduced["sent"], [CLIPPED_MEAN] * 3, rtol=1e-6)
    np.testing.assert_array_equal(reduced["kept"], GRADS)


@pytest.mark.parametrize("reduce", [MEAN, CLIP_THEN_MEAN], ids=["mean", "clip, mean"])
def test_weights_that_are_equal_change_nothing(reduce):
    strategy = sa.reduce_with(reduce, axis="batch")
    equal = participating(strategy, lambda step, workers: jnp.ones(workers))
    np.testing.assert_allclose(reduce_twice(equal), reduce_twice(strategy), rtol=1e-6)


def send_by_pmean(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.lax.pmean(updates, "batch"), state


PMEAN = optax.GradientTransformation(optax.init_empty_state, send_by_pmean)


@pytest.mark.parametrize(
    "transformation",
    [PMEAN, optax.chain(MEAN, PMEAN)],
    ids=["alone", "behind a reducer"],
)
def test_transformation_that_sends_without_a_reducer_is_weighed(transformation):
    strategy = weigh(sa.reduce_with(transformation, axis="batch"))
    np.testing.assert_allclose(reduce_twice(strategy), [PLAIN_MEAN] * 3, rtol=1e-6)


def reduce_leaves(transformation: optax.GradientTransformation) -> dict[str, jax.Array]:
    """What a transformation makes of two leaves that hold the same gradients."""
    strategy = weigh(sa.reduce_with(transformation, axis="batch"))

    def worker(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        state = strategy.init(grads)
        return strategy.reduce(grads, Replica(grads), state, 0)[0]

    grads = {"by_reducer": jnp.asarray(GRADS), "by_pmean": jnp.asarray(GRADS)}
    return jax.vmap(worker, axis_name="batch")(grads)


@pytest.mark.parametrize("is_jitted", [False, True], ids=["plain", "jit"])
def test_gradients_that_are_sent_beside_a_reducer_are_refused(is_jitted):
    pmean = PMEAN
    if is_jitted:
        pmean = optax.GradientTransformation(PMEAN.init, jax.jit(PMEAN.update))
    labels = {"by_reducer": "by_reducer", "by_pmean": "by_pmean"}
    beside = optax.partition({"by_reducer": MEAN, "by_pmean": pmean}, labels)
    for transformation in (beside, optax.chain(pmean, MEAN)):
        with pytest.raises(ValueError, match="sends gradients or moves without a"):
            reduce_leaves(transformation)


def test_reducer_inside_another_one_does_not_weigh_again():
    def combine(updates: Any, state: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        return MEAN.update(updates, ())[0], updates, state

    own_reducer = sa.reducers.Reducer(combine)
    strategy = weigh(
        sa.reduce_with(optax.chain(optax.clip(1.0), own_reducer), axis="batch")
    )
    np.testing.assert_allclose(reduce_twice(strategy), [CLIPPED_MEAN] * 3, rtol=1e-6)
