"""Phases, hosts, limits and roundings, which a recurrence of 14 steps does not reach.

In float64, on quadratic losses. The oracle is theory, another strategy, or a few lines
of NumPy; what theory keeps apart differs by CLEARLY.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error
from problems.quadratics import (
    CURVATURE,
    LR,
    MINIMUM,
    ROUNDING,
    SIZE,
    START,
    ByHand,
    assert_replicas,
    assert_same,
    train,
)

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
SCHEDULED = optax.sgd(optax.cosine_decay_schedule(LR, 16), momentum=0.9)
CLEARLY = 1e-2
HOSTS = (8, 4, 4), (8, 1, 2)


@pytest.mark.parametrize(
    ("workers", "hosts", "groups"),
    [(6, 3, 3), *(pytest.param(*x, marks=pytest.mark.slow) for x in HOSTS)],
)
def test_groups_are_as_many_as_lie_on_whole_hosts(workers, hosts, groups):
    on_hosts = sa.hierarchical(8, inner_period=PERIOD, hosts=hosts)
    given = sa.hierarchical(8, inner_period=PERIOD, groups=groups)
    trained = [train(each, HEAVY_BALL, workers) for each in (on_hosts, given)]
    assert_same(*trained)


def test_hierarchical_refuses_groups_that_span_hosts():
    with pytest.raises(ValueError, match=r"2 groups on 4 hosts .* a multiple of 4"):
        sa.hierarchical(groups=2, hosts=4)
    with pytest.raises(ValueError, match="6 workers do not divide over 4 hosts"):
        train(sa.hierarchical(8, inner_period=PERIOD, hosts=4), HEAVY_BALL, workers=6)


def test_push_sum_of_three_workers_without_failures_is_gossip():
    assert_same(train(sa.push_sum(), workers=3), train(sa.gossip(), workers=3))


# The strategy, and how far its center goes for a block's move and the new velocity
# (μ times the old one + the move): heavy ball, and Nesterov's look-ahead from it.
OUTER = {
    "bmuf": (
        sa.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7),
        lambda move, velocity: 0.7 * velocity,
    ),
    "diloco": (
        sa.diloco(PERIOD, outer_lr=0.7, outer_momentum=0.8),
        lambda move, velocity: 0.7 * (move + 0.8 * velocity),
    ),
}


def synced_where(synced):
    """Averages the workers' gradients at some steps."""
    return lambda grads, step: grads * 0 + grads.mean(0) if synced(step) else grads


@pytest.mark.parametrize(
    ("name", "synced_first", "s"),
    [("bmuf", True, 6), ("diloco", True, 0), ("diloco", False, 6)],
)
def test_strategy_after_s_starts_from_the_synchronous_model(name, synced_first, s):
    """The first block is shorter if the period does not divide s."""
    strategy, update = OUTER[name]
    anchor, velocity, expected = START, 0, []
    for step, theta, _ in ByHand(
        momentum=0.9, combine=synced_where(lambda step: step < s)
    ):
        if step < s:
            anchor = theta[0].copy()
        elif (step + 1) % PERIOD == 0:
            move = theta.mean(0) - anchor
            velocity = 0.8 * velocity + move
            anchor = anchor + update(move, velocity)
            theta[:] = anchor
        expected.append(anchor)

    members = [sa.until(sa.sync_sgd(), s), sa.after(strategy, s)]
    switched = sa.chain(*(members if synced_first else members[::-1]))
    centers = train(switched, HEAVY_BALL).centers
    assert relative_error(centers, np.array(expected)) <= ROUNDING


def test_strategy_after_s_starts_from_what_a_later_member_leaves():
    """Averaging behind it moves the params once more at step s - 1.

    Anchors from before would leave the replicas apart.
    """
    late = sa.after(sa.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7), 6)
    averaged = train(sa.chain(late, sa.until(sa.model_averaging(1), 6)))
    assert_same(averaged, train(sa.chain(sa.until(sa.sync_sgd(), 6), late)))


def test_center_of_strategy_until_s_is_the_current_model_afterwards():
    s = 6
    w, velocity, expected = START, 0, []
    for step, theta, _ in ByHand(
        momentum=0.9, combine=synced_where(lambda step: step >= s)
    ):
        if step >= s:
            w = theta.mean(0)
        elif (step + 1) % PERIOD == 0:
            velocity = 0.8 * velocity + 0.7 * (theta.mean(0) - w)
            w = w + velocity
            theta[:] = w
        expected.append(w)

    early = sa.until(sa.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7), s)
    centers = train(sa.chain(early, sa.after(sa.sync_sgd(), s)), HEAVY_BALL).centers
    assert relative_error(centers, np.array(expected)) <= ROUNDING


def test_center_of_a_chain_is_that_of_the_last_with_its_own():
    """The average has no center: inside a block the center is the last start."""
    members = OUTER["bmuf"][0], OUTER["diloco"][0]
    seen = train(sa.chain(*members, sa.average()))
    assert relative_error(seen.centers[5], seen.replicas[3]) <= ROUNDING
    assert relative_error(seen.centers[5], seen.replicas[5]) > CLEARLY


