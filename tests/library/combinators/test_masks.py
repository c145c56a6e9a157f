"""Strategies for a part of the params: the others are neither sent nor changed."""

import jax
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

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

CLEARLY = 1e-2
BODY = np.arange(SIZE) < 16  # the entries of the body's leaves, bias and kernel
HEAD = ~BODY

EVERY_MASK = {
    "tree": {
        "body": {"bias": True, "kernel": True},
        "head": {"scale": False},
    },
    "prefix": {"body": True, "head": False},
    "callable": lambda params: {"body": True, "head": False},
    "path": lambda params: jax.tree.map_with_path(
        lambda path, x: path[0].key == "body", params
    ),
}
BODY_MASK = EVERY_MASK["prefix"]
HEAD_MASK = {"body": False, "head": True}


def test_parts_of_the_test_model_are_those_that_the_masks_say():
    tree = unflatten(np.arange(float(SIZE)))
    np.testing.assert_array_equal(flatten(tree["body"]), np.flatnonzero(BODY))
    np.testing.assert_array_equal(flatten(tree["head"]), np.flatnonzero(HEAD))


def test_masked_reduction_takes_the_gradients_of_its_part_only():
    def averaged(grads, step):
        return np.where(BODY, grads.mean(0), grads)

    expected = ByHand(combine=averaged).replicas
    assert_replicas(train(sa.masked(sa.sync_sgd(), BODY_MASK)), expected)


@pytest.mark.parametrize("mask", EVERY_MASK.values(), ids=EVERY_MASK)
def test_masked_sync_takes_the_params_of_its_part_only(mask):
    own = ByHand()
    for _, theta, _ in own.ends():
        theta[:, BODY] = theta[:, BODY].mean(0)
    trained = train(sa.masked(sa.model_averaging(4), mask))
    assert_replicas(trained, own.replicas)
    assert relative_error(trained.centers, own.replicas.mean(1)) <= ROUNDING


def test_mask_of_all_leaves_is_the_strategy_and_of_none_is_no_strategy():
    assert_same(train(sa.masked(sa.bmuf(4), True)), train(sa.bmuf(4)))
    assert_same(train(sa.masked(sa.bmuf(4), False)), train(sa.Strategy()))


def test_masked_leaves_opt_state_and_buffers_whole():
    expected = []
    for step, _, momentum in ByHand(momentum=0.9):
        if (step + 1) % 4 == 0:
            momentum[:] = momentum.mean(0)
        expected.append(momentum.copy())

    momentum = optax.sgd(LR, momentum=0.9)
    trained = train(
        sa.masked(sa.every(sa.average("opt_state"), 4), BODY_MASK), momentum
    )
    trace = flatten(trained.replica.opt_state[0].trace, lead=2)
    assert relative_error(trace, np.array(expected)) <= ROUNDING


# BMUF of the body and synchronous SGD of the head, in all orders of the members, and
# chained at once or by parts. One after the other they change disjoint leaves.
BMUF = sa.masked(sa.bmuf(4, block_momentum=0.8, block_lr=0.7), BODY_MASK)
SYNC = sa.masked(sa.sync_sgd(), HEAD_MASK)
CHAINS = {
    "bmuf first": sa.chain(BMUF, SYNC),
    "bmuf last": sa.chain(SYNC, BMUF),
    "in one chain more": sa.chain(
        sa.chain(BMUF), sa.average("buffers"), sa.chain(SYNC)
    ),
    "behind a chain": sa.chain(
        sa.chain(SYNC, sa.average("buffers")), sa.chain(sa.chain(BMUF))
    ),
}


@pytest.mark.parametrize("strategy", CHAINS.values(), ids=CHAINS)
def test_parts_of_a_model_take_strategies_of_their_own(strategy):
    def head_averaged(grads, step):
        return np.where(HEAD, grads.mean(0), grads)

    w, velocity = START, np.zeros(SIZE)
    own, centers = ByHand(combine=head_averaged), []
    for step, theta, _ in own:
        if (step + 1) % 4 == 0:
            velocity = 0.8 * velocity + 0.7 * (theta.mean(0) - w)
            w = w + velocity
            theta[:, BODY] = w[BODY]
        centers.append(np.where(BODY, w, theta.mean(0)))

    trained = train(strategy)
    assert_replicas(trained, own.replicas)
    assert relative_error(trained.centers, np.array(centers)) <= ROUNDING


KERNEL_MASK = {"body": {"bias": False, "kernel": True}, "head": False}


def kernels(params):
    return jax.tree.map_with_path(lambda path, x: path[-1].key == "kernel", params)


# The last member that knows a center for a leaf gives it, else it is the mean. B and D
# are the centers of bmuf and of diloco in their own chains.
CENTERS = {
    "last of its own": (lambda b, d: sa.chain(d, b), "BBB"),
    "part over the whole": (lambda b, d: sa.chain(d, sa.masked(b, BODY_MASK)), "BBD"),
    "whole over a part": (lambda b, d: sa.chain(sa.masked(b, BODY_MASK), d), "DDD"),
    "two parts": (
        lambda b, d: sa.chain(sa.masked(b, KERNEL_MASK), sa.masked(d, HEAD_MASK)),
        ".BD",
    ),
    "part over part": (
        lambda b, d: sa.chain(sa.masked(d, BODY_MASK), sa.masked(b, KERNEL_MASK)),
        "DB.",
    ),
    "part of a part": (lambda b, d: sa.masked(sa.masked(b, kernels), BODY_MASK), ".B."),
    "part of a chain of parts": (
        lambda b, d: sa.masked(sa.chain(d, sa.masked(b, kernels)), BODY_MASK),
        "DB.",
    ),
    "parts, nested": (
        lambda b, d: sa.chain(
            d, sa.chain(sa.average("buffers"), sa.masked(b, HEAD_MASK))
        ),
        "DDB",
    ),
}


