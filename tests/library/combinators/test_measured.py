"""Moves that `measured` finds between syncs, against NumPy by hand."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa

WORKERS = 4
PERIOD = 2
STEPS = 6
RATE = 0.1
START = {
    "blocks": np.arange(12.0).reshape(2, 3, 2) / 7,  # two layers
    "scale": np.float64(0.5),
    "w": np.ones((2, 2)),
}
LAYERED = {"blocks": 1, "scale": 0, "w": 0}
DRIFTS = {  # each worker's gradient at each step
    name: np.random.default_rng(i).normal(size=(STEPS, WORKERS, *np.shape(x)))
    for i, (name, x) in enumerate(START.items())
}
PARTS = {  # the entries of each part
    "all": [(name, ...) for name in START],
    "blocks[0]": [("blocks", 0)],
    "blocks[1]": [("blocks", 1)],
    "scale": [("scale", ...)],
    "w": [("w", ...)],
}

pytestmark = pytest.mark.usefixtures("float64")


# Leaves with the workers in front.
Arrays = dict[str, np.ndarray]
# (a leaf at a round's start, at its end) -> the leaf at the start of the next round.
SyncByHand = Callable[[np.ndarray, np.ndarray], np.ndarray]


def take_vectors(arrays: Arrays, part: str) -> np.ndarray:
    """The workers' vectors of a part, (workers, entries)."""
    vectors = []
    for name, layer in PARTS[part]:
        leaf = arrays[name] if layer == ... else arrays[name][:, layer]
        vectors.append(leaf.reshape(WORKERS, -1))
    return np.concatenate(vectors, axis=1)


def compute_figures(start: np.ndarray, end: np.ndarray, synced: np.ndarray) -> list:
    """The four figures of a round; its arguments are (workers, entries)."""
    moves = end - start
    distances = ((end - end.mean(0)) ** 2).sum(1)
    cosines = [
        a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in itertools.combinations(moves, 2)
    ]
    return [
        np.linalg.norm(moves.mean(0)),
        np.sqrt(distances.mean()),
        np.mean(cosines),
        np.linalg.norm((synced - start).mean(0)),
    ]


def compute_all_figures(sync: SyncByHand) -> np.ndarray:
    """The figures of all rounds, (rounds, 4, parts)."""
    start = {k: np.array([x] * WORKERS) for k, x in START.items()}
    figures_by_round = []
    for step in range(0, STEPS, PERIOD):
        drift = {k: x[step : step + PERIOD].sum(0) for k, x in DRIFTS.items()}
        end = {k: start[k] - RATE * drift[k] for k in START}
        synced = {k: sync(start[k], end[k]) for k in START}
        figures_by_part = [
            compute_figures(
                take_vectors(start, part),
                take_vectors(end, part),
                take_vectors(synced, part),
            )
            for part in PARTS
        ]
        figures_by_round.append(np.transpose(figures_by_part))
        start = synced
    return np.array(figures_by_round)


