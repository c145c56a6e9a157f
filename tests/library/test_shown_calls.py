"""Strategies, reducers and trainers as text: the calls that made them."""

import copy
import functools
import inspect
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import reducers

REQUIRED_SETTINGS = {"learning_rate": 0.1}


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_an_algorithm_shows_the_call_that_makes_it_again(name):
    parameters = inspect.signature(sa.ALGORITHMS[name]).parameters.values()
    settings = {
        p.name: REQUIRED_SETTINGS[p.name] for p in parameters if p.default is p.empty
    }
    strategy = sa.ALGORITHMS[name](**settings)
    assert repr(eval(repr(strategy), vars(sa))) == repr(strategy)
    assert repr(strategy).startswith(f"{name}(")
    assert all(f"{p.name}=" in repr(strategy) for p in parameters if p.name != "axis")


def is_third(step: jax.Array) -> jax.Array:
    return step % 3 == 0


STRATEGIES_BY_CALL = {
    "bmuf(period=16, block_momentum=None, block_lr=1.0, nesterov=False)": sa.bmuf(),
    "every(average(field='params', reduce=mean), 4, offset=0)": sa.every(
        sa.average(), 4
    ),
    "measured(average(field='params', reduce=mean), by_leaf=True, layered=0, "
    "ends=None, only=None)": sa.measured(sa.average()),
    "chain(when(reset(GradientTransformationExtraArgs(…)), is_third), "
    "model_averaging(period=8, axis='own'))": sa.chain(
        sa.when(sa.reset(optax.sgd(0.1)), is_third), sa.model_averaging(8, axis="own")
    ),
    "masked(model_averaging(period=8), {'a': True, 'b': bool[1000]})": sa.masked(
        sa.model_averaging(8), {"a": True, "b": np.ones(1000, bool)}
    ),
    "reduce_with(error_feedback(power_sgd(rank=3, seed=0, min_rate=2.0, layered=0), "
    "decay=1.0, seed=0))": sa.reduce_with(
        reducers.error_feedback(reducers.power_sgd(3))
    ),
    "average(field='params', reduce=partial(top_k, 0.1, bits=4))": sa.average(
        reduce=functools.partial(reducers.top_k, 0.1, bits=4)
    ),
    "scaffold(period=16, learning_rate=0.5)": sa.scaffold(
        learning_rate=jnp.float32(0.5)
    ),
    "row_sparse(3, tables=is_third)": reducers.row_sparse(3, tables=is_third),
    "top_k(density=0.5, bits=None, seed=0, layered=0, axis='w')": reducers.top_k(
        0.5
    ).over("w"),
    "Strategy(sync=is_third, late=2)": sa.Strategy(sync=is_third, late=2),
    "Strategy()": sa.Strategy(),
    "model_averaging(period=4)": sa.delayed(sa.model_averaging(4), 0),
}


@pytest.mark.parametrize("text", STRATEGIES_BY_CALL)
def test_a_call_is_shown_with_its_values(text):
    assert repr(STRATEGIES_BY_CALL[text]) == text


def test_a_changed_strategy_shows_its_fields():
    strategy = sa.bmuf(4)
    changed = strategy._replace(late=3)
    assert changed.call is None
    assert repr(changed) == (
        "Strategy(init=init, sync=Combination(…), center=center, "
        "acts=Every(period=4, offset=0), axis=('devices', 'lanes'), late=3)"
    )
    assert repr(sa.chain(changed)) == "chain(Strategy(…))"
    assert strategy.call is not None and strategy.call.arguments["period"] == 4


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace is of 3.13")
def test_a_strategy_changed_by_copy_replace_shows_its_fields():
    changed = copy.replace(sa.bmuf(4), late=3)  # type: ignore[attr-defined]
    assert repr(changed).startswith("Strategy(init=")


def test_a_changed_strategy_shows_the_call_that_it_is_given():
    strategy = sa.bmuf(4)
    assert repr(strategy._replace(late=0, call=strategy.call)) == repr(strategy)


def test_a_changed_reducer_shows_its_fields():
    reducer = reducers.mean()._replace(takes_feedback=False)
    assert reducer.call is None
    assert repr(reducer).startswith("Reducer(") and "0x" not in repr(reducer)
    assert "takes_feedback=False" in repr(reducer)
    assert repr(reducer._replace(takes_feedback=True)) == repr(reducers.mean())


def test_strategies_can_be_hashed_and_their_factories_pickled():
    strategy = sa.every(sa.average(), 4)
    assert strategy in {strategy} and sa.average() not in {strategy}
    for factory in (sa.every, sa.bmuf, reducers.top_k):
        assert pickle.loads(pickle.dumps(factory)) is factory


def test_a_trainer_says_where_its_workers_are():
    def loss(params: Any, batch: Any) -> jax.Array:
        return (params * batch).mean()

    placement = sa.Placement(jax.devices()[:2])
    trainer = sa.DataParallel(
        loss, optax.sgd(0.1), sa.bmuf(), workers=8, backend="pmap", placement=placement
    )
    assert str(trainer.layout) == "8 workers on 2 cpu devices × 4 lanes"
    assert str(trainer) == f"{trainer.layout}, backend pmap"
    trainer.run(trainer.init(np.float32(0)), np.ones((1, 8), np.float32))
    assert repr(trainer) == f"DataParallel({trainer.layout} vectorized, backend pmap)"
