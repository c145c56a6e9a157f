"""Reducers by name and in strategies, and the errors for mistakes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reducer_cases import (
    REDUCERS,
    assert_close,
    normal,
    of_gradients,
    run,
    side_by_side,
)
from support.tiers import tiers

import syncalgos
from syncalgos import outer_step, reduce_with, reducers, sync_sgd
from syncalgos.reducers import (
    Reducer,
    clipped,
    error_feedback,
    low_bit,
    median,
    power_sgd,
    quantized,
    random_k,
    row_sparse,
    sign,
    top_k,
    trimmed,
)


def make_move_reducer(strategy: syncalgos.Strategy) -> Reducer:
    """The reducer that `outer_step(optax.sgd(1.0), …)` applies, seen at one sync.

    Params go from 0 to -x, so that x is the pseudo-gradient, and to minus its mean.
    """

    def combine(updates: Any, state: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        params = jax.tree.map(jnp.negative, updates)
        replica, state = strategy.sync(syncalgos.Replica(params), state, step)
        return jax.tree.map(jnp.negative, replica.params), updates, state

    return Reducer(combine, lambda x: strategy.init(jax.tree.map(jnp.zeros_like, x)))


NAMES_AND_FACTORIES = [
    ("mean", reducers.mean()),
    ("bf16", reducers.bf16()),
    ("fp16", reducers.fp16()),
    ("int8", quantized(8)),
    ("int4", quantized(4)),
    ("int2", quantized(2)),
    ("median", median()),
    ("trimmed", trimmed()),
    ("clipped", clipped()),
    (sign, sign()),
    (functools.partial(top_k, 0.3, bits=4), top_k(0.3, bits=4)),
    (error_feedback("int4", seed=1), error_feedback(quantized(4, seed=1))),
]


@pytest.mark.parametrize(("name_or_factory", "reducer"), NAMES_AND_FACTORIES)
def test_name_or_factory_is_the_same_program_as_its_reducer(name_or_factory, reducer):
    def trace(reducer: Any) -> str:
        def program(x: jax.Array, step: jax.Array) -> Any:
            return reducer.update(x, reducer.init(x), step=step)[0]

        axes = [("devices", 3), ("lanes", 1)]
        return str(jax.make_jaxpr(program, axis_env=axes)(np.ones(12, np.float32), 0))

    assert trace(of_gradients(sync_sgd(reduce=name_or_factory))) == trace(reducer)


# θ ← anchor - reduce(…)
PLAIN_OUTER_STEP = {"period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
OUTER_STRATEGIES = {
    "outer_step": outer_step(optax.sgd(1.0), top_k(0.3)),
    "diloco": syncalgos.diloco(**PLAIN_OUTER_STEP, reduce=top_k(0.3)),
    "muloco": syncalgos.muloco(**PLAIN_OUTER_STEP, reduce=top_k(0.3), decay=None),
    "streaming_diloco": syncalgos.streaming_diloco(
        **PLAIN_OUTER_STEP, reduce=top_k(0.3), fragments=1, delay=0, alpha=0.0
    ),
}


def test_outer_steps_reduce_what_params_moved():
    named_reducers = {
        name: make_move_reducer(strategy) for name, strategy in OUTER_STRATEGIES.items()
    }
    combined, _, _ = run(
        side_by_side(named_reducers | {"alone": top_k(0.3)}), normal((12,))
    )
    for name in OUTER_STRATEGIES:
        assert_close(combined[name], combined["alone"])


def test_reducer_in_an_optax_chain_is_told_the_step():
    chained = reduce_with(optax.chain(optax.scale(2.0), quantized(4)))
    x = normal((12,))
    named_reducers = {"chained": of_gradients(chained), "reducer": quantized(4)}
    combined, _, _ = run(side_by_side(named_reducers), x)
    assert_close(combined["chained"], 2 * combined["reducer"])


@pytest.mark.parametrize("name", tiers([*REDUCERS], [*REDUCERS][:2]))
def test_a_strategy_binds_a_reducer_to_its_axis(name):
    x = np.random.default_rng(0).normal(size=(3, 27, 19)).astype(np.float32)

    def make_worker(axis: str | tuple[str, ...]) -> Callable:
        strategy = outer_step(optax.sgd(1.0), reducers.late(REDUCERS[name]), axis=axis)

        def worker(x: jax.Array) -> Any:
            replica = syncalgos.Replica({"matrix": x})
            state = strategy.init(jax.tree.map(jnp.zeros_like, replica.params))
            _, state = strategy.sync(replica, state, 0)  # `late` delays its result
            return strategy.sync(replica, state, 1)[0].params["matrix"]

        return worker

    lanes = jax.vmap(make_worker(syncalgos.WORKERS), axis_name="lanes")
    devices = jax.jit(jax.vmap(lanes, axis_name="devices"))
    own_axis = jax.jit(jax.vmap(make_worker("own"), axis_name="own"))
    assert_close(own_axis(x), devices(x[None])[0])


def test_an_axis_is_given_once_to_the_algorithm():
    strategy = syncalgos.diloco(2, reduce=top_k(0.5), axis="w")

    def sync(x: jax.Array) -> Any:
        return strategy.sync(syncalgos.Replica(x), strategy.init(x), 0)[0].params

    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(jax.vmap(sync, axis_name="w")(x), x)


def test_a_reducer_keeps_an_axis_of_its_own():
    strategy = reduce_with(reducers.mean(axis="inner"), axis=("outer", "inner"))

    def reduce(x: jax.Array) -> Any:
        return strategy.reduce(x, syncalgos.Replica(x), strategy.init(x), 0)[0]

    x = np.arange(6.0).reshape(2, 3)
    means = jax.vmap(jax.vmap(reduce, axis_name="inner"), axis_name="outer")(x)
    np.testing.assert_array_equal(means, [[1.0] * 3, [4.0] * 3])


def test_a_reducer_in_an_optax_chain_needs_an_axis_of_its_own():
    def reduce_in_chain(reducer: Any) -> Any:
        strategy = reduce_with(optax.chain(optax.scale(2.0), reducer), axis="w")

        def reduce(x: jax.Array) -> Any:
            return strategy.reduce(x, syncalgos.Replica(x), strategy.init(x), 0)

        return jax.vmap(reduce, axis_name="w")(np.ones((2, 3), np.float32))[0]

    with pytest.raises(NameError, match="and a reducer inside an optax transformation"):
        reduce_in_chain(top_k(1.0))
    np.testing.assert_array_equal(
        reduce_in_chain(top_k(1.0, axis="w")), np.full((2, 3), 2.0)
    )


def test_a_changed_reducer_keeps_the_rest_and_is_still_bound():
    reducer = clipped(2.0)
    changed = dataclasses.replace(reducer, takes_feedback=True)
    assert changed == reducer._replace(takes_feedback=True) != reducer
    assert (changed.combine, changed.init) == (reducer.combine, reducer.init)
    bound_reducer = dataclasses.replace(top_k(0.5), init=lambda params: "own").over("w")
    assert bound_reducer.init(0) == "own"
    mean, _, _ = jax.vmap(lambda x: bound_reducer.combine(x, (), 0), axis_name="w")(
        np.eye(2)
    )
    np.testing.assert_array_equal(mean, np.full((2, 2), 0.5))
    assert bound_reducer.over("other") is bound_reducer
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(reducer, "takes_feedback", True)  # noqa: B010


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantized(3), "quantized: bits must be 8, 4 or 2, got 3"),
        (lambda: quantized("8"), "quantized: bits must be 8, 4 or 2, got '8'"),
        (lambda: quantized(8.0), "quantized: bits must be 8, 4 or 2, got 8.0"),
        (lambda: top_k(0.1, bits=16), "top_k: bits must be 8, 4 or 2, got 16"),
        (lambda: top_k(0), "top_k: density must be a finite number above 0, got 0"),
        (lambda: top_k(1.5), "top_k: density must be at most 1, got 1.5"),
        (lambda: random_k(float("nan")), "random_k: density must be .*, got nan"),
        (lambda: power_sgd(0), "power_sgd: rank must be a whole number .*, got 0"),
        (
            lambda: row_sparse(0, tables=True),
            "row_sparse: rows must be a whole .*, got 0",
        ),
        (
            lambda: row_sparse({"w": 2.5}, tables="w"),
            r"row_sparse: rows\['w'\] must be a whole",
        ),
        (lambda: trimmed(0.5), "trimmed: share must be .* below 0.5, got 0.5"),
        (lambda: trimmed(0), "trimmed: share must be above 0 .*, got 0"),
        (lambda: clipped(0), "clipped: radius must be .* above 0, got 0"),
        (lambda: clipped(iterations=0), "clipped: iterations must be .*, got 0"),
        (lambda: error_feedback("median"), "feedback: median, trimmed and clipped"),
        (lambda: error_feedback(clipped), "feedback: median, trimmed and clipped"),
        (lambda: error_feedback(low_bit), "low_bit and ef21 have their own feedback"),
        (lambda: low_bit(3), "low_bit: bits must be 8, 4 or 2, got 3"),
        (lambda: reducers.ef21("median"), "ef21: reducer cannot have feedback: median"),
        (lambda: error_feedback(reducers.ef21("mean")), "low_bit and ef21 have"),
        (
            lambda: reducers.ef21("mean", local_momentum=1),
            "ef21: local_momentum must be .*, got 1",
        ),
        (
            lambda: error_feedback("mean", decay=0),
            "error_feedback: decay must be .*, got 0",
        ),
        (lambda: error_feedback("mean", decay=1.1), "decay must be at most 1, got 1.1"),
        (lambda: error_feedback(3), "error_feedback: expected an optax .*, got 3"),
        (lambda: error_feedback("int9"), "unknown reducer 'int9'; did you mean 'int8'"),
        (lambda: outer_step(optax.sgd(1.0), "meen"), "did you mean 'mean'"),
        (lambda: reducers.cast(jnp.int8), "cast: dtype must be .*, got .*int8"),
        (lambda: quantized(seed=-1), "seed must be a whole number of at least 0"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
