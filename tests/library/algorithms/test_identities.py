"""Hosts, limits and roundings, which a recurrence of 14 steps does not reach.

In float64, on quadratic losses. The oracle is theory or another strategy; what theory
keeps apart differs by CLEARLY.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems.quadratics import LR, ROUNDING, SIZE, assert_same, train

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
CLEARLY = 1e-2
SLOW_HOSTS = (8, 4, 4), (8, 1, 2)


@pytest.mark.parametrize(
    ("workers", "hosts", "groups"),
    [(6, 3, 3), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_HOSTS)],
)
def test_groups_are_as_many_as_lie_on_whole_hosts(workers, hosts, groups):
    with_hosts = sa.hierarchical(8, inner_period=PERIOD, hosts=hosts)
    with_groups = sa.hierarchical(8, inner_period=PERIOD, groups=groups)
    trained = [
        train(strategy, HEAVY_BALL, workers) for strategy in (with_hosts, with_groups)
    ]
    assert_same(*trained)


def test_hierarchical_refuses_groups_that_span_hosts():
    with pytest.raises(ValueError, match=r"2 groups on 4 hosts .* a multiple of 4"):
        sa.hierarchical(groups=2, hosts=4)
    with pytest.raises(ValueError, match="6 workers do not divide over 4 hosts"):
        train(sa.hierarchical(8, inner_period=PERIOD, hosts=4), HEAVY_BALL, workers=6)


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("growth", "rate", "steps"),
    [(0.01, 0.001, 100), (0.29, 0.005, 3364), (0.0999, 0.01, 99)],
)
def test_qsr_takes_a_whole_ratio_for_whole(growth, rate, steps, is_wide):
    """(0.01 / 0.001)² is below 100 in float32, and (0.29 / 0.005)² below 3364."""
    with jax.enable_x64(is_wide):
        for learning_rate in (rate, lambda step: jnp.float32(rate)):
            strategy = sa.qsr(1, growth=growth, learning_rate=learning_rate)
            assert strategy.acts is not None
            acts = jax.jit(lambda step, acts=strategy.acts: acts(step))
            assert [bool(acts(steps - 2)), bool(acts(steps - 1))] == [False, True]


@pytest.mark.parametrize(
    "strategy",
    [
        sa.masked(sa.bmuf(PERIOD), {"body": True, "head": False}),
        sa.delayed(sa.bmuf(PERIOD), 2),
    ],
    ids=["masked", "delayed"],
)
def test_all_workers_name_the_same_center_while_their_replicas_differ(strategy):
    trained = train(strategy)
    assert np.ptp(trained.replicas, axis=1).max() > CLEARLY
    assert trained.disagreement <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("consensus", "holds"), [(None, True), (1.0, False)])
def test_choco_sgd_stays_together_at_its_default_step(consensus, holds):
    """Whole steps towards peers of whom little is known lead away from them."""
    noise = np.random.default_rng(0).normal(size=(600, 8, SIZE))
    strategy = sa.choco_sgd(density=0.1, consensus=consensus)
    params = train(strategy, workers=8, steps=600, noise=noise).replicas
    spreads = np.sqrt(np.mean((params - params.mean(1, keepdims=True)) ** 2, (1, 2)))
    assert (spreads[400:].max() < 1.2 * spreads[200:400].max()) == holds
