"""Strategies and reducers are pickled and copied as the calls that made them."""

import copy
import functools
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import reducers

WORKERS = 2


def schedule(step: Any) -> Any:
    return 0.1 / (1 + step)


def is_third(step: Any) -> Any:
    return step % 3 == 0


def make_default(name: str) -> sa.Strategy:
    """An algorithm with its defaults, and a learning rate where it needs one."""
    parameters = inspect.signature(sa.ALGORITHMS[name]).parameters
    if "learning_rate" not in parameters:
        return sa.ALGORITHMS[name]()
    return sa.ALGORITHMS[name](learning_rate=0.1)


def train(strategy: sa.Strategy) -> list[np.ndarray]:
    """Trains two workers for 8 steps; returns the leaves of the center."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return ((params["w"] @ batch - 1) ** 2).mean()

    trainer = sa.DataParallel(
        loss, optax.sgd(0.1), strategy, workers=WORKERS, backend="vmap"
    )
    rng = np.random.default_rng(0)
    state = trainer.init({"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)})
    batches = rng.normal(size=(8, WORKERS * 2, 4, 1)).astype(np.float32)
    state, _ = trainer.run(state, batches)
    return [np.asarray(x) for x in jax.tree.leaves(trainer.center(state).params)]


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_an_algorithm_is_pickled_and_copied_as_its_call(name):
    strategy = make_default(name)
    for again in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert isinstance(again, sa.Strategy)
        assert repr(again) == repr(strategy)
        assert again.call is not None and again.call.function is sa.ALGORITHMS[name]


COMPOSED = {
    "every": lambda: sa.every(sa.average(), 4),
    "when": lambda: sa.when(sa.average(), is_third),
    "chain": lambda: sa.chain(sa.sync_sgd(), sa.every(sa.average("opt_state"), 4)),
    "until and after": lambda: sa.chain(
        sa.until(sa.sync_sgd(), 3), sa.after(sa.bmuf(2), 3)
    ),
    "delayed": lambda: sa.delayed(sa.model_averaging(4), 2),
    "ema": lambda: sa.ema(sa.diloco(2), 0.9),
    "masked": lambda: sa.masked(sa.model_averaging(2), {"w": True}),
    "a schedule": lambda: sa.slowmo(4, learning_rate=schedule),
    "a draw of workers": lambda: sa.participating(sa.bmuf(2), sa.sampled(0.5, seed=1)),
    "an array": lambda: sa.bmuf(4, block_lr=jnp.float32(0.5)),
    "a reducer": lambda: sa.diloco(2, reduce=reducers.error_feedback("int4")),
    "a partial": lambda: sa.average(
        reduce=functools.partial(reducers.top_k, 0.5, bits=4)
    ),
    "no call, and no closure": lambda: sa.Strategy(late=2),
}


@pytest.mark.parametrize("kind", COMPOSED)
def test_a_composition_is_pickled_and_copied_as_its_call(kind):
    strategy = COMPOSED[kind]()
    assert repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)
    assert repr(copy.deepcopy(strategy)) == repr(strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        sa.bmuf,
        pytest.param(COMPOSED["a reducer"], marks=pytest.mark.slow),
        pytest.param(COMPOSED["chain"], marks=pytest.mark.slow),
        pytest.param(COMPOSED["masked"], marks=pytest.mark.slow),
        pytest.param(sa.choco_sgd, marks=pytest.mark.slow),
    ],
)
def test_a_strategy_trains_the_same_after_it_was_pickled(make):
    strategy = make()
    again = pickle.loads(pickle.dumps(strategy))
    np.testing.assert_array_equal(train(again), train(strategy))


def test_a_strategy_with_closures_is_copied_but_not_pickled():
    def pull(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        return replica, state

    for strategy, hidden in (
        (sa.bmuf()._replace(sync=pull), "bmuf.<locals>.init"),
        (sa.Strategy(sync=pull), "<locals>.pull"),
        (sa.outer_step(optax.sgd(0.7)), "<locals>.init_fn"),
    ):
        assert repr(copy.deepcopy(strategy)) == repr(strategy)
        with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
            pickle.dumps(strategy)
        [line] = str(raised.value).splitlines()
        assert hidden in line


def test_an_outer_optimizer_is_pickled_by_the_algorithm_that_makes_it():
    strategy = sa.fedopt(4, method="adam")
    assert repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)


@pytest.mark.parametrize(
    "reducer",
    [
        reducers.mean(),
        reducers.mean()._replace(takes_feedback=False),
        reducers.trimmed(0.2),
        reducers.mean(axis="w"),
        pytest.param(reducers.top_k(0.5, bits=4), marks=pytest.mark.slow),
        pytest.param(reducers.error_feedback(reducers.sign()), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_reducer_combines_the_same_after_it_was_copied_or_pickled(reducer):
    x = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)

    def update(reducer: reducers.Reducer) -> Any:
        bound = reducer.over("w")

        def of_one_worker(x):
            return bound.update(x, bound.init(x), step=3)[0]

        return jax.vmap(of_one_worker, axis_name="w")(x)

    for again in (pickle.loads(pickle.dumps(reducer)), copy.deepcopy(reducer)):
        assert again.takes_feedback == reducer.takes_feedback
        np.testing.assert_array_equal(update(again), update(reducer))


def test_a_reducer_made_by_hand_combines_the_same_after_it_was_copied():
    def combine(updates: Any, state: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        return updates * 2, updates, state

    again = copy.deepcopy(reducers.Reducer(combine))
    assert again.update(3.0, ())[0] == 6.0
