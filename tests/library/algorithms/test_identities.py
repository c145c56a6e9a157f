"""Algorithms that theory says are the same, and where training comes to rest.

In float64, on quadratic losses. The oracle is another strategy, an optax optimizer in a
plain loop, or a few lines of NumPy; what theory keeps apart differs by CLEARLY.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from problems import relative_error
from problems.quadratics import (
    CURVATURE,
    LR,
    MINIMUM,
    NOISE,
    ROUNDING,
    SIZE,
    START,
    ByHand,
    assert_replicas,
    assert_same,
    flatten,
    train,
)

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
SGD = optax.sgd(LR)
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
COSINE = optax.cosine_decay_schedule(LR, 16)
SCHEDULED = optax.sgd(COSINE, momentum=0.9)
CLEARLY = 1e-2

trained = functools.cache(train)
SYNCHRONOUS = sa.sync_sgd()
AVERAGED = {period: sa.model_averaging(period) for period in (1, PERIOD, 6, 8)}
DILOCO = sa.diloco(PERIOD)


class Pair(NamedTuple):
    """Two strategies that train alike.

    Attributes:
        optimizer: the inner one of both, or of the first.
        other_optimizer: that of the second.
        period: centers are compared at its multiples; inside a round they may differ.
        slow: another value of one that the default run has.
    """

    one: sa.Strategy
    other: sa.Strategy
    optimizer: Any = HEAVY_BALL
    other_optimizer: Any = None
    workers: int = 4
    period: int = 1
    slow: bool = False


def outer(optimizer, *reduce):
    """A step of an outer optimizer at the end of each round."""
    return sa.every(sa.outer_step(optimizer, *reduce), PERIOD)


PAIRS: dict[str, Pair] = {
    **{
        f"model averaging of period one is synchronous, {name}": Pair(
            AVERAGED[1], SYNCHRONOUS, optimizer, slow=name in ("sgd", "cosine")
        )
        for name, optimizer in {
            "sgd": SGD,
            "momentum": HEAVY_BALL,
            "cosine": optax.sgd(COSINE),
            "nesterov": optax.sgd(COSINE, momentum=0.9, nesterov=True),
        }.items()
    },
    **{
        f"bmuf without block momentum averages, nesterov {nesterov}": Pair(
            sa.bmuf(PERIOD, block_momentum=0, block_lr=1, nesterov=nesterov),
            AVERAGED[PERIOD],
            period=PERIOD,
        )
        for nesterov in (False, True)
    },
    "bmuf of one worker is plain SGD": Pair(
        sa.bmuf(PERIOD), sa.Strategy(), workers=1, period=PERIOD
    ),
    **{
        f"bmuf of period one is a synchronous heavy ball, {block_lr}": Pair(
            sa.bmuf(1, block_momentum=0.8, block_lr=block_lr),
            SYNCHRONOUS,
            SGD,
            optax.sgd(LR * block_lr, momentum=0.8),
            slow=block_lr != 0.4,
        )
        for block_lr in (1.0, 0.4, 1.7)
    },
    "model averaging is an outer step": Pair(
        AVERAGED[PERIOD], outer(optax.sgd(1.0)), period=PERIOD
    ),
    "bmuf is an outer step": Pair(
        sa.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7),
        outer(optax.sgd(0.7, momentum=0.8)),
    ),
    "diloco is an outer step": Pair(
        sa.diloco(PERIOD, outer_lr=0.6, outer_momentum=0.8),
        outer(optax.sgd(0.6, momentum=0.8, nesterov=True)),
    ),
    "streaming diloco of one fragment is diloco": Pair(
        sa.streaming_diloco(PERIOD, fragments=1), DILOCO
    ),
    "streaming diloco of one fragment is diloco, with other values": Pair(
        sa.streaming_diloco(PERIOD, fragments=1, outer_lr=0.4, outer_momentum=0.6),
        sa.diloco(PERIOD, outer_lr=0.4, outer_momentum=0.6),
    ),
    "palsgd that never pulls is diloco": Pair(
        sa.palsgd(PERIOD, learning_rate=LR, chance=1e-15), DILOCO
    ),
    "hierarchical of one group averages by its inner period": Pair(
        sa.hierarchical(8, inner_period=PERIOD, groups=1), AVERAGED[PERIOD]
    ),
    "hierarchical of groups of one worker averages": Pair(
        sa.hierarchical(PERIOD, inner_period=2, groups=4), AVERAGED[PERIOD]
    ),
    **{
        f"{groups} groups of {workers} workers lie on {hosts} whole hosts": Pair(
            sa.hierarchical(8, inner_period=PERIOD, hosts=hosts),
            sa.hierarchical(8, inner_period=PERIOD, groups=groups),
            workers=workers,
            slow=(groups > 2 and workers == 8) or hosts == 1,
        )
        for workers, hosts, groups in [
            (8, 4, 4),
            (8, 2, 2),
            (8, 1, 2),
            (6, 3, 3),
            (4, 1, 2),
        ]
    },
    **{
        f"push-sum of {workers} workers without failures is gossip": Pair(
            sa.push_sum(), sa.gossip(), workers=workers
        )
        for workers in (3, 4)
    },
    # The ring mixes after the local step.
    "choco-sgd that loses nothing is gossip": Pair(
        sa.choco_sgd(density=1, consensus=1), sa.gossip_pga(10**6, topology="ring")
    ),
    "three workers on a ring are all neighbours": Pair(
        sa.gossip_pga(PERIOD, topology="ring"), sa.average(), workers=3
    ),
    "gossip on a complete graph averages": Pair(
        sa.gossip_pga(10**6, topology="complete"), sa.average()
    ),
    "quasi-global momentum without momentum is gossip": Pair(
        sa.qg_dsgdm(local_momentum=0, topology="torus", learning_rate=LR),
        sa.gossip_pga(10**6, topology="torus"),
    ),
    "gasloc of a complete graph without momentum is diloco": Pair(
        sa.gasloc(PERIOD, topology="complete", outer_momentum=0),
        sa.diloco(PERIOD, outer_momentum=0),
        period=PERIOD,
    ),
    "gasloc of one worker is diloco": Pair(
        sa.gasloc(PERIOD), DILOCO, workers=1, period=PERIOD
    ),
    "gossip-pga of period one averages": Pair(sa.gossip_pga(1), AVERAGED[1]),
    # A proximal term has nothing to pull where each step starts from the average.
    "fedprox of period one averages": Pair(sa.fedprox(1), AVERAGED[1]),
    **{
        f"slowmo at a constant learning rate is bmuf, {slow_lr}": Pair(
            sa.slowmo(PERIOD, slow_momentum=0.8, slow_lr=slow_lr, learning_rate=LR),
            sa.bmuf(PERIOD, block_momentum=0.8, block_lr=slow_lr),
            slow=slow_lr == 1,
        )
        for slow_lr in (1.0, 0.4)
    },
    **{
        f"slowmo of period one is a heavy ball under a schedule, {slow_lr}": Pair(
            sa.slowmo(1, slow_momentum=0.8, slow_lr=slow_lr, learning_rate=COSINE),
            SYNCHRONOUS,
            optax.sgd(COSINE),
            optax.sgd(lambda step, rate=slow_lr: rate * COSINE(step), momentum=0.8),
            slow=slow_lr == 1,
        )
        for slow_lr in (1.0, 0.4)
    },
    # Rounds take the fewest steps, or (0.25 / 0.1)² = 6.25, rounded down, if more.
    **{
        f"qsr of at least {fewest} steps averages by {period}": Pair(
            sa.qsr(fewest, growth=0.25, learning_rate=LR),
            AVERAGED[period],
            slow=fewest == 1,
        )
        for fewest, period in [(PERIOD, 6), (1, 6), (8, 8)]
    },
    "fedavg of all workers averages": Pair(
        sa.fedavg(PERIOD, fraction=1), AVERAGED[PERIOD]
    ),
    "lookahead is bmuf without block momentum": Pair(
        sa.lookahead(PERIOD, slow_lr=0.3),
        sa.bmuf(PERIOD, block_momentum=0, block_lr=0.3),
    ),
    "gpa of equal shares is Nesterov's momentum": Pair(
        sa.gpa(decay=0.8, mixing=0.8),
        sa.ema_nesterov(decay=0.0, lookahead=0.8, learning_rate=LR / 5),
        optax.sgd(LR),
        optax.sgd(LR / 5),
    ),
    "gpa without an average is synchronous": Pair(sa.gpa(decay=0.0), SYNCHRONOUS),
    "muloco is diloco with other values": Pair(
        sa.muloco(PERIOD), sa.diloco(PERIOD, outer_lr=0.9, outer_momentum=0.8)
    ),
    "plain co2 takes the mean displacement of the last round": Pair(
        sa.co2(PERIOD, outer_momentum=0, penalty=False),
        outer(optax.sgd(1.0), sa.reducers.late()),
    ),
    "diloco-x of full rank is diloco a round late": Pair(
        sa.diloco_x(PERIOD, rank=9, min_rate=0),
        outer(optax.sgd(0.4, momentum=0.5, nesterov=True), sa.reducers.late()),
    ),
    # Its own outer gradient is the mean, and arrives at once.
    "eager diloco of one worker is diloco": Pair(
        sa.eager_diloco(PERIOD, outer_lr=0.6, outer_momentum=0.8),
        sa.diloco(PERIOD, outer_lr=0.6, outer_momentum=0.8),
        workers=1,
    ),
    # It is its own partner: nothing pulls it to other slow params.
    "noloco of one worker is an outer heavy ball": Pair(
        sa.noloco(PERIOD, outer_lr=0.6, outer_momentum=0.8, consensus=0.9),
        outer(optax.sgd(0.6, momentum=0.8)),
        workers=1,
    ),
    # All entries are sent: no residual is left to decay.
    **{
        f"dense sparseloco is an outer SGD step, decay {decay}": Pair(
            sa.sparseloco(PERIOD, density=1, decay=decay, outer_lr=0.6, bits=None),
            outer(optax.sgd(0.6)),
            slow=decay == 1,
        )
        for decay in (0.3, 1.0)
    },
    "post-local SGD from the first step on averages": Pair(
        sa.post_local_sgd(dense_steps=0, period=PERIOD), AVERAGED[PERIOD]
    ),
    "dense sparta averages": Pair(
        sa.sparta(density=1, period=PERIOD), AVERAGED[PERIOD]
    ),
    # Its control is also the mean of the controls: they cancel.
    "scaffold of one worker is plain SGD": Pair(
        sa.scaffold(PERIOD, learning_rate=LR), sa.Strategy(), workers=1
    ),
    # The kernel is a 3 × 4 matrix; as one chunk it has 12 components.
    **{
        f"{name} that loses nothing is synchronous": Pair(lossless, SYNCHRONOUS)
        for name, lossless in {
            "topk_sgd": sa.topk_sgd(density=1),
            "powersgd": sa.powersgd(rank=3, min_rate=0),
            "ef21": sa.ef21(density=1, local_momentum=0),
            "demo": sa.demo(decay=0, top_k=12),
            "post_local_sgd": sa.post_local_sgd(dense_steps=10**6, period=PERIOD),
            "masked": sa.masked(sa.sync_sgd(), True),
        }.items()
    },
}


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=name, marks=[pytest.mark.slow] * pair.slow)
        for name, pair in PAIRS.items()
    ],
)
def test_identity(pair):
    one = train(pair.one, pair.optimizer, pair.workers)
    optimizer = pair.other_optimizer or pair.optimizer
    other = trained(pair.other, optimizer, pair.workers)
    assert_replicas(one, other.replicas)
    ends = slice(pair.period - 1, None, pair.period)
    assert relative_error(one.centers[ends], other.centers[ends]) <= ROUNDING


# Else the identities would say little.
APART = {
    "synchronous": SYNCHRONOUS,
    **{f"averaged by {period}": AVERAGED[period] for period in (PERIOD, 6)},
    "bmuf": sa.bmuf(PERIOD),
    "nesterov": sa.bmuf(PERIOD, nesterov=True),
    "diloco": DILOCO,
    "topk_sgd": sa.topk_sgd(density=0.5),
    "powersgd": sa.powersgd(rank=2, min_rate=0),
    "demo": sa.demo(decay=0, top_k=3),
}


def test_different_algorithms_end_clearly_apart():
    ends = [trained(each, HEAVY_BALL, 4).centers[-1:] for each in APART.values()]
    for i, end in enumerate(ends):
        assert all(relative_error(end, other) > CLEARLY for other in ends[:i])


def test_bmuf_of_period_one_is_not_heavy_ball_under_a_schedule():
    filtered = train(sa.bmuf(1, block_momentum=0.8), optax.sgd(COSINE))
    heavy_ball = train(SYNCHRONOUS, optax.sgd(COSINE, momentum=0.8))
    assert relative_error(filtered.centers[-1], heavy_ball.centers[-1]) > CLEARLY


def test_slowmo_is_not_bmuf_under_a_schedule():
    slow = train(sa.slowmo(PERIOD, slow_momentum=0.8, learning_rate=COSINE), SCHEDULED)
    filtered = train(sa.bmuf(PERIOD, block_momentum=0.8), SCHEDULED)
    # The first block, of zero velocity before, is the same for both.
    assert relative_error(slow.centers[:4], filtered.centers[:4]) <= ROUNDING
    assert relative_error(slow.centers[-1], filtered.centers[-1]) > CLEARLY


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "block_lr, block_momentum", [(1.0, 0.9), (0.7, 0.9), (1.3, 0.4)]
)
def test_starts_of_nesterov_bmuf_are_those_of_an_outer_nesterov_step(
    block_lr, block_momentum
):
    nesterov = optax.sgd(block_lr, momentum=block_momentum, nesterov=True)
    stepped = train(outer(nesterov), HEAVY_BALL)
    filtered = train(
        sa.bmuf(
            PERIOD, block_momentum=block_momentum, block_lr=block_lr, nesterov=True
        ),
        HEAVY_BALL,
    )
    assert_replicas(filtered, stepped.replicas)
    assert relative_error(filtered.centers[-1:], stepped.centers[-1:]) > CLEARLY


def test_ema_nesterov_of_the_last_move_trains_as_optax_nesterov_does():
    strategy = sa.ema_nesterov(decay=0.0, lookahead=0.8, learning_rate=LR)
    ahead = train(strategy, SGD)
    nesterov = train(SYNCHRONOUS, optax.sgd(LR, momentum=0.8, nesterov=True))
    assert_replicas(ahead, nesterov.replicas)
    assert relative_error(ahead.centers, nesterov.centers) > CLEARLY


def test_outer_sgd_step_of_one_worker_is_optax_lookahead():
    optimizer = optax.lookahead(HEAVY_BALL, sync_period=PERIOD, slow_step_size=0.3)
    params = optax.LookaheadParams.init_synced(jnp.asarray(START))
    state = optimizer.init(params)
    slow = []
    for noise in NOISE[:12, 0]:
        grads = CURVATURE[0] * (params.fast - MINIMUM[0]) + noise
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(np.add, params, updates)
        slow.append(params.slow)
    one = train(outer(optax.sgd(0.3)), HEAVY_BALL, workers=1)
    assert relative_error(one.centers[3::4], np.array(slow)[3::4]) <= ROUNDING


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


@pytest.mark.sample(3)
@pytest.mark.parametrize("s", [0, 6, 8])
@pytest.mark.parametrize("synced_first", [True, False])
@pytest.mark.parametrize("name", OUTER)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("s", [6, 8])
def test_strategy_after_s_starts_from_what_a_later_member_leaves(s):
    """Averaging behind it moves the params once more at step s - 1.

    Anchors from before would leave the replicas apart.
    """
    late = sa.after(sa.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7), s)
    averaged = train(sa.chain(late, sa.until(sa.model_averaging(1), s)))
    assert_same(averaged, train(sa.chain(sa.until(sa.sync_sgd(), s), late)))


@pytest.mark.parametrize("s", [6, 8])
def test_center_of_strategy_until_s_is_the_current_model_afterwards(s):
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


@pytest.mark.parametrize("last_two", [["bmuf", "diloco"], ["diloco", "bmuf"]])
def test_center_of_a_chain_is_that_of_the_last_with_its_own(last_two):
    """The average has no center: inside a block the center is the last start."""
    members = [OUTER[name][0] for name in last_two]
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


def test_streaming_diloco_takes_an_outer_step_of_each_fragment_in_turn():
    """The second of two fragments syncs as DiLoCo, the first half a period earlier."""
    streamed = train(sa.streaming_diloco(PERIOD, fragments=2), HEAVY_BALL)
    whole = train(sa.diloco(PERIOD), HEAVY_BALL)
    early = train(sa.every(sa.diloco(1), PERIOD, offset=PERIOD // 2), HEAVY_BALL)
    last = np.arange(SIZE) >= 16  # of three leaves, the last one
    for seen in ("replicas", "centers"):
        actual, late, soon = (getattr(x, seen) for x in (streamed, whole, early))
        expected = np.where(last, late, soon)
        assert relative_error(actual, expected) <= ROUNDING


def test_hierarchical_refuses_groups_that_span_hosts():
    with pytest.raises(ValueError, match=r"2 groups on 4 hosts .* a multiple of 4"):
        sa.hierarchical(groups=2, hosts=4)
    with pytest.raises(ValueError, match="6 workers do not divide over 4 hosts"):
        train(sa.hierarchical(8, inner_period=PERIOD, hosts=4), HEAVY_BALL, workers=6)


def test_des_loc_of_equal_periods_averages_params_and_moments_together():
    adam = optax.adam(LR)
    desynced = train(
        sa.des_loc(PERIOD, first_period=PERIOD, second_period=PERIOD), adam
    )
    together = train(
        sa.every(sa.chain(sa.average(), sa.average("opt_state")), PERIOD), adam
    )
    assert_same(desynced, together)
    for moment in ("mu", "nu"):
        actual, expected = (
            flatten(getattr(trained.replica.opt_state[0], moment), lead=2)
            for trained in (desynced, together)
        )
        assert relative_error(actual, expected) <= ROUNDING
    # Else neither the averages nor their absence would show.
    apart = train(sa.model_averaging(PERIOD), adam)
    assert relative_error(desynced.centers[-1], apart.centers[-1]) > CLEARLY / 10


@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("growth", "rate", "steps"),
    [(0.01, 0.001, 100), (0.02, 0.004, 25), (0.29, 0.005, 3364), (0.0999, 0.01, 99)],
)
def test_qsr_takes_a_whole_ratio_for_whole(growth, rate, steps, wide):
    """(0.01 / 0.001)² is below 100 in float32, and (0.29 / 0.005)² below 3364."""
    with jax.enable_x64(wide):
        for each in (rate, lambda step: jnp.float32(rate)):
            acts = sa.qsr(1, growth=growth, learning_rate=each).acts
            assert acts is not None
            assert [bool(acts(steps - 2)), bool(acts(steps - 1))] == [False, True]


@pytest.mark.parametrize("doublings", [1, 2, 3])
def test_gossip_reaches_the_exact_mean_in_the_steps_of_its_graph(doublings):
    """Without training, of 2^k workers in k steps: sums of small integers are exact."""
    workers = 2**doublings
    start = np.random.default_rng(0).integers(-64, 64, size=(workers, SIZE)) * 1.0
    frozen = optax.set_to_zero()
    still = train(sa.gossip(), frozen, workers, steps=doublings, start=start)
    mean = np.broadcast_to(start.mean(0), start.shape)
    np.testing.assert_array_equal(still.replicas[-1], mean)
    if doublings > 1:
        assert relative_error(still.replicas[-2], mean) > CLEARLY


@pytest.mark.parametrize(
    "strategy",
    [
        sa.easgd(PERIOD),
        sa.eager_diloco(PERIOD),
        sa.noloco(PERIOD),
        sa.push_sum(drop=0.5),
        sa.masked(sa.bmuf(PERIOD), {"body": True, "head": False}),
        sa.delayed(sa.bmuf(PERIOD), 2),
    ],
    ids=["easgd", "eager_diloco", "noloco", "push_sum", "masked", "delayed"],
)
def test_all_workers_name_the_same_center_while_their_replicas_differ(strategy):
    trained = train(strategy)
    assert np.ptp(trained.replicas, axis=1).max() > CLEARLY
    assert trained.disagreement <= ROUNDING


# Where training comes to rest, without noise. The workers' losses differ: of worker i,
# entry by entry, h (x - b)² / 2. A local step at learning rate η multiplies x - b by
# ρ = 1 - η h. The minimum of their mean loss is Σ h b / Σ h.
H, B = CURVATURE[:4], MINIMUM[:4]
UNBIASED = (H * B).sum(0) / H.sum(0)


def at_rest(strategy, lr, steps):
    """The center once it is the same from one period to the next."""
    centers = train(
        strategy, optax.sgd(lr), steps=steps, noise=np.zeros((steps, 8, SIZE))
    ).centers
    assert relative_error(centers[-1], centers[-1 - PERIOD]) <= ROUNDING
    return centers[-1]


def test_model_averaging_rests_at_a_point_of_its_own():
    """A round takes x to b + ρ^K (x - b); their mean is x where Σ (1 - ρ^K)(x - b) = 0.

    So that b is weighed by 1 - ρ^K, and by h as in the mean loss for K = 1 only.
    """
    weight = 1 - (1 - 0.5 * H) ** PERIOD
    expected = (weight * B).sum(0) / weight.sum(0)
    center = at_rest(sa.model_averaging(PERIOD), lr=0.5, steps=400)
    assert relative_error(center, expected) <= ROUNDING
    assert relative_error(center, UNBIASED) > CLEARLY


@pytest.mark.parametrize("period", [1, PERIOD])
def test_easgd_rests_at_a_point_of_its_own(period):
    """With σ = ρ^(p-1) of the p - 1 plain steps after an elastic one from y:

    y - b = σ (ρ (y - b) - α (y - c)), so y = (w b + α σ c) / (w + α σ), w = 1 - σ ρ.
    The center c is the mean of these y: b is weighed by w / (w + α σ). For p = 1 that
    is h / (η h + α), where the mean loss has h.
    """
    alpha, rho = 0.9 / 4, 1 - 0.5 * H
    sigma = rho ** (period - 1)
    w = 1 - sigma * rho
    weight = w / (w + alpha * sigma)
    expected = (weight * B).sum(0) / weight.sum(0)
    center = at_rest(sa.easgd(period, beta=0.9), lr=0.5, steps=2000)
    assert relative_error(center, expected) <= ROUNDING
    assert relative_error(center, UNBIASED) > CLEARLY


def test_plain_co2_first_moves_by_the_average_of_the_round_before():
    plain = sa.co2(PERIOD, outer_momentum=0, penalty=False)
    moved = train(plain, HEAVY_BALL).replicas[2 * PERIOD - 1]
    averages = trained(AVERAGED[PERIOD], HEAVY_BALL, 4).replicas[PERIOD - 1]
    assert relative_error(moved, averages) <= ROUNDING


@pytest.mark.slow
def test_diloco_trains_with_muon_inside():
    """MuLoCo: Muon steps for the 2-D kernel, Adam's for the rest."""
    muon = optax.contrib.muon(0.02)
    trained = problems.train(sa.diloco(PERIOD), muon, workers=4, at=(20, 40, 60))
    x, target = problems.make_batches(1, global_batch=960, seed=2)

    def test_loss(vector):
        params = problems.unflatten(vector)
        return float(problems.loss(params, (x[0], target[0])))

    start = test_loss(problems.flatten(problems.initial_params()))
    losses = [start, *map(test_loss, trained.centers)]
    assert losses[-1] < 0.5 * start
    assert losses == sorted(losses, reverse=True)
