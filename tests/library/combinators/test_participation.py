"""Workers that skip rounds or local steps, against NumPy and the plain strategies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error
from problems.quadratics import (
    LR,
    ROUNDING,
    SIZE,
    START,
    ByHand,
    assert_replicas,
    assert_same,
    flatten,
    train,
    unflatten,
)

import syncalgos
from syncalgos import (
    average,
    bmuf,
    chain,
    communication,
    delayed,
    diloco,
    every,
    fedavg,
    masked,
    model_averaging,
    paced,
    participating,
    post_local_sgd,
    reducers,
    reset,
    sampled,
    slowmo,
    sync_sgd,
    when,
)

pytestmark = pytest.mark.usefixtures("float64")

CLEARLY = 1e-2
MOMENTUM = optax.sgd(LR, momentum=0.9)


def all_alike(step, workers):
    return jnp.ones(workers)


# Weights of the four workers in rounds of 4 steps, by round.
ROUNDS = np.array([[1, 2, 0, 1], [0, 0, 0, 3], [0.5, 0, 1, 0.25]])


def by_round(step, workers):
    return jnp.asarray(ROUNDS)[step // 4]


def weighted(models, step):
    """The mean of those who take part, by their weights."""
    weights = ROUNDS[step // 4]
    return weights @ models / weights.sum()


STRATEGIES = {
    "sync_sgd": sync_sgd(),
    "model_averaging": model_averaging(4),
    "bmuf": bmuf(4),
    "diloco": diloco(4),
    "slowmo": slowmo(4, learning_rate=LR),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "stale"), [*((name, False) for name in STRATEGIES), ("bmuf", True)]
)
def test_strategy_that_all_take_part_in_is_the_strategy(name, stale):
    strategy = STRATEGIES[name]
    assert_same(train(participating(strategy, all_alike, stale=stale)), train(strategy))


def test_average_is_the_weighted_mean_of_those_who_take_part():
    own = ByHand()
    for step, theta, _ in own.ends():
        theta[:] = weighted(theta, step)
    trained = train(participating(model_averaging(4), by_round))
    assert_replicas(trained, own.replicas)


@pytest.mark.parametrize(
    "around",
    [lambda both: both, lambda both: when(both, lambda step: True), chain],
)
def test_schedules_in_one_another_weigh_by_both(around):
    """Each has a state, which what is around it must not look past."""
    common, own, other = START, ByHand(), np.array([2.0, 1.0, 1.0, 4.0])
    for step, theta, _ in own.ends():
        share = 4 * ROUNDS[step // 4] / ROUNDS[step // 4].sum()
        share = share * 4 * other / other.sum()
        common = np.mean(common + share[:, None] * (theta - common), 0)
        theta[:] = common
    inner = participating(model_averaging(4), by_round)
    both = participating(inner, lambda step, workers: jnp.asarray(other))
    assert_replicas(train(around(both)), own.replicas)


def test_bmuf_filters_the_weighted_mean_of_those_who_take_part():
    w, velocity, centers = START, np.zeros(SIZE), []
    for step, theta, _ in ByHand():
        if (step + 1) % 4 == 0:
            velocity = 0.8 * velocity + 0.7 * (weighted(theta, step) - w)
            w = w + velocity
            theta[:] = w
        centers.append(w)

    trained = train(participating(bmuf(4, block_momentum=0.8, block_lr=0.7), by_round))
    assert relative_error(trained.centers, np.array(centers)) <= ROUNDING
    assert relative_error(trained.replicas[3::4, 0], np.array(centers[3::4])) < ROUNDING


def test_gradients_are_weighted_at_each_step():
    expected = ByHand(combine=weighted).replicas
    assert_replicas(train(participating(sync_sgd(), by_round)), expected)


WEIGHTS = np.array([3.0, 1, 0, 0])
OF_WORKERS = np.array([1.0, 2, 30, 40])  # what each worker's data hold


def three_to_one(step, workers):
    return jnp.asarray(WEIGHTS)


def running(params, buffers, batch, key):
    """Pulls params to the data, whose running mean is a buffer beside a key."""
    total = buffers["mean"] + 0.1 * (jnp.mean(batch) - buffers["mean"])
    loss = jnp.mean((params - batch) ** 2) / 2
    return loss, ({**buffers, "mean": total}, {"seen": jnp.mean(batch)})


WEIGHED = {
    "average": chain(model_averaging(2), every(average("opt_state"), 2)),
    "bmuf": bmuf(2, block_momentum=0, block_lr=1),
    "fedavg": fedavg(2, fraction=1.0),
    "one gate": every(chain(average(), average("opt_state"), average("buffers")), 2),
    "gradients": sync_sgd(),
    "stale": None,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WEIGHED)
def test_weights_reach_all_that_is_made_of_the_workers(name):
    """Means by 3 : 1, and none of 30 and 40, whose gradients would be ten times."""
    strategy = WEIGHED[name] or model_averaging(2)
    trainer = syncalgos.DataParallel(
        running,
        optax.sgd(0.1, momentum=0.5),
        participating(strategy, three_to_one, stale=name == "stale"),
        workers=4,
        backend="vmap",
    )
    buffers = {"mean": jnp.zeros(()), "key": jax.random.key(0)}
    state = trainer.init(jnp.zeros(()), buffers)
    theta, momentum, mean = np.zeros(4), np.zeros(4), np.zeros(4)
    for step in range(5):
        state, metrics = trainer.run(state, OF_WORKERS[None])
        losses = (theta - OF_WORKERS) ** 2 / 2
        assert relative_error(metrics["loss"][0], WEIGHTS @ losses / 4) <= ROUNDING
        assert relative_error(metrics["seen"][0], 1.25) <= ROUNDING
        grads = theta - OF_WORKERS
        grads = np.full(4, WEIGHTS @ grads / 4) if name == "gradients" else grads
        momentum = 0.5 * momentum + grads
        theta, mean = theta - 0.1 * momentum, mean + 0.1 * (OF_WORKERS - mean)
        if step % 2 and name != "gradients":
            stays = (WEIGHTS == 0) & (name == "stale")
            theta = np.where(stays, theta, WEIGHTS @ theta / 4)
            if name in ("average", "one gate"):
                momentum[:] = WEIGHTS @ momentum / 4
            mean[:] = WEIGHTS @ mean / 4 if name == "one gate" else mean
        center = trainer.center(state)
        expected = WEIGHTS @ mean / 4
        assert relative_error(center.buffers["mean"], expected) <= ROUNDING
        if name != "bmuf" or step % 2:  # its center is of the last sync
            assert relative_error(center.params, WEIGHTS @ theta / 4) <= ROUNDING


def test_a_paced_worker_without_steps_is_in_no_buffers_and_no_metrics():
    strategy = paced(model_averaging(2), [2, 1, 0, 0])
    trainer = syncalgos.DataParallel(
        running, optax.sgd(0.1), strategy, workers=4, backend="vmap"
    )
    buffers = {"mean": jnp.zeros(()), "key": jax.random.key(0)}
    state = trainer.init(jnp.zeros(()), buffers)
    state, metrics = trainer.run(state, np.tile(OF_WORKERS, (2, 1)))
    assert relative_error(metrics["seen"], np.full(2, 1.5)) <= ROUNDING
    mean = trainer.center(state).buffers["mean"]
    assert relative_error(mean, 1.5 * (1 - 0.9**2)) <= ROUNDING


def test_evaluate_takes_the_weighted_buffers():
    def loss(params, buffers, batch, key):
        return buffers + 0 * params * batch.mean(), (batch.mean(), {})

    strategy = participating(model_averaging(2), three_to_one)
    trainer = syncalgos.DataParallel(
        loss, optax.sgd(0.1), strategy, workers=4, backend="vmap"
    )
    state = trainer.init(jnp.zeros(()), jnp.zeros(()))
    state, _ = trainer.run(state, OF_WORKERS[None])
    assert trainer.evaluate(state, OF_WORKERS[None])["loss"][0] == 1.25


FEEDBACK = {
    "error_feedback": lambda axis: reducers.error_feedback(
        reducers.top_k(0.5, axis=axis), axis=axis
    ),
    "low_bit": lambda axis: reducers.low_bit(2, beta=0, axis=axis),
}


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_worker_that_skips_keeps_its_residual(name):
    """It sends nothing: the result is as if its residual were 0."""

    def second_skips(step, workers):
        return jnp.where((step == 1) & (jnp.arange(workers) == 1), 0.0, 1.0)

    reduced = syncalgos.reduce_with(FEEDBACK[name]("workers"), axis="workers")
    strategy = participating(reduced, second_skips)

    def step(grads, state, number):
        return strategy.reduce(grads, syncalgos.Replica(grads), state, number)

    mapped = jax.jit(jax.vmap(step, axis_name="workers", in_axes=(0, 0, None)))
    grads = jnp.array([[4.0, 1, 4, 1]] * 2)
    _, state = mapped(grads, jax.vmap(strategy.init, axis_name="workers")(grads), 0)
    residuals, form = jax.tree.flatten(state)
    np.testing.assert_array_equal(residuals[0], [[0, 1, 0, 1]] * 2)
    combined, after = mapped(grads, state, 1)
    np.testing.assert_array_equal(jax.tree.leaves(after)[0][1], [0, 1, 0, 1])
    residuals[0] = residuals[0].at[1].set(0)
    without, _ = mapped(grads, form.unflatten(residuals), 1)
    np.testing.assert_array_equal(combined, without)
    np.testing.assert_array_equal(combined[:, ::2], np.full((2, 2), 4))


NO_MEANS = {
    "median": syncalgos.reduce_with("median"),
    "trimmed": average(reduce="trimmed"),
    "clipped": syncalgos.outer_step(optax.sgd(1.0), "clipped"),
    "edit": syncalgos.edit(2),
    "votes": syncalgos.sign_sgd(majority=True),
    "signum": syncalgos.signum(),
    "mean signs": syncalgos.distributed_lion(majority=False),
    "demo": syncalgos.demo(chunk=4, top_k=1),
    "dgc": syncalgos.dgc(),
    "dion": syncalgos.dion(),
    "ef21": syncalgos.ef21(),
    "one_bit_adam": syncalgos.one_bit_adam(dense_steps=1),
    "groups": syncalgos.hierarchical(4, inner_period=2, groups=2),
    "gossip": syncalgos.gossip(),
    "choco_sgd": chain(syncalgos.choco_sgd()),
    "noloco": syncalgos.noloco(2),
    "sparta": syncalgos.sparta(),
    "eager_diloco": delayed(syncalgos.eager_diloco(2), 1),
    "overlap_local_sgd": syncalgos.overlap_local_sgd(2),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_refused(name):
    strategy = participating(NO_MEANS[name], all_alike)
    with pytest.raises(ValueError, match="is not a mean over the workers"):
        communication(strategy, unflatten(START), workers=4, steps=2)


def nobody_in_the_second_round(step, workers):
    return jnp.where(step // 4 == 1, 0.0, jnp.ones(workers))


def in_vain(strategy):
    return participating(strategy, nobody_in_the_second_round)


IN_VAIN = {
    **STRATEGIES,
    "part of a model": masked(bmuf(4), {"body": True, "head": True}),
    "in one gate": every(chain(average("buffers"), average()), 4),
    "in gates apart": chain(model_averaging(4), every(average("buffers"), 4)),
}
del IN_VAIN["sync_sgd"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", IN_VAIN)
def test_round_in_which_nobody_takes_part_goes_on(name):
    without = train(when(IN_VAIN[name], lambda step: step // 4 != 1))
    assert_same(train(in_vain(IN_VAIN[name])), without)


def test_gradients_of_a_step_in_which_nobody_takes_part_are_zero():
    trained = train(in_vain(sync_sgd()))
    assert relative_error(trained.replicas[7], trained.replicas[3]) <= ROUNDING
    assert relative_error(trained.replicas[8], trained.replicas[7]) > CLEARLY


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [(bmuf(4), [3, 11]), (sync_sgd(), [0, 1, 2, 3, 8, 9, 10, 11])],
    ids=["bmuf", "sync_sgd"],
)
def test_nothing_is_sent_in_a_round_in_which_nobody_takes_part(strategy, steps):
    sent = communication(
        in_vain(strategy), unflatten(START), workers=2, steps=12
    ).per_step
    assert np.flatnonzero(np.diff(sent, prepend=0)).tolist() == steps


def test_stale_workers_keep_their_model_and_hand_in_all_later():
    common, start, own = START, np.tile(START, (4, 1)), ByHand()
    for step, theta, _ in own.ends():
        common = common + weighted(theta - start, step)
        takes_part = ROUNDS[step // 4] > 0
        theta[takes_part] = start[takes_part] = common
    trained = train(participating(model_averaging(4), by_round, stale=True))
    assert_replicas(trained, own.replicas)
    # Worker 2 skips two rounds: it trains on from its own model all the while.
    alone = train(syncalgos.Strategy(), steps=8)
    assert relative_error(trained.replicas[7, 2], alone.replicas[7, 2]) <= ROUNDING


def test_stale_workers_see_no_change_in_a_round_without_anybody():
    strategy = participating(model_averaging(4), nobody_in_the_second_round, stale=True)
    common, own = START, ByHand()
    for step, theta, _ in own:
        if step in (3, 11):
            common = common + (theta - common).mean(0)
            theta[:] = common
    assert_replicas(train(strategy), own.replicas)


def test_sampled_draws_its_share_of_the_workers():
    shares = [(0.1, 1), (0.25, 2), (0.3, 2), (0.5, 4), (0.9, 7), (0.95, 8), (1, 8)]

    @jax.jit
    @jax.vmap
    def drawn(step):
        return [jnp.sum(sampled(fraction)(step, 8)) for fraction, _ in shares]

    for counts, (_, share) in zip(drawn(jnp.arange(100)), shares, strict=True):
        np.testing.assert_array_equal(counts, np.full(100, share))


def test_sampled_draws_anew_at_each_step_and_for_each_seed():
    @jax.jit
    @jax.vmap
    def drawn(step):
        return [sampled(0.5, seed=seed)(step, 8) for seed in (0, 1)]

    draws = np.array(drawn(jnp.arange(100)))  # (seeds, steps, workers)
    # 70 sets of 4 of 8 workers: as good as never the same twice in a row.
    assert (draws[:, 1:] != draws[:, :-1]).any(2).mean() > 0.9
    assert (draws[0] != draws[1]).any(1).mean() > 0.9
    # Each worker is drawn at half of the steps, give or take 5 standard deviations.
    assert abs(draws.mean((0, 1)) - 0.5).max() < 5 * 0.5 / np.sqrt(200)


def means_of_drawn(drawn):
    """The replicas where all take the mean of those drawn at the end of a round."""
    own = ByHand()
    for step, theta, _ in own.ends():
        theta[:] = theta[drawn[step]].mean(0)
    return own.replicas


def test_fedavg_averages_the_workers_that_are_drawn_on_all():
    drawn = np.array([sampled(0.5, seed=7)(step, 4) for step in range(12)])
    assert len({tuple(row) for row in drawn[3::4]}) > 1
    trained = train(fedavg(4, fraction=0.5, seed=7))
    assert_replicas(trained, means_of_drawn(drawn))


def test_fedavg_never_copies_one_of_several_models_to_all():
    """At the paper's fraction of 0.1, which of 4 workers is 0."""
    drawn = np.array([sampled(0.1, least=2)(step, 4) for step in range(12)])
    assert (drawn.sum(1) == 2).all()
    assert sampled(0.1, least=2)(0, 1).tolist() == [True]
    assert_replicas(train(fedavg(4, fraction=0.1)), means_of_drawn(drawn))


