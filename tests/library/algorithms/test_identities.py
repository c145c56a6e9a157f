"""Algorithms that theory says are the same, trained side by side in float64.

The oracle is another strategy, an optax optimizer in a plain loop, or a few lines of
NumPy. Centers are compared at block ends, after local steps 4, 8 and 12.
"""

import jax
import numpy as np
import optax
import pytest
from problems import (
    flatten,
    gradient,
    initial_params,
    loss,
    make_batches,
    relative_error,
    train,
)

import syncalgos
from syncalgos import after, average, chain, every, outer_step, reset, until

pytestmark = pytest.mark.usefixtures("float64")

PERIOD = 4
LR = 0.2
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
COSINE = optax.cosine_decay_schedule(LR, 16)

# Float64 rounds at 1e-16; sums of a few hundred terms in another order, carried through
# 12 steps, stay below 1e-14. What theory keeps apart differs by more than CLEARLY.
ROUNDING = 1e-12
CLEARLY = 1e-2


def assert_same_centers(strategy, other, optimizer=HEAVY_BALL, other_optimizer=None):
    expected = train(other, other_optimizer or optimizer).centers
    actual = train(strategy, optimizer).centers
    assert relative_error(actual, expected) <= ROUNDING


def local_steps(workers, steps, lr=lambda step: LR, synced=lambda step: False):
    """Yields (step, θ, m): every worker after its own heavy-ball step, in NumPy.

    Gradients are averaged at steps where `synced`. The caller may replace entries of
    the lists θ and m: the next step starts from them.
    """
    start = flatten(initial_params())
    theta, momentum = [start] * workers, [0 * start] * workers
    batches = zip(*make_batches(steps), strict=True)
    for step, (x, target) in enumerate(batches):
        parts = zip(np.split(x, workers), np.split(target, workers), strict=True)
        grads = [gradient(t, *part) for t, part in zip(theta, parts, strict=True)]
        if synced(step):
            grads = [np.mean(grads, axis=0)] * workers
        for i in range(workers):
            momentum[i] = 0.9 * momentum[i] + grads[i]
            theta[i] = theta[i] - lr(step) * momentum[i]
        yield step, theta, momentum