def average_models(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    return np.array([end.mean(0)] * WORKERS)


def step_half_way(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """DiLoCo with plain SGD at 0.5: all workers start at one anchor."""
    return np.array([(start + 0.5 * (end - start)).mean(0)] * WORKERS)


# A strategy, and its sync by hand.
STRATEGIES = {
    "model_averaging": (sa.model_averaging(PERIOD), average_models),
    "diloco": (sa.diloco(PERIOD, outer_lr=0.5, outer_momentum=0.0), step_half_way),
}


def loss(params: Any, batch: Any) -> Any:
    """A loss whose gradient is the batch."""
    products = jax.tree.map(lambda p, b: jnp.sum(p * b.mean(0)), params, batch)
    return sum(jax.tree.leaves(products))


def assert_near(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("model_averaging", None),
        pytest.param("diloco", "sequential", marks=pytest.mark.slow),
        pytest.param("diloco", "vectorized", marks=pytest.mark.slow),
    ],
)
def test_metrics_of_a_run_are_the_figures_by_hand(name, form):
    strategy, sync_by_hand = STRATEGIES[name]
    placement = sa.Placement(lanes=2, lane_form=form) if form else sa.Placement()
    trainer = sa.DataParallel(
        loss,
        optax.sgd(RATE),
        sa.measured(strategy, layered=LAYERED),
        workers=WORKERS,
        placement=placement,
    )
    state, metrics = trainer.run(trainer.init(START), DRIFTS)
    expected = compute_all_figures(sync_by_hand)
    figures = np.stack(metrics["measured"], 1)  # (steps, 4, parts)
    assert_near(figures[PERIOD - 1 :: PERIOD], expected)
    assert not figures[::PERIOD].any()  # between syncs
    assert_near(np.stack(state.sync.figures, 0)[..., 0, 0, :], expected[-1])


def test_parts_are_named_by_leaf_and_layer():
    assert sa.parts_of(START, LAYERED) == [*PARTS]


@pytest.mark.slow
@pytest.mark.parametrize("by_leaf", [True, False])
def test_figures_in_stacked_and_in_a_loop_of_ones_own(by_leaf):
    expected = compute_all_figures(average_models)
    if not by_leaf:
        expected = expected[:, :, :1]
    strategy = sa.measured(
        sa.model_averaging(PERIOD, axis="w"), layered=LAYERED, by_leaf=by_leaf
    )
    stacked = sa.stacked(strategy)
    start = jax.tree.map(lambda x: jnp.array([x] * WORKERS), START)
    for make, sync in (
        (stacked.init, stacked.sync),
        (
            jax.vmap(strategy.init, axis_name="w"),
            jax.vmap(strategy.sync, in_axes=(0, 0, None), axis_name="w"),
        ),
    ):
        replica = sa.Replica(start)
        state = make(start)
        for step in range(STEPS):
            params = {k: x - RATE * DRIFTS[k][step] for k, x in replica.params.items()}
            replica, state = sync(sa.Replica(params), state, step)
            if (step + 1) % PERIOD == 0:
                for row in np.stack(state.figures, 1):  # all workers have the same
                    assert_near(row, expected[step // PERIOD])


@pytest.mark.slow
def test_a_strategy_that_reduces_gradients_is_measured_at_every_step():
    trainer = sa.DataParallel(
        loss, optax.sgd(RATE), sa.measured(sa.sync_sgd()), workers=WORKERS
    )
    _, metrics = trainer.run(trainer.init(START), DRIFTS)
    figures = metrics["measured"]
    assert_near(figures.cosine, 1)
    assert_near(figures.spread, 0)
    assert_near(figures.outer_step[:, 1:], figures.mean_move[:, 1:])
    means = np.linalg.norm(DRIFTS["w"].mean(1).reshape(STEPS, -1), axis=1)
    assert_near(figures.mean_move[:, -1], RATE * means)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            sa.paced(sa.model_averaging(PERIOD), [2, 2, 1, 0]),
            id="paced",
        ),
        pytest.param(
            sa.ema(sa.paced(sa.model_averaging(PERIOD), [2, 2, 1, 0]), 0.5),
            id="ema",
        ),
        pytest.param(
            sa.palsgd(PERIOD, learning_rate=RATE, outer_lr=1.0, outer_momentum=0.0),
            id="palsgd",
        ),
    ],
)
def test_a_move_is_what_the_strategy_makes_of_local_steps(strategy):
    """All workers go to their mean: the mean move is the outer step."""

    def ends(step: jax.Array) -> jax.Array:
        return (step + 1) % PERIOD == 0

    for measured in (sa.measured(strategy, ends=ends), sa.measured(strategy)):
        trainer = sa.DataParallel(loss, optax.sgd(RATE), measured, workers=WORKERS)
        _, metrics = trainer.run(trainer.init(START), DRIFTS)
        figures = metrics["measured"]
        assert (figures.mean_move[PERIOD - 1 :: PERIOD, 0] > 0.01).all()
        assert_near(figures.mean_move, figures.outer_step)


def test_a_cosine_that_is_undefined_is_marked():
    """A part that does not move has no cosine; the others and the whole have."""
    trainer = sa.DataParallel(
        lambda p, b: loss({"w": p["w"]}, {"w": b["w"]}) + 0 * p["scale"],
        optax.sgd(RATE),
        sa.measured(sa.model_averaging(PERIOD)),
        workers=WORKERS,
    )
    state = trainer.init(START)
    assert (np.asarray(state.sync.noted.values) == -2).all()
    _, metrics = trainer.run(state, DRIFTS)
    cosine = metrics["measured"].cosine[PERIOD - 1]
    assert cosine[1:3].tolist() == [-2, -2] and cosine[0] == pytest.approx(cosine[3])
    alone = sa.DataParallel(
        loss, optax.sgd(RATE), sa.measured(sa.model_averaging(PERIOD)), workers=1
    )
    _, metrics = alone.run(alone.init(START), DRIFTS)
    assert set(np.ravel(metrics["measured"].cosine[PERIOD - 1])) == {-2}


