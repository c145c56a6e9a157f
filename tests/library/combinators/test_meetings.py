"""Values where two combinators meet: weights, paces, phases, delays and graphs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa

UNIT_MOVES = np.ones((16, 4), np.float32)
MOMENTUM = optax.sgd(1.0, momentum=0.5)
OF_STATE = sa.average("opt_state")
PACED = sa.paced(sa.model_averaging(4), [1, 9, 9, 9])
FIRST_RESTS = sa.paced(sa.model_averaging(4), [0, 9, 9, 9])


def skip_first_worker(step: jax.Array, workers: int) -> jax.Array:
    return jnp.arange(workers) > 0


def weigh(strategy: sa.Strategy) -> sa.Strategy:
    return sa.participating(strategy, skip_first_worker)


class TrainedWorkers(NamedTuple):
    """What training leaves.

    Attributes:
        replicas: the workers' params, (workers,).
        center: the center's.
        losses: of each step, (steps,).
    """

    replicas: np.ndarray
    center: float
    losses: np.ndarray


def train(
    strategy: sa.Strategy,
    *moves: np.ndarray,
    optimizer: optax.GradientTransformation | None = None,
) -> list[TrainedWorkers]:
    """Trains from one start with each of the moves, (steps, workers) / rate."""
    trainer = sa.DataParallel(
        lambda p, batch: -(p["t"][0] * batch).mean(),
        optimizer or optax.sgd(1.0),
        strategy,
        workers=4,
    )

    def run(moves: np.ndarray) -> TrainedWorkers:
        state, metrics = trainer.run(trainer.init({"t": jnp.zeros(4)}), moves)
        replicas = state.replica.params["t"]
        center = trainer.center(state).params["t"]
        return TrainedWorkers(
            replicas=np.reshape(replicas, (4, -1))[:, 0],
            center=float(center[0]),
            losses=metrics["loss"],
        )

    return [run(worker_moves) for worker_moves in moves]


# Strategies in which worker 0 computes, but takes no part, and its inner optimizer.
WITHOUT_FIRST = {
    "mixed at once": (sa.delayed(weigh(sa.model_averaging(4)), 0, alpha=0.5), None),
    "gradients, delayed": (sa.delayed(weigh(sa.sync_sgd()), 2), None),
    "moving average": (sa.ema(weigh(sa.model_averaging(4)), 0.5), None),
    "moving average inside": (weigh(sa.ema(sa.model_averaging(4), 0.5)), None),
    "moving average of the paced": (sa.ema(FIRST_RESTS, 0.5), None),
    "optimizer at syncs": (
        sa.at_syncs(weigh(sa.model_averaging(2)), OF_STATE),
        MOMENTUM,
    ),
    "in a phase": (
        sa.chain(
            sa.until(weigh(sa.sync_sgd()), 8),
            sa.after(weigh(sa.model_averaging(4)), 8),
        ),
        None,
    ),
}


DEFAULT_CASES = "mixed at once", "gradients, delayed", "moving average"


@pytest.mark.parametrize("name", tiers(WITHOUT_FIRST, default=DEFAULT_CASES))
def test_a_worker_that_takes_no_part_reaches_nothing(name):
    strategy, optimizer = WITHOUT_FIRST[name]
    moves = UNIT_MOVES[:6]
    moves_with_nan = moves.copy()
    moves_with_nan[:, 0] = np.nan
    expected, trained = train(strategy, moves, moves_with_nan, optimizer=optimizer)
    np.testing.assert_array_equal(trained.replicas[1:], expected.replicas[1:])
    assert trained.center == expected.center
    np.testing.assert_array_equal(trained.losses, expected.losses)


UNEVEN = UNIT_MOVES.copy()
UNEVEN[4:, 0] = 1000
UNEQUAL_MOVES = UNIT_MOVES * [1, 2, 3, 4]
LATE_AVERAGE = sa.every(sa.average(), 3)


class Meeting(NamedTuple):
    """A strategy, the workers' moves, and what they leave.

    Attributes:
        strategy: of two combinators.
        moves: the workers' at each step, (steps, workers).
        replicas: the workers' params after them.
        center: the center after them.
    """

    strategy: sa.Strategy
    moves: np.ndarray
    replicas: list[float]
    center: float


MEETINGS = {
    "a pace ends with its phase": Meeting(
        sa.chain(sa.until(PACED, 8), sa.after(sa.sync_sgd(), 8)),
        UNIT_MOVES,
        [14.5] * 4,
        14.5,
    ),
    "a pace begins with its phase": Meeting(
        sa.chain(sa.until(sa.sync_sgd(), 8), sa.after(PACED, 8)),
        UNIT_MOVES[:9],
        [9] * 4,
        9,
    ),
    "a weight ends with its phase": Meeting(
        sa.chain(sa.until(weigh(sa.sync_sgd()), 4), sa.after(sa.model_averaging(4), 4)),
        UNEVEN[:7],
        [3004, 7, 7, 7],
        (3004 + 21) / 4,
    ),
    "gradients under way end with their phase": Meeting(
        sa.chain(sa.until(sa.delayed(sa.sync_sgd(), 2), 8), sa.after(sa.sync_sgd(), 8)),
        UNEQUAL_MOVES[:10],
        [20] * 4,
        20,
    ),
    "what is chained behind a pace stays": Meeting(
        sa.chain(PACED, LATE_AVERAGE),
        UNEQUAL_MOVES[:4],
        [9.25] * 4,
        9.25,
    ),
    "nothing arrives of a round without anybody": Meeting(
        sa.delayed(
            sa.participating(sa.model_averaging(2), lambda step, n: jnp.zeros(n)), 1
        ),
        UNEQUAL_MOVES[:6],
        [6, 12, 18, 24],
        15,
    ),
    "local gradients are not delayed": Meeting(
        sa.delayed(sa.fedprox(16, proximal=1e-30), 2),
        UNEQUAL_MOVES[:3],
        [3, 6, 9, 12],
        7.5,
    ),
}


LATER = "a pace begins with its phase", "what is chained behind a pace stays"


@pytest.mark.parametrize("name", tiers(MEETINGS, {*MEETINGS} - {*LATER}))
def test_two_combinators_that_meet_leave_these_values(name):
    meeting = MEETINGS[name]
    [trained] = train(meeting.strategy, meeting.moves)
    np.testing.assert_allclose(trained.replicas, meeting.replicas, rtol=1e-6)
    np.testing.assert_allclose(trained.center, meeting.center, rtol=1e-6)


def test_losses_count_all_workers_behind_a_phase_of_weights():
    """After four steps all are at 4; worker 0 has a loss of -4000, the others of -4."""
    strategy = MEETINGS["a weight ends with its phase"].strategy
    [trained] = train(strategy, UNEVEN[:5])
    np.testing.assert_allclose(trained.losses, [0, -1, -2, -3, -1003], rtol=1e-6)


def test_a_worker_that_rests_keeps_what_came_behind_its_sync():
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
    moves = np.zeros((32, 4), np.float32)
    moves[0] = range(4)
    turns = sa.every(TURNS[name], 4)
    late = sa.delayed(sa.every(sa.chain(TURNS[name], OF_STATE), 4), 1)
    for strategy in (turns, late):
        [trained] = train(strategy, moves)
        np.testing.assert_array_equal(trained.replicas, [1.5] * 4)


def test_a_local_method_behind_a_phase_sends_no_losses():
    trainer = sa.DataParallel(
        lambda p, batch: (p - batch).mean() ** 2,
        optax.sgd(0.1),
        sa.decided(sa.after(sa.model_averaging(3), 6), lambda r, s, step: step > 5),
        workers=4,
    )
    assert not trainer.run(trainer.init(jnp.float32(0)), UNIT_MOVES[:6])[1][
        "decided"
    ].any()