def test_different_algorithms_end_clearly_apart():
    strategies = [
        syncalgos.sync_sgd(),
        syncalgos.model_averaging(PERIOD),
        syncalgos.bmuf(PERIOD),
        syncalgos.bmuf(PERIOD, nesterov=True),
        syncalgos.diloco(PERIOD),
    ]
    ends = [train(strategy, HEAVY_BALL).centers[-1:] for strategy in strategies]
    for i, end in enumerate(ends):
        assert all(relative_error(end, other) > CLEARLY for other in ends[:i])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(LR),
        HEAVY_BALL,
        optax.sgd(COSINE),
        optax.sgd(COSINE, momentum=0.9, nesterov=True),
    ],
    ids=["sgd", "momentum", "cosine", "cosine-nesterov"],
)
def test_model_averaging_of_period_one_is_sync_sgd(optimizer):
    assert_same_centers(syncalgos.model_averaging(1), syncalgos.sync_sgd(), optimizer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_with_zero_block_momentum_is_model_averaging(nesterov):
    bmuf = syncalgos.bmuf(PERIOD, block_momentum=0, block_lr=1, nesterov=nesterov)
    assert_same_centers(bmuf, syncalgos.model_averaging(PERIOD))


def test_bmuf_with_one_worker_and_default_momentum_is_plain_sgd():
    plain = [theta[0] for _, theta, _ in local_steps(workers=1, steps=12)]
    bmuf = train(syncalgos.bmuf(PERIOD), HEAVY_BALL, workers=1)
    assert relative_error(bmuf.centers, np.array(plain[3::PERIOD])) <= ROUNDING


@pytest.mark.parametrize("block_lr", [1.0, 0.4, 1.7])
def test_bmuf_of_period_one_is_sync_heavy_ball(block_lr):
    assert_same_centers(
        syncalgos.bmuf(1, block_momentum=0.8, block_lr=block_lr),
        syncalgos.sync_sgd(),
        optax.sgd(LR),
        optax.sgd(LR * block_lr, momentum=0.8),
    )


def test_bmuf_of_period_one_is_not_heavy_ball_under_a_schedule():
    bmuf = train(syncalgos.bmuf(1, block_momentum=0.8), optax.sgd(COSINE))
    heavy_ball = train(syncalgos.sync_sgd(), optax.sgd(COSINE, momentum=0.8))
    assert relative_error(bmuf.centers[-1:], heavy_ball.centers[-1:]) > CLEARLY


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "block_lr, block_momentum", [(1.0, 0.9), (0.7, 0.9), (1.3, 0.4)]
)
def test_starts_of_nesterov_bmuf_are_those_of_an_outer_nesterov_step(
    block_lr, block_momentum
):
    outer = optax.sgd(block_lr, momentum=block_momentum, nesterov=True)
    stepped = train(every(PERIOD, outer_step(outer)), HEAVY_BALL)
    bmuf = train(
        syncalgos.bmuf(PERIOD, block_momentum, block_lr, nesterov=True), HEAVY_BALL
    )
    assert relative_error(bmuf.replicas, stepped.replicas) <= ROUNDING
    assert relative_error(bmuf.centers[-1:], stepped.centers[-1:]) > CLEARLY


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "strategy, outer",
    [
        (syncalgos.model_averaging(PERIOD), optax.sgd(1.0)),
        (syncalgos.bmuf(PERIOD, 0.8, 0.7), optax.sgd(0.7, momentum=0.8)),
        (
            syncalgos.diloco(PERIOD, 0.6, 0.8),
            optax.sgd(0.6, momentum=0.8, nesterov=True),
        ),
    ],
    ids=["model_averaging", "bmuf", "diloco"],
)
def test_algorithm_is_a_step_of_an_outer_optimizer(strategy, outer):
    assert_same_centers(strategy, every(PERIOD, outer_step(outer)))


def test_outer_sgd_step_of_one_worker_is_lookahead():
    optimizer = optax.lookahead(HEAVY_BALL, sync_period=PERIOD, slow_step_size=0.3)
    params = optax.LookaheadParams.init_synced(initial_params())
    state = optimizer.init(params)
    slow = []
    for batch in zip(*make_batches(12), strict=True):
        grads = jax.grad(loss)(params.fast, batch)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(np.add, params, updates)
        slow.append(flatten(params.slow))

    one = train(every(PERIOD, outer_step(optax.sgd(0.3))), HEAVY_BALL, workers=1)
    assert relative_error(one.centers, np.array(slow[3::PERIOD])) <= ROUNDING


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_sync_sgd_does_not_depend_on_the_number_of_workers(workers):
    whole = [t[0] for _, t, _ in local_steps(1, steps=12)]
    many = train(syncalgos.sync_sgd(), HEAVY_BALL, workers)
    assert relative_error(many.centers, np.array(whole[3::PERIOD])) <= ROUNDING


