"""Values where two combinators meet: weights, paces, phases, delays and graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa

ONE = np.ones((16, 4), np.float32)
MOMENTUM = optax.sgd(1.0, momentum=0.5)
OF_STATE = sa.average("opt_state")
PACED = sa.paced(sa.model_averaging(4), [1, 9, 9, 9])
FIRST_RESTS = sa.paced(sa.model_averaging(4), [0, 9, 9, 9])


def but_the_first(step, workers):
    return jnp.arange(workers) > 0


def weighted(strategy):
    return sa.participating(strategy, but_the_first)


def trained(strategy, *moves, optimizer=None):
    """(all replicas, center, losses) after worker w moved by moves[step, w] / rate.

    One of each moves, from the same start.
    """
    trainer = sa.DataParallel(
        lambda p, batch: -(p["t"][0] * batch).mean(),
        optimizer or optax.sgd(1.0),
        strategy,
        workers=4,
    )

    def after(moves):
        state, metrics = trainer.run(trainer.init({"t": jnp.zeros(4)}), moves)
        replicas = state.replica.params["t"]
        center = trainer.center(state).params["t"]
        return np.reshape(replicas, (4, -1))[:, 0], float(center[0]), metrics["loss"]

    return [after(each) for each in moves]


# Strategies in which worker 0 computes, but takes no part, and its inner optimizer.
NOBODY = {
    "mixed at once": (sa.delayed(weighted(sa.model_averaging(4)), 0, alpha=0.5), None),
    "gradients, delayed": (sa.delayed(weighted(sa.sync_sgd()), 2), None),
    "moving average": (sa.ema(weighted(sa.model_averaging(4)), 0.5), None),
    "moving average inside": (weighted(sa.ema(sa.model_averaging(4), 0.5)), None),
    "moving average of the paced": (sa.ema(FIRST_RESTS, 0.5), None),
    "optimizer at syncs": (
        sa.at_syncs(weighted(sa.model_averaging(2)), OF_STATE),
        MOMENTUM,
    ),
    "in a phase": (
        sa.chain(
            sa.until(weighted(sa.sync_sgd()), 8),
            sa.after(weighted(sa.model_averaging(4)), 8),
        ),
        None,
    ),
}


FEW = "mixed at once", "gradients, delayed", "moving average"


@pytest.mark.parametrize("name", tiers(NOBODY, default=FEW))
def test_who_takes_no_part_reaches_nothing(name):
    strategy, optimizer = NOBODY[name]
    one = ONE[:6]
    bad = ONE[:6].copy()
    bad[:, 0] = np.nan
    expected, found = trained(strategy, one, bad, optimizer=optimizer)
    np.testing.assert_array_equal(found[0][1:], expected[0][1:])
    assert found[1] == expected[1]
    np.testing.assert_array_equal(found[2], expected[2])


UNEVEN = ONE.copy()
UNEVEN[4:, 0] = 1000
APART = ONE * [1, 2, 3, 4]
LATE_AVERAGE = sa.every(sa.average(), 3)
# A strategy, the moves, the replicas and the center after them.
VALUES = {
    "a pace ends with its phase": (
        sa.chain(sa.until(PACED, 8), sa.after(sa.sync_sgd(), 8)),
        ONE,
        [14.5] * 4,
        14.5,
    ),
    "a pace begins with its phase": (
        sa.chain(sa.until(sa.sync_sgd(), 8), sa.after(PACED, 8)),
        ONE[:9],
        [9] * 4,
        9,
    ),
    "a weight ends with its phase": (
        sa.chain(
            sa.until(weighted(sa.sync_sgd()), 4), sa.after(sa.model_averaging(4), 4)
        ),
        UNEVEN[:7],
        [3004, 7, 7, 7],
        (3004 + 21) / 4,
    ),
    "gradients under way end with their phase": (
        sa.chain(sa.until(sa.delayed(sa.sync_sgd(), 2), 8), sa.after(sa.sync_sgd(), 8)),
        APART[:10],
        [20] * 4,
        20,
    ),
    "what is chained behind a pace stays": (
        sa.chain(PACED, LATE_AVERAGE),
        APART[:4],
        [9.25] * 4,
        9.25,
    ),
    "nothing arrives of a round without anybody": (
        sa.delayed(
            sa.participating(sa.model_averaging(2), lambda step, n: jnp.zeros(n)), 1
        ),
        APART[:6],
        [6, 12, 18, 24],
        15,
    ),
    "local gradients are not delayed": (
        sa.delayed(sa.fedprox(16, proximal=1e-30), 2),
        APART[:3],
        [3, 6, 9, 12],
        7.5,
    ),
}


LATER = "a pace begins with its phase", "what is chained behind a pace stays"


@pytest.mark.parametrize("name", tiers(VALUES, {*VALUES} - {*LATER}))
def test_values_where_two_meet(name):
    strategy, moves, replicas, center = VALUES[name]
    [(found, mean, _)] = trained(strategy, moves)
    np.testing.assert_allclose(found, replicas, rtol=1e-6)
    np.testing.assert_allclose(mean, center, rtol=1e-6)


def test_losses_count_all_workers_behind_a_phase_of_weights():
    """After four steps all are at 4; worker 0 has a loss of -4000, the others of -4."""
    strategy, *_ = VALUES["a weight ends with its phase"]
    [(_, _, losses)] = trained(strategy, UNEVEN[:5])
    np.testing.assert_allclose(losses, [0, -1, -2, -3, -1003], rtol=1e-6)


def test_who_rests_keeps_what_came_behind_its_sync():
    """Momentum after an arrival, at which all have the mean: see `at_syncs`."""
    slow = sa.async_diloco(2, slowest=0.5, optimizer=MOMENTUM)
    trainer = sa.DataParallel(
        lambda p, batch: -(p * batch).mean(),
        MOMENTUM,
        sa.at_syncs(slow, OF_STATE),
        workers=2,
    )
    state = trainer.init(jnp.float32(0))
    momenta = []
    for _ in range(4):
        state, _ = trainer.run(state, np.float32([[-1, -3]]))
        momenta.append(np.ravel(jax.tree.leaves(state.replica.opt_state)[0]))
    expected = [[1, 0], [2.25, 2.25], [2.125, 2.25], [3.09375, 3.09375]]
    np.testing.assert_array_equal(momenta, expected)


BLOCKS = np.eye(2), np.ones((2, 2)) / 2
PAIRS = [np.kron(*BLOCKS), np.kron(*BLOCKS[::-1])]


TURNS = {
    "gossip": sa.gossip(),
    "gossip_pga": sa.gossip_pga(1000),  # no average over all in the test
    "pairs": sa.gossip(topology=PAIRS, mix_opt_state=True),
    "push_sum": sa.push_sum(),
    "gradient_tracking": sa.gradient_tracking(topology="exponential"),
}


@pytest.mark.parametrize("name", tiers(TURNS, ["gossip", "push_sum"]))
def test_a_changing_graph_takes_its_turns_by_exchanges(name):
    apart = np.zeros((32, 4), np.float32)
    apart[0] = range(4)
    turns = sa.every(TURNS[name], 4)
    late = sa.delayed(sa.every(sa.chain(TURNS[name], OF_STATE), 4), 1)
    for strategy in (turns, late):
        [(replicas, *_)] = trained(strategy, apart)
        np.testing.assert_array_equal(replicas, [1.5] * 4)


def test_a_local_method_behind_a_phase_sends_no_losses():
    trainer = sa.DataParallel(
        lambda p, batch: (p - batch).mean() ** 2,
        optax.sgd(0.1),
        sa.decided(sa.after(sa.model_averaging(3), 6), lambda r, s, step: step > 5),
        workers=4,
    )
    assert not trainer.run(trainer.init(jnp.float32(0)), ONE[:6])[1]["decided"].any()