@pytest.mark.parametrize(
    "member, kept",
    [(sa.reset(SCHEDULED), 0), (sa.average("opt_state"), 1)],
    ids=["reset", "average"],
)
def test_momentum_at_an_average_of_params_is_the_users_choice(member, kept):
    """The schedule counts on: reset zeroes momentum alone."""
    own = ByHand(momentum=0.9, lr=lambda step: LR * (1 + np.cos(np.pi * step / 16)) / 2)
    for _, theta, momentum in own.ends(PERIOD):
        theta[:] = theta.mean(0)
        momentum[:] = kept * momentum.mean(0)
    seen = train(sa.every(sa.chain(sa.average(), member), PERIOD), SCHEDULED)
    assert_replicas(seen, own.replicas)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("growth", "rate", "steps"),
    [(0.01, 0.001, 100), (0.29, 0.005, 3364), (0.0999, 0.01, 99)],
)
def test_qsr_takes_a_whole_ratio_for_whole(growth, rate, steps, wide):
    """(0.01 / 0.001)² is below 100 in float32, and (0.29 / 0.005)² below 3364."""
    with jax.enable_x64(wide):
        for each in (rate, lambda step: jnp.float32(rate)):
            strategy = sa.qsr(1, growth=growth, learning_rate=each)
            assert strategy.acts is not None
            acts = jax.jit(lambda step, acts=strategy.acts: acts(step))
            assert [bool(acts(steps - 2)), bool(acts(steps - 1))] == [False, True]


def test_gossip_reaches_the_exact_mean_in_the_steps_of_its_graph():
    """Without training, of 2^k workers in k steps: sums of small integers are exact."""
    start = np.random.default_rng(0).integers(-64, 64, size=(8, SIZE)) * 1.0
    still = train(sa.gossip(), optax.set_to_zero(), 8, steps=3, start=start)
    mean = np.broadcast_to(start.mean(0), start.shape)
    np.testing.assert_array_equal(still.replicas[-1], mean)
    assert relative_error(still.replicas[-2], mean) > CLEARLY


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


# Where training comes to rest, without noise. The workers' losses differ: of worker i,
# entry by entry, h (x - b)² / 2. A local step at learning rate η multiplies x - b by
# ρ = 1 - η h. The minimum of their mean loss is Σ h b / Σ h.
H, B = CURVATURE[:4], MINIMUM[:4]


def weighted(weights):
    return (weights * B).sum(0) / weights.sum(0)


def rests(strategy, expected, lr):
    """Asserts that the center is at a point, the same from a period to the next."""
    noise = np.zeros((2000, 8, SIZE))
    centers = train(strategy, optax.sgd(lr), steps=2000, noise=noise).centers
    assert relative_error(centers[-1], centers[-1 - PERIOD]) <= ROUNDING
    assert relative_error(centers[-1], expected) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        # Its controls take the workers' differences out of the local steps.
        sa.scaffold(PERIOD, learning_rate=LR),
        sa.d2(),
        sa.gradient_tracking(),
        sa.scaffnew(PERIOD, learning_rate=LR),
        sa.feddyn(PERIOD, proximal=0.5),
    ],
    ids=["scaffold", "d2", "gradient_tracking", "scaffnew", "feddyn"],
)
def test_exact_methods_rest_at_the_minimum_of_the_mean_loss(strategy):
    rests(strategy, weighted(H), LR)


def test_model_averaging_rests_at_a_point_of_its_own():
    """A round takes x to b + ρ^K (x - b); their mean is x where Σ (1 - ρ^K)(x - b) = 0.

    So that b is weighed by 1 - ρ^K, and by h as in the mean loss for K = 1 only.
    """
    expected = weighted(1 - (1 - 0.5 * H) ** PERIOD)
    assert relative_error(expected, weighted(H)) > CLEARLY
    rests(sa.model_averaging(PERIOD), expected, lr=0.5)


def test_easgd_rests_at_a_point_of_its_own():
    """With σ = ρ^(p-1) of the p - 1 plain steps after an elastic one from y:

    y - b = σ (ρ (y - b) - α (y - c)), so y = (w b + α σ c) / (w + α σ), w = 1 - σ ρ.
    The center c is the mean of these y: b is weighed by w / (w + α σ).
    """
    alpha, rho = 0.9 / 4, 1 - 0.5 * H
    sigma = rho ** (PERIOD - 1)
    w = 1 - sigma * rho
    rests(sa.easgd(PERIOD, beta=0.9), weighted(w / (w + alpha * sigma)), lr=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("consensus", "holds"), [(None, True), (1.0, False)])
def test_choco_sgd_stays_together_at_its_default_step(consensus, holds):
    """Whole steps towards peers of whom little is known lead away from them."""
    noise = np.random.default_rng(0).normal(size=(600, 8, SIZE))
    strategy = sa.choco_sgd(density=0.1, consensus=consensus)
    params = train(strategy, workers=8, steps=600, noise=noise).replicas
    apart = np.sqrt(np.mean((params - params.mean(1, keepdims=True)) ** 2, (1, 2)))
    assert (apart[400:].max() < 1.2 * apart[200:400].max()) == holds
