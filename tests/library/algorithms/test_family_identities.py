"""Members of the family that theory says are the same, or that rest at a known point.

In float64, as in test_identities.py, on quadratic losses: after every local step the
replicas and the center of one are those of the other, up to rounding.
"""

import functools

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
    SIZE,
    flatten,
    local_steps,
    train,
)

import syncalgos
from syncalgos import (
    Strategy,
    after,
    at_syncs,
    average,
    bmuf,
    chain,
    co2,
    delayed,
    diloco,
    diloco_x,
    eager_diloco,
    easgd,
    every,
    fedavg,
    gossip,
    hierarchical,
    lookahead,
    masked,
    model_averaging,
    muloco,
    noloco,
    outer_step,
    paced,
    post_local_sgd,
    push_sum,
    qsr,
    reducers,
    reset,
    scaffold,
    slowmo,
    sparseloco,
    sparta,
    streaming_diloco,
    sync_sgd,
    until,
)

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
COSINE = optax.cosine_decay_schedule(LR, 16)

ROUNDING = 1e-12  # as in test_identities.py
CLEARLY = 1e-2


@functools.cache
def averaged(period=PERIOD):
    return train(model_averaging(period), HEAVY_BALL)


@functools.cache
def synchronous():
    return train(sync_sgd(), HEAVY_BALL)


def assert_same(trained, expected):
    assert relative_error(trained.replicas, expected.replicas) <= ROUNDING
    assert relative_error(trained.centers, expected.centers) <= ROUNDING


def test_references_end_clearly_apart():
    ends = [averaged().centers, averaged(6).centers, synchronous().centers]
    for i, end in enumerate(ends):
        assert all(relative_error(end[-1], other[-1]) > CLEARLY for other in ends[:i])


def test_streaming_diloco_of_one_fragment_is_diloco():
    for settings in ({}, {"outer_lr": 0.4, "outer_momentum": 0.6}):
        streamed = train(streaming_diloco(PERIOD, 1, **settings), HEAVY_BALL)
        assert_same(streamed, train(diloco(PERIOD, **settings), HEAVY_BALL))