@pytest.mark.parametrize("case", CENTERS.values(), ids=CENTERS)
def test_center_of_each_leaf_is_that_of_the_last_member_with_its_own(case):
    make, letters = case
    fixed = {
        value: sa.Strategy(
            center=lambda params, state, value=value: jax.tree.map(
                lambda x: 0 * x + value, params
            )
        )
        for value in (100.0, 200.0)
    }
    trained = train(make(fixed[100.0], fixed[200.0]), steps=2)
    mean = trained.replicas.mean(1)
    values = {"B": 0 * mean + 100, "D": 0 * mean + 200, ".": mean}
    leaf_of_entry = np.repeat(np.arange(3), [4, 12, 1])
    expected = np.select(
        [np.array(list(letters))[leaf_of_entry] == letter for letter in values],
        values.values(),
    )
    np.testing.assert_allclose(trained.centers, expected, rtol=ROUNDING)


def test_personal_layers_are_not_sent():
    params = unflatten(START)
    for strategy in (
        sa.sync_sgd(),
        sa.model_averaging(4),
        sa.bmuf(4),
        sa.diloco(4),
        sa.delayed(sa.bmuf(4), 2),
    ):
        whole = sa.communication(strategy, params, workers=2, steps=8)
        part = sa.communication(
            sa.masked(strategy, BODY_MASK), params, workers=2, steps=8
        )
        syncs = whole.bytes_per_worker / (8 * SIZE)  # a ring of two sends all once
        assert part.bytes_per_worker == 8 * BODY.sum() * syncs
        assert part.syncs == whole.syncs == syncs


@pytest.mark.parametrize("block", [sa.bmuf(1), sa.average()], ids=["bmuf", "average"])
def test_personal_layers_are_not_sent_by_what_combines_masked(block):
    strategy = sa.delayed(sa.every(sa.masked(block, BODY_MASK), 4), 2)
    sent = sa.communication(strategy, unflatten(START), workers=2, steps=8)
    assert sent.bytes_per_worker == 2 * 8 * BODY.sum()


def test_masked_every_is_every_masked():
    for block in (sa.bmuf(1, block_momentum=0.8), sa.diloco(1)):
        outside = sa.every(sa.masked(block, BODY_MASK), 4)
        assert_same(train(outside), train(sa.masked(sa.every(block, 4), BODY_MASK)))


@pytest.mark.parametrize(
    "outside",
    [sa.masked(sa.bmuf(4), BODY_MASK), sa.every(sa.masked(sa.bmuf(1), BODY_MASK), 4)],
    ids=["masked every", "every masked"],
)
def test_delayed_masked_is_masked_delayed(outside):
    inside = sa.masked(sa.delayed(sa.bmuf(4), 2), BODY_MASK)
    assert_same(train(sa.delayed(outside, 2)), train(inside))


def test_masked_works_in_a_loop_of_ones_own_over_a_single_axis():
    def parts(**axis):
        return sa.chain(
            sa.masked(sa.bmuf(4, **axis), BODY_MASK),
            sa.masked(sa.sync_sgd(**axis), HEAD_MASK),
        )

    assert_same(train(parts(axis="batch"), axis="batch"), train(parts()))


def test_masked_trains_in_the_engine():
    """Averaged leaves agree after a sync, and the personal ones stay apart."""

    def loss(params, batch):
        return sum(((x - batch.mean()) ** 2).sum() for x in jax.tree.leaves(params))

    trainer = sa.DataParallel(
        sa.stateless(loss),
        optax.sgd(LR),
        sa.masked(sa.model_averaging(2), BODY_MASK),
        workers=4,
    )
    state = trainer.init(unflatten(START))
    state, _ = trainer.run(state, np.random.default_rng(0).normal(size=(2, 8)))
    params = flatten(state.replica.params, lead=2).reshape(4, -1)
    apart = np.ptp(params, axis=0)
    assert apart[BODY].max() <= ROUNDING
    assert apart[HEAD].min() > CLEARLY
    center = flatten(trainer.center(state).params)
    np.testing.assert_allclose(center, params.mean(0), rtol=ROUNDING)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (1, "masked: mask must hold booleans or slices, got 1"),
        ({"body": "yes", "head": False}, "hold booleans or slices, got 'yes'"),
        (lambda params: None, "masked"),
        ({"boddy": True, "head": False}, "masked"),
        ({"body": True}, "masked"),
        ([True, False], "masked"),
    ],
)
def test_wrong_masks_are_refused_when_the_state_is_made(mask, message):
    strategy = sa.masked(sa.bmuf(4), mask)
    with pytest.raises(ValueError, match=message):
        strategy.init(unflatten(START))


def test_what_is_no_strategy_is_refused():
    with pytest.raises(ValueError, match=r"masked: expected a Strategy.*bmuf\(\)"):
        sa.masked(sa.bmuf, True)