def test_a_tree_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="layered must be a tree like params"):
        sa.measured(sa.bmuf(2), layered={"v": 1}).init(START)
    with pytest.raises(ValueError, match="measured: expected a Strategy"):
        sa.measured(optax.sgd(0.1))


def test_a_member_that_changes_the_local_step_is_refused():
    paced = sa.paced(sa.model_averaging(PERIOD), [2, 2, 1, 0])
    with pytest.raises(ValueError, match="measured: a member is paced or palsgd"):
        sa.measured(sa.chain(paced, sa.every(sa.average("opt_state"), PERIOD)))
    with pytest.raises(ValueError, match="measured: workers that rest"):
        sa.measured(sa.chain(sa.async_diloco(PERIOD), sa.reset(optax.sgd(RATE))))


def test_metrics_take_the_figures_of_one_strategy():
    def measure_leaf(name: str) -> sa.Strategy:
        mask = dict.fromkeys(START, False) | {name: True}
        return sa.masked(sa.measured(sa.average()), mask)

    strategy = sa.chain(measure_leaf("scale"), measure_leaf("w"))
    trainer = sa.DataParallel(loss, optax.sgd(RATE), strategy, workers=WORKERS)
    state = trainer.init(START)
    with pytest.raises(ValueError, match="measured: metrics hold one strategy's"):
        trainer.run(state, DRIFTS)


def test_short_floats_of_palsgd_are_measured_as_it_holds_them():
    strategy = sa.palsgd(PERIOD, learning_rate=RATE)
    params = np.ones(3, "f2")
    measured = sa.measured(strategy, by_leaf=False)
    counts = sa.communication(strategy, params, workers=2, steps=PERIOD)
    measured_counts = sa.communication(measured, params, workers=2, steps=PERIOD)
    assert measured_counts.bytes_per_worker > 4 * counts.bytes_per_worker


def measure_round(strategy: sa.Strategy, moves: np.ndarray) -> sa.Figures:
    """The figures of a round of two steps; each worker moves by its row in each."""
    trainer = sa.DataParallel(
        lambda params, batch: -jnp.sum(params * batch[0]),
        optax.sgd(1.0),
        sa.measured(strategy, by_leaf=False),
        workers=len(moves),
        backend="vmap",
    )
    _, metrics = trainer.run(trainer.init(np.zeros(2)), np.stack([moves, moves]))
    return sa.Figures(*[float(figure[1, 0]) for figure in metrics["measured"]])


WEIGHTS = {  # of the workers that move by these rows; the last one is away
    "of equal weight": np.array([1.0, 1, 1, 0]),
    "of other weights": np.array([3.0, 1, 2, 0]),
}
MOVES = np.array([[3.0, 0], [0, 4], [1, 1]])
AWAY = {"far": [1000.0, 1000], "still": [0.0, 0], "lost": [np.nan, 1]}


@pytest.mark.parametrize("away", tiers([*AWAY], ["lost"]))
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_worker_of_weight_0_is_in_no_figure(name, away):
    weights = WEIGHTS[name]
    strategy = sa.participating(sa.model_averaging(2), lambda step, n: weights)
    figures = measure_round(strategy, np.array([*MOVES, AWAY[away]]))
    moves = 2 * MOVES
    shares = weights[:3] / weights.sum()
    mean = shares @ moves
    distances = np.sum((moves - mean) ** 2, axis=1)
    directions = moves / np.linalg.norm(moves, axis=1, keepdims=True)
    cosines = [a @ b for a, b in itertools.combinations(directions, 2)]
    assert_near(figures.mean_move, np.linalg.norm(mean))
    assert_near(figures.spread, np.sqrt(shares @ distances))
    assert_near(figures.cosine, np.mean(cosines))
    assert_near(figures.outer_step, np.linalg.norm(mean))


@pytest.mark.parametrize(
    ("moves", "weights"),
    [
        pytest.param([[1.0, 0], [0, 1], [0, 0]], [1.0, 1, 1], id="one stays"),
        pytest.param([[1.0, 0], [0, 1], [1, 1]], [1.0, 0, 0], id="one takes part"),
    ],
)
def test_no_cosine_is_made_up_where_there_is_none(moves, weights):
    strategy = sa.participating(
        sa.model_averaging(2), lambda step, n: jnp.array(weights)
    )
    assert measure_round(strategy, np.array(moves)).cosine == -2
    if all(weights):
        assert measure_round(sa.model_averaging(2), np.array(moves)).cosine == -2