def test_streaming_diloco_takes_an_outer_step_of_each_fragment_in_turn():
    """The second of two fragments syncs as DiLoCo, the first half a period earlier."""
    streamed = train(streaming_diloco(PERIOD, 2), HEAVY_BALL)
    whole = train(diloco(PERIOD), HEAVY_BALL)
    early = train(every(PERIOD, diloco(1), offset=PERIOD // 2), HEAVY_BALL)
    last = np.arange(SIZE) >= 16  # of three leaves, the last one
    for seen in ("replicas", "centers"):
        actual, late, soon = (getattr(x, seen) for x in (streamed, whole, early))
        expected = np.where(last, late, soon)
        assert relative_error(actual, expected) <= ROUNDING


def test_hierarchical_of_one_group_is_model_averaging_of_its_inner_period():
    assert_same(train(hierarchical(8, PERIOD, groups=1), HEAVY_BALL), averaged())


@pytest.mark.parametrize(
    "workers, hosts, groups", [(8, 4, 4), (8, 2, 2), (8, 1, 2), (6, 3, 3), (4, 1, 2)]
)
def test_groups_of_hierarchical_lie_on_whole_hosts(workers, hosts, groups):
    of_hosts = train(hierarchical(8, PERIOD, hosts=hosts), HEAVY_BALL, workers)
    expected = train(hierarchical(8, PERIOD, groups=groups), HEAVY_BALL, workers)
    assert_same(of_hosts, expected)


def test_hierarchical_refuses_groups_that_span_hosts():
    with pytest.raises(ValueError, match=r"2 groups on 4 hosts .* a multiple of 4"):
        hierarchical(groups=2, hosts=4)
    with pytest.raises(ValueError, match="6 workers do not divide over 4 hosts"):
        train(hierarchical(8, PERIOD, hosts=4), HEAVY_BALL, workers=6)


def test_hierarchical_of_groups_of_one_worker_is_model_averaging():
    assert_same(train(hierarchical(PERIOD, 2, groups=4), HEAVY_BALL), averaged())


@pytest.mark.parametrize("workers", [3, 4])
def test_push_sum_without_failures_is_gossip(workers):
    pushed = train(push_sum(), HEAVY_BALL, workers)
    assert_same(pushed, train(gossip(), HEAVY_BALL, workers))


def test_choco_sgd_that_loses_nothing_is_gossip():
    """The ring mixes after the local step."""
    whole = train(syncalgos.choco_sgd(density=1, consensus=1), HEAVY_BALL)
    ring = syncalgos.gossip_pga(10**6, "ring")
    assert_same(whole, train(ring, HEAVY_BALL))


def test_gossip_pga_of_three_workers_on_a_ring_averages_at_every_step():
    """All workers are neighbours."""
    ring = train(syncalgos.gossip_pga(PERIOD, "ring"), HEAVY_BALL, workers=3)
    assert_same(ring, train(average(), HEAVY_BALL, workers=3))


@pytest.mark.parametrize("name", ["gossip_pga", "fedprox"])
def test_of_period_one_it_averages_at_every_step(name):
    """A proximal term has nothing to pull where each step starts from the average."""
    assert_same(train(syncalgos.ALGORITHMS[name](1), HEAVY_BALL), averaged(1))


@pytest.mark.parametrize("slow_lr", [1.0, 0.4])
def test_slowmo_at_a_constant_learning_rate_is_bmuf(slow_lr):
    slow = slowmo(PERIOD, 0.8, slow_lr, learning_rate=LR)
    filtered = bmuf(PERIOD, block_momentum=0.8, block_lr=slow_lr)
    assert_same(train(slow, HEAVY_BALL), train(filtered, HEAVY_BALL))


def test_slowmo_is_not_bmuf_under_a_schedule():
    optimizer = optax.sgd(COSINE, momentum=0.9)
    slow = train(slowmo(PERIOD, 0.8, learning_rate=COSINE), optimizer)
    filtered = train(bmuf(PERIOD, block_momentum=0.8), optimizer)
    # The first block, of zero velocity before, is the same for both.
    assert relative_error(slow.centers[:4], filtered.centers[:4]) <= ROUNDING
    assert relative_error(slow.centers[-1], filtered.centers[-1]) > CLEARLY


@pytest.mark.parametrize("slow_lr", [1.0, 0.4])
def test_slowmo_of_period_one_is_sync_heavy_ball_under_a_schedule(slow_lr):
    slow = slowmo(1, 0.8, slow_lr, learning_rate=COSINE)
    heavy_ball = optax.sgd(lambda step: slow_lr * COSINE(step), momentum=0.8)
    expected = train(sync_sgd(), heavy_ball)
    assert_same(train(slow, optax.sgd(COSINE)), expected)


def test_des_loc_of_equal_periods_averages_params_and_moments_together():
    adam = optax.adam(LR)
    desynced = train(syncalgos.des_loc(PERIOD, PERIOD, PERIOD), adam)
    together = train(every(PERIOD, chain(average(), average("opt_state"))), adam)
    assert_same(desynced, together)
    for moment in ("mu", "nu"):
        actual, expected = (
            flatten(getattr(trained.replica.opt_state[0], moment), lead=2)
            for trained in (desynced, together)
        )
        assert relative_error(actual, expected) <= ROUNDING
    # Else neither the averages nor their absence would show.
    apart = train(model_averaging(PERIOD), adam)
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
            acts = qsr(1, growth, each).acts
            assert acts is not None
            assert [bool(acts(steps - 2)), bool(acts(steps - 1))] == [False, True]


@pytest.mark.parametrize(("fewest", "period"), [(PERIOD, 6), (1, 6), (8, 8)])
def test_qsr_at_a_constant_learning_rate_is_model_averaging(fewest, period):
    """Rounds take its fewest steps, or (0.25 / 0.1)² = 6.25, rounded down, if more."""
    quadratic = qsr(fewest, growth=0.25, learning_rate=LR)
    assert_same(train(quadratic, HEAVY_BALL), averaged(period))


def test_fedavg_of_all_workers_is_model_averaging():
    assert_same(train(fedavg(PERIOD, fraction=1), HEAVY_BALL), averaged())


def test_lookahead_is_bmuf_without_block_momentum():
    filtered = train(bmuf(PERIOD, block_momentum=0, block_lr=0.3), HEAVY_BALL)
    assert_same(train(lookahead(PERIOD, slow_lr=0.3), HEAVY_BALL), filtered)


def test_muloco_is_diloco_with_other_values():
    expected = train(diloco(PERIOD, 0.9, 0.8), HEAVY_BALL)
    assert_same(train(muloco(PERIOD), HEAVY_BALL), expected)


def test_plain_co2_takes_the_mean_displacement_of_the_last_round():
    plain = co2(PERIOD, outer_momentum=0, penalty=False)
    outer = every(PERIOD, outer_step(optax.sgd(1.0), reducers.late()))
    assert_same(train(plain, HEAVY_BALL), train(outer, HEAVY_BALL))
    averages = train(model_averaging(PERIOD), HEAVY_BALL).replicas
    moved = train(plain, HEAVY_BALL).replicas
    assert relative_error(moved[2 * PERIOD - 1], averages[PERIOD - 1]) <= ROUNDING


def test_diloco_x_of_full_rank_is_diloco_a_round_late():
    outer = optax.sgd(0.4, momentum=0.5, nesterov=True)
    expected = every(PERIOD, outer_step(outer, reducers.late()))
    full = diloco_x(PERIOD, rank=9, min_rate=0)
    assert_same(train(full, HEAVY_BALL), train(expected, HEAVY_BALL))


def test_eager_diloco_of_one_worker_is_diloco():
    """Its own outer gradient is the mean, and arrives at once."""
    eager = eager_diloco(PERIOD, outer_lr=0.6, outer_momentum=0.8)
    expected = train(diloco(PERIOD, 0.6, 0.8), HEAVY_BALL, workers=1)
    assert_same(train(eager, HEAVY_BALL, workers=1), expected)


def test_noloco_of_one_worker_is_an_outer_heavy_ball():
    """It is its own partner: nothing pulls it to other slow params."""
    own = noloco(PERIOD, outer_lr=0.6, outer_momentum=0.8, consensus=0.9)
    outer = every(PERIOD, outer_step(optax.sgd(0.6, momentum=0.8)))
    expected = train(outer, HEAVY_BALL, workers=1)
    assert_same(train(own, HEAVY_BALL, workers=1), expected)


@pytest.mark.parametrize("decay", [0.3, 1.0])
def test_dense_sparseloco_is_an_outer_sgd_step(decay):
    """All entries are sent: no residual is left to decay."""
    dense = sparseloco(PERIOD, density=1, decay=decay, outer_lr=0.6, bits=None)
    outer = every(PERIOD, outer_step(optax.sgd(0.6)))
    assert_same(train(dense, HEAVY_BALL), train(outer, HEAVY_BALL))


# The kernel is a 3 × 4 matrix; as one chunk it has 12 components.
LOSSLESS = {
    "topk_sgd": syncalgos.topk_sgd(density=1),
    "powersgd": syncalgos.powersgd(rank=3, min_rate=0),
    "demo": syncalgos.demo(decay=0, top_k=12),
    "post_local_sgd": post_local_sgd(10**6, PERIOD),
    "masked": masked(sync_sgd(), True),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_reduction_that_loses_nothing_is_sync_sgd(name):
    assert_same(train(LOSSLESS[name], HEAVY_BALL), synchronous())


LOSSY = {
    "topk_sgd": syncalgos.topk_sgd(density=0.5),
    "powersgd": syncalgos.powersgd(rank=2, min_rate=0),
    "demo": syncalgos.demo(decay=0, top_k=3),
}


@pytest.mark.parametrize("name", LOSSY)
def test_reduction_that_loses_something_is_not_sync_sgd(name):
    lossy = train(LOSSY[name], HEAVY_BALL)
    assert relative_error(lossy.centers[-1], synchronous().centers[-1]) > CLEARLY


def test_post_local_sgd_from_the_first_step_on_is_model_averaging():
    assert_same(train(post_local_sgd(0, PERIOD), HEAVY_BALL), averaged())


def test_dense_sparta_is_model_averaging():
    assert_same(train(sparta(density=1, period=PERIOD), HEAVY_BALL), averaged())


@pytest.mark.parametrize("doublings", [1, 2, 3])
def test_gossip_reaches_the_exact_mean_in_the_steps_of_its_graph(doublings):
    """Without training, of 2^k workers in k steps: sums of small integers are exact."""
    workers = 2**doublings
    start = np.random.default_rng(0).integers(-64, 64, size=(workers, SIZE)) * 1.0
    frozen = optax.set_to_zero()
    still = train(gossip(), frozen, workers, steps=doublings, start=start)
    mean = np.broadcast_to(start.mean(0), start.shape)
    np.testing.assert_array_equal(still.replicas[-1], mean)
    if doublings > 1:
        assert relative_error(still.replicas[-2], mean) > CLEARLY


def test_scaffold_of_one_worker_is_plain_sgd():
    """Its control is also the mean of the controls: they cancel."""
    corrected = scaffold(PERIOD, learning_rate=LR)
    expected = train(Strategy(), HEAVY_BALL, workers=1)
    assert_same(train(corrected, HEAVY_BALL, workers=1), expected)


@pytest.mark.parametrize(
    "strategy",
    [
        easgd(PERIOD),
        eager_diloco(PERIOD),
        noloco(PERIOD),
        push_sum(drop=0.5),
        masked(bmuf(PERIOD), {"body": True, "head": False}),
        delayed(bmuf(PERIOD), 2),
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


def test_sync_sgd_rests_at_the_minimum_of_the_mean_loss():
    center = at_rest(sync_sgd(), lr=0.5, steps=400)
    assert relative_error(center, UNBIASED) <= ROUNDING


def test_model_averaging_rests_at_a_point_of_its_own():
    """A round takes x to b + ρ^K (x - b); their mean is x where Σ (1 - ρ^K)(x - b) = 0.

    So that b is weighed by 1 - ρ^K, and by h as in the mean loss for K = 1 only.
    """
    weight = 1 - (1 - 0.5 * H) ** PERIOD
    expected = (weight * B).sum(0) / weight.sum(0)
    center = at_rest(model_averaging(PERIOD), lr=0.5, steps=400)
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
    center = at_rest(easgd(period, beta=0.9), lr=0.5, steps=2000)
    assert relative_error(center, expected) <= ROUNDING
    assert relative_error(center, UNBIASED) > CLEARLY


def test_scaffold_rests_at_the_minimum_of_the_mean_loss():
    """Its controls take the workers' differences out of the local steps."""
    center = at_rest(scaffold(PERIOD, learning_rate=LR), lr=LR, steps=4000)
    assert relative_error(center, UNBIASED) <= ROUNDING


MARK = Strategy(
    sync=lambda replica, state, step: (
        replica._replace(buffers=replica.buffers + 1),
        state,
    )
)

# The strategy, and after which of 16 local steps, counted from 1, its syncs show.
SYNCS = {
    "every": (bmuf(4), [4, 8, 12, 16]),
    "gossip": (gossip(), list(range(1, 17))),
    "easgd": (easgd(4), [4, 8, 12, 16]),
    "scaffold": (scaffold(4, learning_rate=LR), [4, 8, 12, 16]),
    "fedavg": (fedavg(4, 0.5), [4, 8, 12, 16]),
    "paced": (paced(model_averaging(4), [4, 1]), [4, 8, 12, 16]),
    "schedule": (every(lambda step: 2 + step, average()), [2, 6, 14]),
    "until": (until(9, bmuf(4)), [4, 8]),
    "after": (after(9, bmuf(4)), [12, 16]),
    "post_local_sgd": (post_local_sgd(6, 4), [8, 12, 16]),
    "hierarchical": (hierarchical(6, 4, groups=1), [4, 6, 8, 12, 16]),
    "streaming_diloco": (streaming_diloco(8, 2), [4, 8, 12, 16]),
    "with a delay": (streaming_diloco(8, 2, delay=1), [4, 8, 12, 16]),
    "delayed": (delayed(model_averaging(4), 2), [6, 10, 14]),
    "delayed chain": (
        delayed(chain(model_averaging(4), model_averaging(6)), 1),
        [5, 7, 9, 13],
    ),
    "gradients too": (chain(sync_sgd(), model_averaging(6)), [6, 12]),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SYNCS)
def test_at_syncs_acts_where_syncs_take_effect(name):
    strategy, expected = SYNCS[name]
    marked = train(at_syncs(strategy, MARK), workers=2, steps=16)
    counts = marked.replica.buffers[:, 0]
    ends = 1 + np.flatnonzero(np.diff(counts, prepend=0))
    assert ends.tolist() == expected


@pytest.mark.parametrize(
    "extra", [reset(HEAVY_BALL), average("opt_state")], ids=["reset", "average"]
)
def test_at_syncs_of_a_period_is_a_chain_of_that_period(extra):
    apart = train(at_syncs(model_averaging(PERIOD), extra), HEAVY_BALL)
    assert_same(apart, train(every(PERIOD, chain(average(), extra)), HEAVY_BALL))
    assert relative_error(apart.centers[-1], averaged().centers[-1]) > CLEARLY


def test_at_syncs_of_a_delayed_strategy_restarts_momentum_when_results_arrive():
    under_way, expected = {}, []
    for step, theta, momentum in local_steps(momentum=0.9):
        if step in under_way:
            theta[:] = under_way[step]
            momentum[:] = 0
        if (step + 1) % PERIOD == 0:
            under_way[step + 2] = theta.mean(0)
        expected.append(theta.copy())

    strategy = at_syncs(delayed(model_averaging(PERIOD), 2), reset(HEAVY_BALL))
    trained = train(strategy, HEAVY_BALL)
    assert relative_error(trained.replicas, np.array(expected)) <= ROUNDING


@pytest.mark.parametrize(
    "strategy",
    [
        sync_sgd(),
        every(4, sync_sgd()),
        until(4, masked(sync_sgd(), True)),
        chain(sync_sgd(), syncalgos.topk_sgd()),
        delayed(sync_sgd(), 2),
    ],
    ids=["sync_sgd", "every", "until masked", "chain", "delayed"],
)
def test_at_syncs_refuses_strategies_that_never_sync(strategy):
    with pytest.raises(ValueError, match="never syncs"):
        at_syncs(strategy, reset(HEAVY_BALL))


def test_at_syncs_refuses_what_is_no_strategy():
    for pair in ((bmuf, reset(HEAVY_BALL)), (bmuf(), reset)):
        with pytest.raises(ValueError, match="at_syncs: expected a Strategy"):
            at_syncs(*pair)


def test_diloco_trains_with_muon_inside():
    """MuLoCo: Muon steps for the 2-D kernel, Adam's for the rest."""
    muon = optax.contrib.muon(0.02)
    trained = problems.train(diloco(PERIOD), muon, workers=4, at=(20, 40, 60))
    x, target = problems.make_batches(1, global_batch=960, seed=2)

    def test_loss(vector):
        params = problems.unflatten(vector)
        return float(problems.loss(params, (x[0], target[0])))

    start = test_loss(problems.flatten(problems.initial_params()))
    losses = [start, *map(test_loss, trained.centers)]
    assert losses[-1] < 0.5 * start
    assert losses == sorted(losses, reverse=True)
