"""Moving averages as centers: of any strategy, at no byte."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error
from problems.linear import BATCHES, make_params, make_trainer
from problems.quadratics import LR, ROUNDING, START, train, unflatten

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

DECAY = 0.9
BODY = {"body": True, "head": False}
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
STRATEGIES = {
    "plain": sa.Strategy(),
    "sync_sgd": sa.sync_sgd(),
    "bmuf": sa.bmuf(4, block_momentum=0.6, nesterov=True),
    "noloco": sa.noloco(4),
    "gossip ring": sa.gossip(topology="ring"),
    "masked": sa.masked(sa.bmuf(4), BODY),
    "phases": sa.chain(sa.until(sa.sync_sgd(), 3), sa.after(sa.bmuf(4), 3)),
}


def test_average_of_2_3_4_from_1_is_as_worked_out():
    def move(replica, state, step):
        params = jax.tree.map(lambda x: 0 * x + step + 2, replica.params)
        return replica._replace(params=params), state

    moved = sa.ema(sa.Strategy(sync=move), DECAY)
    centers = train(moved, steps=3, start=np.ones_like(START)).centers
    np.testing.assert_allclose(centers[:, 0], [1.1, 1.29, 1.561], rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_center_follows_the_replicas_which_train_as_before(name):
    strategy = STRATEGIES[name]
    plain = train(strategy, HEAVY_BALL)
    followed = train(sa.ema(strategy, DECAY), HEAVY_BALL)
    np.testing.assert_array_equal(followed.replicas, plain.replicas)
    center, expected = START, []
    for replicas in plain.replicas:
        center = center + (1 - DECAY) * (replicas.mean(0) - center)
        expected.append(center)
    assert relative_error(followed.centers, np.array(expected)) <= ROUNDING


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_more_is_sent(name):
    params = unflatten(START)
    sent = [
        sa.communication(each, params, workers=4, steps=12)
        for each in (STRATEGIES[name], sa.ema(STRATEGIES[name], DECAY))
    ]
    np.testing.assert_array_equal(sent[0].per_step, sent[1].per_step)
    assert sent[0].calls == sent[1].calls


MOMENTUM_RESET = sa.reset(HEAVY_BALL)
AROUND = {
    "every": (lambda s: sa.every(s, 4), sa.average()),
    "delayed": (lambda s: sa.delayed(s, 2), sa.model_averaging(4)),
    "participating": (
        lambda s: sa.participating(s, sa.sampled(0.5)),
        sa.model_averaging(4),
    ),
    "at_syncs": (lambda s: sa.at_syncs(s, MOMENTUM_RESET), sa.bmuf(4)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", AROUND)
def test_the_clock_is_the_local_step_inside_other_combinators_too(name):
    around, strategy = AROUND[name]
    inside = train(around(sa.ema(strategy, DECAY)), HEAVY_BALL)
    outside = train(sa.ema(around(strategy), DECAY), HEAVY_BALL)
    np.testing.assert_array_equal(inside.replicas, outside.replicas)
    np.testing.assert_array_equal(inside.centers, outside.centers)


def test_average_of_bfloat16_params_takes_moves_below_their_8_bits():
    ones, twos = (
        jax.tree.map(
            lambda x, n=n: jnp.full(x.shape, n, jnp.bfloat16), unflatten(START)
        )
        for n in (1, 2)
    )
    to_two = sa.Strategy(sync=lambda replica, state, step: (sa.Replica(twos), state))
    strategy = sa.ema(to_two, decay=0.999)
    replica, state = sa.Replica(ones), strategy.init(ones)
    for step in range(3):
        replica, state = strategy.sync(replica, state, step)
    for held in jax.tree.leaves(state.average):
        assert held.dtype == jnp.float32
        np.testing.assert_allclose(held, 2 - 0.999**3, rtol=1e-6)


@pytest.mark.slow
def test_gradients_may_still_be_merged():
    with jax.enable_x64(False):
        merged = make_trainer(
            sa.ema(sa.sync_sgd(), DECAY), devices=[0], lane_form="merged"
        )
        vectorized = make_trainer(sa.ema(sa.sync_sgd(), DECAY), devices=[0])
        centers = []
        for trainer in (merged, vectorized):
            state, _ = trainer.run(trainer.init(make_params()), BATCHES)
            centers.append(trainer.center(state).params)
    assert merged.lane_form == "merged"
    for ours, theirs in zip(*map(jax.tree.leaves, centers), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_no_strategy_or_no_decay_is_refused():
    with pytest.raises(ValueError, match=r"ema: expected a Strategy.*call it: bmuf"):
        sa.ema(sa.bmuf, 0.9)
    for decay in (1, -0.1, float("nan"), "abc"):
        with pytest.raises(ValueError, match=f"ema: decay must be .*{decay}"):
            sa.ema(sa.bmuf(), decay)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_floats_of_8_bits_are_averaged_in_float32(dtype):
    def loss(params, buffers, batch, key):
        return jnp.sum(params["w"] ** 2), (buffers, {})

    trainer = sa.DataParallel(
        loss, optax.sgd(0.1), sa.bmuf(2), workers=2, backend="vmap"
    )
    state = trainer.init({"w": jnp.ones(2)}, buffers={"scale": jnp.full(3, 1.5, dtype)})
    state, _ = trainer.run(state, np.zeros((2, 2), np.float32))
    center = trainer.center(state).buffers["scale"]
    assert center.dtype == dtype
    np.testing.assert_array_equal(np.float32(center), 1.5)
    anchor = sa.bmuf(2).init({"w": jnp.ones(2, dtype)})
    assert {x.dtype for x in jax.tree.leaves(anchor)} == {jnp.dtype(jnp.float32)}
