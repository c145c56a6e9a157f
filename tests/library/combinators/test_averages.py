"""Moving averages as centers: of any strategy, at no byte."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.problems.quadratics import START, unflatten

import syncalgos as sa
from syncalgos._combinators import introspection

DECAY = 0.9


def test_nothing_more_is_sent():
    params = unflatten(START)
    strategy = sa.chain(sa.sync_sgd(), sa.bmuf(4))
    sent = [
        sa.communication(each, params, workers=4, steps=12)
        for each in (strategy, sa.ema(strategy, DECAY))
    ]
    np.testing.assert_array_equal(sent[0].per_step, sent[1].per_step)
    assert sent[0].calls == sent[1].calls


def test_gradients_that_are_a_mean_stay_one():
    """So that lanes may still be merged."""
    assert introspection.takes_mean(sa.ema(sa.sync_sgd(), DECAY))
    assert not introspection.takes_mean(sa.ema(sa.topk_sgd(), DECAY))


def test_average_of_bfloat16_params_takes_moves_below_their_8_bits():
    ones, twos = (
        jax.tree.map(
            lambda x, n=n: jnp.full(x.shape, n, jnp.bfloat16), unflatten(START)
        )
        for n in (1, 2)
    )
    to_two = sa.Strategy(sync=lambda replica, state, step: (sa.Replica(twos), state))
    strategy = sa.ema(to_two, decay=0.999)
    replica = sa.Replica(ones)
    state = strategy.init(ones)
    for step in range(3):
        replica, state = strategy.sync(replica, state, step)
    for held in jax.tree.leaves(state.average):
        assert held.dtype == jnp.float32
        np.testing.assert_allclose(held, 2 - 0.999**3, rtol=1e-6)


def test_floats_of_8_bits_are_averaged_in_float32():
    def loss(params, buffers, batch, key):
        return jnp.sum(params["w"] ** 2), (buffers, {})

    trainer = sa.DataParallel(
        loss, optax.sgd(0.1), sa.bmuf(2), workers=2, backend="vmap"
    )
    short = [jnp.full(3, 1.5, x) for x in (jnp.float8_e4m3fn, jnp.float8_e5m2)]
    state = trainer.init({"w": jnp.ones(2)}, buffers=short)
    state, _ = trainer.run(state, np.zeros((2, 2), np.float32))
    for found, start in zip(trainer.center(state).buffers, short, strict=True):
        assert found.dtype == start.dtype
        np.testing.assert_array_equal(np.float32(found), 1.5)
    anchor = sa.bmuf(2).init(short)
    assert {x.dtype for x in jax.tree.leaves(anchor)} == {jnp.dtype(jnp.float32)}
