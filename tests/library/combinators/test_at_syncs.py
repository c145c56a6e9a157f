"""Tests of `at_syncs`: another strategy wherever the syncs of one take effect."""

import numpy as np
import optax
import pytest
from problems import relative_error
from problems.quadratics import LR, ByHand, assert_replicas, assert_same, train

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
CLEARLY = 1e-2

MARK = sa.Strategy(
    sync=lambda replica, state, step: (
        replica._replace(buffers=replica.buffers + 1),
        state,
    )
)

# The strategy, and after which of 16 local steps, counted from 1, its syncs show.
SYNCS = {
    "every": (sa.bmuf(4), [4, 8, 12, 16]),
    "gossip": (sa.gossip(), list(range(1, 17))),
    "easgd": (sa.easgd(4), [4, 8, 12, 16]),
    "scaffold": (sa.scaffold(4, learning_rate=LR), [4, 8, 12, 16]),
    "palsgd": (sa.palsgd(4, learning_rate=LR), [4, 8, 12, 16]),
    "fedavg": (sa.fedavg(4, fraction=0.5), [4, 8, 12, 16]),
    "paced": (sa.paced(sa.model_averaging(4), [4, 1]), [4, 8, 12, 16]),
    "schedule": (sa.every(sa.average(), lambda step: 2 + step), [2, 6, 14]),
    "until": (sa.until(sa.bmuf(4), 9), [4, 8]),
    "after": (sa.after(sa.bmuf(4), 9), [12, 16]),
    "post_local_sgd": (sa.post_local_sgd(dense_steps=6, period=4), [8, 12, 16]),
    "hierarchical": (sa.hierarchical(6, inner_period=4, groups=1), [4, 6, 8, 12, 16]),
    "streaming_diloco": (sa.streaming_diloco(8, fragments=2), [4, 8, 12, 16]),
    "with a delay": (sa.streaming_diloco(8, fragments=2, delay=1), [4, 8, 12, 16]),
    "delayed": (sa.delayed(sa.model_averaging(4), 2), [6, 10, 14]),
    "delayed chain": (
        sa.delayed(sa.chain(sa.model_averaging(4), sa.model_averaging(6)), 1),
        [5, 7, 9, 13],
    ),
    "gradients too": (sa.chain(sa.sync_sgd(), sa.model_averaging(6)), [6, 12]),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SYNCS)
def test_at_syncs_acts_where_syncs_take_effect(name):
    strategy, expected = SYNCS[name]
    marked = train(sa.at_syncs(strategy, MARK), workers=2, steps=16)
    counts = marked.replica.buffers[:, 0]
    ends = 1 + np.flatnonzero(np.diff(counts, prepend=0))
    assert ends.tolist() == expected


@pytest.mark.parametrize(
    "extra", [sa.reset(HEAVY_BALL), sa.average("opt_state")], ids=["reset", "average"]
)
def test_at_syncs_of_a_period_is_a_chain_of_that_period(extra):
    apart = train(sa.at_syncs(sa.model_averaging(PERIOD), extra), HEAVY_BALL)
    assert_same(
        apart, train(sa.every(sa.chain(sa.average(), extra), PERIOD), HEAVY_BALL)
    )
    plain = train(sa.model_averaging(PERIOD), HEAVY_BALL)
    assert relative_error(apart.centers[-1], plain.centers[-1]) > CLEARLY


def test_at_syncs_of_a_delayed_strategy_restarts_momentum_when_results_arrive():
    under_way, own = {}, ByHand(momentum=0.9)
    for step, theta, momentum in own:
        if step in under_way:
            theta[:] = under_way[step]
            momentum[:] = 0
        if (step + 1) % PERIOD == 0:
            under_way[step + 2] = theta.mean(0)
    strategy = sa.at_syncs(
        sa.delayed(sa.model_averaging(PERIOD), 2), sa.reset(HEAVY_BALL)
    )
    assert_replicas(train(strategy, HEAVY_BALL), own.replicas)


@pytest.mark.parametrize(
    "strategy",
    [
        sa.sync_sgd(),
        sa.every(sa.sync_sgd(), 4),
        sa.until(sa.masked(sa.sync_sgd(), True), 4),
        sa.chain(sa.sync_sgd(), sa.topk_sgd()),
        sa.delayed(sa.sync_sgd(), 2),
    ],
    ids=["sync_sgd", "every", "until masked", "chain", "delayed"],
)
def test_at_syncs_refuses_strategies_that_never_sync(strategy):
    with pytest.raises(ValueError, match="never syncs"):
        sa.at_syncs(strategy, sa.reset(HEAVY_BALL))


def test_at_syncs_refuses_what_is_no_strategy():
    for pair in ((sa.bmuf, sa.reset(HEAVY_BALL)), (sa.bmuf(), sa.reset)):
        with pytest.raises(ValueError, match="at_syncs: expected a Strategy"):
            sa.at_syncs(*pair)