@pytest.mark.parametrize("together", [True, False], ids=["one gate", "gates apart"])
def test_reset_in_a_chain_is_for_all_workers(together):
    own = ByHand(momentum=0.9)
    for step, theta, momentum in own.ends():
        theta[:] = weighted(theta, step)
        momentum[:] = 0
    apart = chain(model_averaging(4), every(reset(MOMENTUM), 4))
    joined = every(chain(average(), reset(MOMENTUM)), 4)
    strategy = participating(joined if together else apart, by_round)
    assert_replicas(train(strategy, MOMENTUM), own.replicas)


@pytest.mark.parametrize(
    "strategy",
    [
        delayed(model_averaging(4), 2),
        syncalgos.streaming_diloco(4, fragments=2, delay=1),
    ],
)
def test_delayed_strategy_that_all_take_part_in_is_the_strategy(strategy):
    assert_same(train(participating(strategy, all_alike)), train(strategy))


def test_each_member_of_a_combination_takes_part_on_its_own():
    mask = {"body": True, "head": False}
    outside = participating(masked(delayed(bmuf(4), 2), mask), by_round)
    inside = masked(delayed(every(participating(bmuf(1), by_round), 4), 2), mask)
    assert_same(train(outside), train(inside))


def test_post_local_sgd_weighs_gradients_first_and_models_later():
    def at_first(grads, step):
        return weighted(grads, step) if step < 4 else grads

    own = ByHand(combine=at_first)
    for step, theta, _ in own.ends():
        theta[:] = weighted(theta, step) if step >= 4 else theta
    trained = train(participating(post_local_sgd(dense_steps=4, period=4), by_round))
    assert_replicas(trained, own.replicas)


