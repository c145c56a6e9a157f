"""Moving averages as centers: of any strategy, at no byte."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.problems.quadratics import START, unflatten

import syncalgos as sa
from syncalgos._combinators import introspection

DECAY = 0.9


def test_moving_average_sends_nothing():
    params = unflatten(START)
    strategy = sa.chain(sa.sync_sgd(), sa.bmuf(4))
    counts = sa.communication(strategy, params, workers=4, steps=12)
    ema_counts = sa.communication(sa.ema(strategy, DECAY), params, workers=4, steps=12)
    np.testing.assert_array_equal(ema_counts.per_step, counts.per_step)
    assert ema_counts.calls == counts.calls


def test_gradients_that_are_a_mean_stay_one():
    """So that lanes may still be merged."""
    assert introspection.takes_mean(sa.ema(sa.sync_sgd(), DECAY))
    assert not introspection.takes_mean(sa.ema(sa.topk_sgd(), DECAY))


def test_average_of_bfloat16_params_takes_moves_below_their_8_bits():
    def fill(value: float) -> Any:
        """Params that all have this value."""
        return jax.tree.map(
            lambda x: jnp.full(x.shape, value, jnp.bfloat16), unflatten(START)
        )

    def sync_to_two(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        return sa.Replica(fill(2)), state

    strategy = sa.ema(sa.Strategy(sync=sync_to_two), decay=0.999)
    replica = sa.Replica(fill(1))
    state = strategy.init(replica.params)
    for step in range(3):
        replica, state = strategy.sync(replica, state, step)
    for average in jax.tree.leaves(state.average):
        assert average.dtype == jnp.float32
        np.testing.assert_allclose(average, 2 - 0.999**3, rtol=1e-6)


def test_floats_of_8_bits_are_averaged_in_float32():
    def loss(
        params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        return jnp.sum(params["w"] ** 2), (buffers, {})

    trainer = sa.DataParallel(
        loss, optax.sgd(0.1), sa.bmuf(2), workers=2, backend="vmap"
    )
    buffers = [jnp.full(3, 1.5, x) for x in (jnp.float8_e4m3fn, jnp.float8_e5m2)]
    state = trainer.init({"w": jnp.ones(2)}, buffers=buffers)
    state, _ = trainer.run(state, np.zeros((2, 2), np.float32))
    for buffer, start in zip(trainer.center(state).buffers, buffers, strict=True):
        assert buffer.dtype == start.dtype
        np.testing.assert_array_equal(np.float32(buffer), 1.5)
    anchor = sa.bmuf(2).init(buffers)
    assert {x.dtype for x in jax.tree.leaves(anchor)} == {jnp.dtype(jnp.float32)}
