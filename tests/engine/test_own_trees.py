"""Params, buffers and strategy states that are classes of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems.user_nodes import OpaqueNode

import syncalgos as sa

STEPS = 8
BATCH = 12
X = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype(np.float32)
BATCHES = {"x": X, "y": X @ np.array([1.0, -2.0, 0.5], np.float32)}


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def start():
    return {"w": np.zeros(3, np.float32), "none": np.zeros((0, 2), np.float32)}


def held_inside(strategy):
    """The same strategy, whose state is a class of the user's own."""

    def reduce(grads, replica, state, step):
        grads, state = strategy.reduce(grads, replica, state.tree, step)
        return grads, OpaqueNode(state)

    def sync(replica, state, step):
        replica, state = strategy.sync(replica, state.tree, step)
        return replica, OpaqueNode(state)

    return sa.Strategy(
        init=lambda params: OpaqueNode(strategy.init(params)),
        reduce=reduce,
        sync=sync,
        center=lambda params, state: strategy.center(params, state.tree),
    )


def trained(strategy, wrap=lambda tree: tree, unwrap=lambda tree: tree):
    """Uses every method of the engine on the way; returns the center's params."""
    trainer = sa.DataParallel(
        sa.stateless(lambda params, batch: loss(unwrap(params), batch)),
        optax.sgd(0.1, momentum=0.9),
        strategy,
        workers=6,
    )
    state = trainer.init(wrap(start()))
    state, _ = trainer.run(state, jax.tree.map(lambda x: x[:4], BATCHES))
    assert trainer.divergence(state) >= 0
    trainer.evaluate(state, BATCHES)
    trainer.communication(state, steps=STEPS)
    state = trainer.from_host(trainer.to_host(state))
    state, _ = trainer.run(state, jax.tree.map(lambda x: x[4:], BATCHES))
    return unwrap(trainer.center(state).params)


@pytest.mark.slow
def test_params_and_state_may_be_classes_that_cannot_be_compared():
    expected = trained(sa.bmuf(2))
    result = trained(held_inside(sa.bmuf(2)), OpaqueNode, lambda params: params.tree)
    np.testing.assert_array_equal(result["w"], expected["w"])
    assert np.abs(result["w"]).max() > 0.1