def at_own_speed(local_steps_of_each, filtered):
    """Model averaging, or BMUF: the replicas after each step, and the block's start."""
    quotas = np.array(local_steps_of_each)
    w, velocity, own = START, np.zeros(SIZE), ByHand()
    held, done = np.tile(START, (4, 1)), 0
    for step, theta, _ in own:
        theta[done >= quotas] = held[done >= quotas]
        done += 1
        if (step + 1) % 4 == 0:
            velocity = 0.8 * filtered * velocity + theta.mean(0) - w
            w, done = w + velocity, 0
            theta[:] = w
        held = theta.copy()
    return own.replicas


@pytest.mark.parametrize(
    ("strategy", "filtered"),
    [(model_averaging(4), False), (bmuf(4, block_momentum=0.8), True)],
)
def test_paced_workers_take_fewer_local_steps_and_then_stand_still(strategy, filtered):
    quotas = [4, 2, 1, 0]
    trained = train(paced(strategy, quotas))
    assert_replicas(trained, at_own_speed(quotas, filtered))
    inside = trained.replicas[4:7]  # the second round before its sync
    for worker, steps in enumerate(quotas[1:], start=1):
        held = inside[max(steps - 1, 0) :, worker]
        np.testing.assert_array_equal(held, np.broadcast_to(held[0], held.shape))


