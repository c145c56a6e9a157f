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
    flatten,
    local_steps,
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
    masked,
    model_averaging,
    sync_sgd,
)
from syncalgos.engine.placement.make_layout import BACKENDS

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


def assert_same(strategy, other):
    actual, expected = train(strategy), train(other)
    assert relative_error(actual.replicas, expected.replicas) <= ROUNDING
    assert relative_error(actual.centers, expected.centers) <= ROUNDING


def test_parts_of_the_test_model_are_those_that_the_masks_say():
    tree = unflatten(np.arange(float(SIZE)))
    np.testing.assert_array_equal(flatten(tree["body"]), np.flatnonzero(BODY))
    np.testing.assert_array_equal(flatten(tree["head"]), np.flatnonzero(HEAD))


@pytest.mark.parametrize("mask", EVERY_MASK.values(), ids=EVERY_MASK)
def test_masked_reduction_takes_the_gradients_of_its_part_only(mask):
    def averaged(grads, step):
        return np.where(BODY, grads.mean(0), grads)

    expected = [theta.copy() for _, theta, _ in local_steps(combine=averaged)]
    trained = train(masked(sync_sgd(), mask))
    assert relative_error(trained.replicas, np.array(expected)) <= ROUNDING


@pytest.mark.parametrize("mask", EVERY_MASK.values(), ids=EVERY_MASK)
def test_masked_sync_takes_the_params_of_its_part_only(mask):
    expected = []
    for step, theta, _ in local_steps():
        if (step + 1) % 4 == 0:
            theta[:, BODY] = theta[:, BODY].mean(0)
        expected.append(theta.copy())

    trained = train(masked(model_averaging(4), mask))
    assert relative_error(trained.replicas, np.array(expected)) <= ROUNDING
    assert relative_error(trained.centers, np.mean(expected, axis=1)) <= ROUNDING


def test_mask_of_all_leaves_is_the_strategy_and_of_none_is_no_strategy():
    assert_same(masked(bmuf(4), True), bmuf(4))
    assert_same(masked(bmuf(4), False), syncalgos.Strategy())


def test_masked_leaves_opt_state_and_buffers_whole():
    expected = []
    for step, _, momentum in local_steps(momentum=0.9):
        if (step + 1) % 4 == 0:
            momentum[:] = momentum.mean(0)
        expected.append(momentum.copy())

    momentum = optax.sgd(LR, momentum=0.9)
    trained = train(masked(every(4, average("opt_state")), BODY_MASK), momentum)
    trace = flatten(trained.replica.opt_state[0].trace, lead=2)
    assert relative_error(trace, np.array(expected)) <= ROUNDING


# BMUF of the body and synchronous SGD of the head, in all orders of the members, and
# chained at once or by parts. One after the other they change disjoint leaves.
BMUF = masked(bmuf(4, 0.8, 0.7), BODY_MASK)
SYNC = masked(sync_sgd(), HEAD_MASK)
CHAINS = {
    "bmuf first": chain(BMUF, SYNC),
    "bmuf last": chain(SYNC, BMUF),
    "in one chain more": chain(chain(BMUF), average("buffers"), chain(SYNC)),
    "behind a chain": chain(chain(SYNC, average("buffers")), chain(chain(BMUF))),
}


@pytest.mark.parametrize("strategy", CHAINS.values(), ids=CHAINS)
def test_parts_of_a_model_take_strategies_of_their_own(strategy):
    def head_averaged(grads, step):
        return np.where(HEAD, grads.mean(0), grads)

    w, velocity = START, np.zeros(SIZE)
    replicas, centers = [], []
    for step, theta, _ in local_steps(combine=head_averaged):
        if (step + 1) % 4 == 0:
            velocity = 0.8 * velocity + 0.7 * (theta.mean(0) - w)
            w = w + velocity
            theta[:, BODY] = w[BODY]
        replicas.append(theta.copy())
        centers.append(np.where(BODY, w, theta.mean(0)))

    trained = train(strategy)
    assert relative_error(trained.replicas, np.array(replicas)) <= ROUNDING
    assert relative_error(trained.centers, np.array(centers)) <= ROUNDING


KERNEL_MASK = {"body": {"bias": False, "kernel": True}, "head": False}


def kernels(params):
    return jax.tree.map_with_path(lambda path, x: path[-1].key == "kernel", params)