# The strategy, and how far its center goes for a block's move and the new velocity
# (μ times the old one + the move): heavy ball, and Nesterov's look-ahead from it.
OUTER = {
    "bmuf": (
        syncalgos.bmuf(PERIOD, block_momentum=0.8, block_lr=0.7),
        lambda move, velocity: 0.7 * velocity,
    ),
    "diloco": (
        syncalgos.diloco(PERIOD, outer_lr=0.7, outer_momentum=0.8),
        lambda move, velocity: 0.7 * (move + 0.8 * velocity),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("s", [0, 6, 8])
@pytest.mark.parametrize("synced_first", [True, False])
@pytest.mark.parametrize("name", OUTER)
def test_strategy_after_s_starts_from_the_synchronous_model(name, synced_first, s):
    """The first block is shorter if the period does not divide s."""
    strategy, update = OUTER[name]
    anchor, velocity, expected = flatten(initial_params()), 0, []
    for step, theta, _ in local_steps(3, 12, synced=lambda step: step < s):
        if step < s:
            anchor = theta[0]
        elif (step + 1) % PERIOD == 0:
            move = np.mean(theta, axis=0) - anchor
            velocity = 0.8 * velocity + move
            anchor = anchor + update(move, velocity)
            theta[:] = [anchor] * 3
        expected.append(anchor)

    members = [until(s, syncalgos.sync_sgd()), after(s, strategy)]
    switched = chain(*(members if synced_first else members[::-1]))
    trained = train(switched, HEAVY_BALL, at=range(1, 13))
    assert relative_error(trained.centers, np.array(expected)) <= ROUNDING


@pytest.mark.sample(1)
@pytest.mark.parametrize("s", [6, 8])
def test_strategy_after_s_starts_from_what_a_later_member_leaves(s):
    """Averaging behind it moves the params once more at step s - 1.

    Anchors from before would leave the replicas apart.
    """
    bmuf, sgd = after(s, syncalgos.bmuf(PERIOD, 0.8, 0.7)), optax.sgd(LR)
    averaged = train(chain(bmuf, until(s, syncalgos.model_averaging(1))), sgd)
    synced = train(chain(until(s, syncalgos.sync_sgd()), bmuf), sgd)
    assert relative_error(averaged.centers, synced.centers) <= ROUNDING
    assert relative_error(averaged.replicas[-1], synced.replicas[-1]) <= ROUNDING


@pytest.mark.parametrize("s", [6, 8])
def test_center_of_strategy_until_s_is_the_current_model_afterwards(s):
    w, velocity, expected = flatten(initial_params()), 0, []
    for step, theta, _ in local_steps(3, 12, synced=lambda step: step >= s):
        if step >= s:
            w = np.mean(theta, axis=0)
        elif (step + 1) % PERIOD == 0:
            velocity = 0.8 * velocity + 0.7 * (np.mean(theta, axis=0) - w)
            w = w + velocity
            theta[:] = [w] * 3
        expected.append(w)

    bmuf = until(s, syncalgos.bmuf(PERIOD, 0.8, 0.7))
    switched = chain(bmuf, after(s, syncalgos.sync_sgd()))
    trained = train(switched, HEAVY_BALL, at=range(1, 13))
    assert relative_error(trained.centers, np.array(expected)) <= ROUNDING


@pytest.mark.parametrize("last_two", [["bmuf", "diloco"], ["diloco", "bmuf"]])
def test_center_of_a_chain_is_that_of_the_last_with_its_own(last_two):
    """The average has no center: inside a block the center is the last start."""
    members = [OUTER[name][0] for name in last_two]
    trained = train(chain(*members, average()), optax.sgd(LR), at=(2, 4, 6))
    assert relative_error(trained.centers[2], trained.replicas[1]) <= ROUNDING
    assert relative_error(trained.centers[2], trained.replicas[2]) > CLEARLY


SCHEDULED = optax.sgd(COSINE, momentum=0.9)


@pytest.mark.parametrize(
    "member, kept",
    [(reset(SCHEDULED), 0), (average("opt_state"), 1)],
    ids=["reset", "average"],
)
def test_momentum_at_an_average_of_params_is_the_users_choice(member, kept):
    """The schedule counts on: reset zeroes momentum alone."""
    expected = []
    for step, theta, momentum in local_steps(
        3, 12, lr=lambda step: LR * (1 + np.cos(np.pi * step / 16)) / 2
    ):
        if (step + 1) % PERIOD == 0:
            theta[:] = [np.mean(theta, axis=0)] * 3
            momentum[:] = [kept * np.mean(momentum, axis=0)] * 3
            expected.append(theta[0])

    trained = train(every(PERIOD, chain(average(), member)), SCHEDULED)
    assert relative_error(trained.centers, np.array(expected)) <= ROUNDING