def test_paced_with_enough_local_steps_is_the_strategy():
    assert_same(train(paced(bmuf(4), [4, 5, 4, 100])), train(bmuf(4)))


def test_paced_counts_rounds_of_a_schedule():
    """Rounds of 2, 4 and 6 steps: who takes 3 misses one step, then three."""
    strategy = every(average(), lambda step: 2 + step)
    held, done, own = np.tile(START, (4, 1)), 0, ByHand()
    for step, theta, _ in own:
        theta[2:] = theta[2:] if done < 3 else held[2:]
        done += 1
        if step in (1, 5):
            theta[:], done = theta.mean(0), 0
        held = theta.copy()
    assert_replicas(train(paced(strategy, [9, 9, 3, 3])), own.replicas)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sampled(0), "sampled: fraction must be .* above 0, got 0"),
        (lambda: sampled(1.5), "sampled: fraction must be at most 1, got 1.5"),
        (lambda: sampled(0.5, least=0), "sampled: least must be .* at least 1, got 0"),
        (lambda: fedavg(4, fraction=0), "fedavg: fraction must be .* above 0, got 0"),
        (lambda: participating(bmuf, all_alike), "participating: expected a Strategy"),
        (lambda: participating(bmuf(), 0.5), "schedule must be a function, got 0.5"),
        (lambda: paced(bmuf, [1]), "paced: expected a Strategy"),
        (lambda: paced(bmuf(), [1, 0.5]), "each of local_steps must be a whole number"),
        (lambda: paced(bmuf(), 4), "local_steps must be a list of numbers, got 4"),
        (lambda: paced(bmuf(), [-1]), "each of local_steps must be .* at least 0"),
        (lambda: paced(sync_sgd(), [1, 2, 3, 4]), "paced.* never syncs"),
        (
            lambda: train(paced(bmuf(4), [1, 2, 3])),
            "paced: local_steps has 3 numbers for 4 workers",
        ),
        (
            lambda: train(participating(bmuf(4), lambda step, workers: jnp.ones(3))),
            r"a weight for each of the 4 workers, got shape \(3,\)",
        ),
        (
            lambda: train(participating(bmuf(4), lambda *_: np.r_[1, np.nan, 1, 1])),
            "finite and at least 0, got nan for worker 1 at local step 0",
        ),
        (
            lambda: train(participating(bmuf(4), lambda t, _: jnp.r_[1, 1, 1, 5 - t])),
            "finite and at least 0, got -1.0 for worker 3 at local step 6",
        ),
        (
            lambda: train(participating(sync_sgd(), lambda step, workers: 1.0)),
            r"a weight for each of the 4 workers, got shape \(\)",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("strategy", [model_averaging(4), sync_sgd()])
def test_a_worker_that_skips_may_have_diverged(strategy):
    """NaN of worker 0, which never takes part, reaches nobody."""

    def others(step, workers):
        return jnp.arange(workers) > 0

    def loss(params, batch):
        return jnp.sum(params * batch.mean())

    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss),
        optax.sgd(0.1),
        participating(strategy, others),
        workers=4,
        backend="vmap",
    )
    batches = np.ones((4, 4), np.float32)
    batches[:, 0] = np.nan
    state, _ = trainer.run(trainer.init(jnp.ones(2)), batches)
    np.testing.assert_allclose(state.replica.params, 0.6, rtol=1e-6)


def test_participation_trains_in_a_loop_of_ones_own_over_a_single_axis():
    def slow_and_seldom(**axis):
        seldom = participating(bmuf(4, **axis), by_round, stale=True)
        return paced(seldom, [4, 3, 2, 1])

    own = train(slow_and_seldom(axis="batch"), axis="batch")
    assert_same(own, train(slow_and_seldom()))


def test_bfloat16_keeps_its_dtype():
    both = participating(chain(sync_sgd(), model_averaging(2)), by_round, stale=True)
    trained = train(paced(both, [2, 1, 1, 0]), steps=4, dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(trained.replica.params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert np.isfinite(np.float32(flatten(trained.replica.params, lead=2))).all()