# The last member that knows a center for a leaf gives it, else it is the mean. B and D
# are the centers of bmuf and of diloco in their own chains.
CENTERS = {
    "last of its own": (lambda b, d: chain(d, b), "BBB"),
    "part over the whole": (lambda b, d: chain(d, masked(b, BODY_MASK)), "BBD"),
    "whole over a part": (lambda b, d: chain(masked(b, BODY_MASK), d), "DDD"),
    "two parts": (
        lambda b, d: chain(masked(b, KERNEL_MASK), masked(d, HEAD_MASK)),
        ".BD",
    ),
    "part over part": (
        lambda b, d: chain(masked(d, BODY_MASK), masked(b, KERNEL_MASK)),
        "DB.",
    ),
    "part of a part": (lambda b, d: masked(masked(b, kernels), BODY_MASK), ".B."),
    "part of a chain of parts": (
        lambda b, d: masked(chain(d, masked(b, kernels)), BODY_MASK),
        "DB.",
    ),
    "parts, nested": (
        lambda b, d: chain(d, chain(average("buffers"), masked(b, HEAD_MASK))),
        "DDB",
    ),
}


@pytest.mark.parametrize("case", CENTERS.values(), ids=CENTERS)
def test_center_of_each_leaf_is_that_of_the_last_member_with_its_own(case):
    make, letters = case
    fixed = {
        value: syncalgos.Strategy(
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
        sync_sgd(),
        model_averaging(4),
        bmuf(4),
        diloco(4),
        delayed(bmuf(4), 2),
    ):
        whole = communication(strategy, params, workers=2, steps=8)
        part = communication(masked(strategy, BODY_MASK), params, workers=2, steps=8)
        syncs = whole.bytes_per_worker / (8 * SIZE)  # a ring of two sends all once
        assert part.bytes_per_worker == 8 * BODY.sum() * syncs
        assert part.syncs == whole.syncs == syncs


@pytest.mark.parametrize("block", [bmuf(1), average()], ids=["bmuf", "average"])
def test_personal_layers_are_not_sent_by_what_combines_masked(block):
    strategy = delayed(every(4, masked(block, BODY_MASK)), 2)
    sent = communication(strategy, unflatten(START), workers=2, steps=8)
    assert sent.bytes_per_worker == 2 * 8 * BODY.sum()


def test_masked_every_is_every_masked():
    for block in (bmuf(1, 0.8), diloco(1)):
        outside = every(4, masked(block, BODY_MASK))
        assert_same(outside, masked(every(4, block), BODY_MASK))


@pytest.mark.parametrize(
    "outside",
    [masked(bmuf(4), BODY_MASK), every(4, masked(bmuf(1), BODY_MASK))],
    ids=["masked every", "every masked"],
)
def test_delayed_masked_is_masked_delayed(outside):
    assert_same(delayed(outside, 2), masked(delayed(bmuf(4), 2), BODY_MASK))


def test_masked_works_in_a_loop_of_ones_own_over_a_single_axis():
    def parts(**axis):
        return chain(
            masked(bmuf(4, **axis), BODY_MASK, **axis),
            masked(sync_sgd(**axis), HEAD_MASK),
        )

    ours, own = train(parts()), train(parts(axis="batch"), axis="batch")
    assert relative_error(own.replicas, ours.replicas) <= ROUNDING
    assert relative_error(own.centers, ours.centers) <= ROUNDING


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_trains_in_the_engine(backend):
    """Averaged leaves agree after a sync, and the personal ones stay apart."""

    def loss(params, batch):
        return sum(((x - batch.mean()) ** 2).sum() for x in jax.tree.leaves(params))

    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss),
        optax.sgd(LR),
        masked(model_averaging(2), BODY_MASK),
        workers=4,
        backend=backend,
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
        (1, "masked: mask must hold booleans, got 1"),
        ({"body": "yes", "head": False}, "mask must hold booleans, got 'yes'"),
        (lambda params: None, "masked"),
        ({"boddy": True, "head": False}, "masked"),
        ({"body": True}, "masked"),
        ([True, False], "masked"),
    ],
)
def test_wrong_masks_are_refused_when_the_state_is_made(mask, message):
    strategy = masked(bmuf(4), mask)
    with pytest.raises(ValueError, match=message):
        strategy.init(unflatten(START))


def test_what_is_no_strategy_is_refused():
    with pytest.raises(ValueError, match=r"masked: expected a Strategy.*bmuf\(\)"):
        masked(bmuf, True)
