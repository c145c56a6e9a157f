"""Displacements that the harness measures: which rounds, and how they are read.

The figures themselves are tested with `syncalgos.measured`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos
from experiments.training.config import parse
from experiments.training.prepare import prepare
from experiments.training.rounds import figures, record_displacements
from syncalgos import bmuf, communication, delayed, model_averaging, reduce_with
from syncalgos._combinators import introspection
from syncalgos._combinators.measured import Noted

pytestmark = pytest.mark.usefixtures("float64")

WORKERS = 4
STEPS = 14
RATE = 0.5
EVALUATION_STEPS = (
    2,
    4,
    6,
    8,
    10,
    12,
    14,
)  # evaluations: at rounds' ends and within rounds
ROUNDING = 1e-6  # of what is kept, which is float32
PARAMS = {"x": np.ones(3)}
ROWS = np.random.default_rng(0).normal(size=(STEPS, WORKERS, 3))


def drift(params, rows):
    """A loss whose gradient is the mean of the batch's rows."""
    return jnp.sum(params["x"] * jnp.mean(rows, axis=0))


def train(
    strategy,
    evaluation_steps=EVALUATION_STEPS,
    loss=drift,
    params=PARAMS,
    rows=ROWS,
    **options,
):
    """Returns the last state, and the figures at `evaluation_steps`."""
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss),
        optax.sgd(RATE),
        strategy,
        workers=rows.shape[1],
        **{"backend": "vmap", **options},
    )
    state = trainer.init(params)
    rows_of_figures = []
    for start, stop in itertools.pairwise((0, *evaluation_steps)):
        state, _ = trainer.run(state, rows[start:stop])
        rows_of_figures.append([*figures(state, last_measured(state)).values()])
    return state, np.array(rows_of_figures)


def last_measured(state):
    """Whether each step is that of the last measured round."""
    [step] = {int(x[0].ravel()[0]) for x in measured_nodes(state)} or {-1}
    return np.arange(STEPS) == step


def measured_nodes(state):
    """The notes of `measured` in a strategy's state."""
    nodes = jax.tree.leaves(state.sync, is_leaf=lambda x: isinstance(x, Noted))
    return [node for node in nodes if isinstance(node, Noted)]


def sync_steps(strategy):
    """At which steps anything is sent."""
    communicated = communication(strategy, PARAMS, workers=WORKERS, steps=STEPS)
    return np.diff(communicated.per_step, prepend=0) > 0


def of_round(start, end):
    """The figures of a round, from each worker's params at its start and its end."""
    moved = end - start
    pairs = itertools.combinations(moved, 2)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    spread = np.sqrt(((end - end.mean(0)) ** 2).sum(1).mean())
    return np.linalg.norm(moved.mean(0)), np.mean(cosines), spread


def by_hand(syncs, delay):
    """The figures at evaluations, of means that are sent at `syncs` and arrive late."""
    starts_of_steps = [np.ones((WORKERS, 3))]
    trained = []
    arrivals = {}
    for step, rows in enumerate(ROWS):
        trained.append(starts_of_steps[-1] - RATE * rows)
        if step in syncs:
            arrivals[step + delay] = [trained[-1].mean(0)] * WORKERS
        starts_of_steps.append(np.array(arrivals.get(step, trained[-1])))
    starts = [0, *(step + 1 for step in syncs)]
    rounds = [
        of_round(starts_of_steps[x], trained[y])
        for x, y in zip(starts, syncs, strict=False)
    ]
    figures_by_evaluation = []
    for evaluated_step in EVALUATION_STEPS:
        ended_rounds = sum(step < evaluated_step for step in syncs)
        is_measured = ended_rounds > 0
        figures_by_evaluation.append(
            rounds[ended_rounds - 1] if is_measured else (np.nan,) * 3
        )
    return np.array(figures_by_evaluation)


# A mean that arrives a step after it was sent is part of the next round.
CASES = [
    pytest.param(model_averaging(3), (2, 5, 8, 11), 0, id="now"),
    pytest.param(
        *(delayed(model_averaging(4), 1), (3, 7, 11), 1),
        id="late",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("strategy", "syncs", "delay"), CASES)
def test_figures_are_those_by_hand_and_training_is_the_same(strategy, syncs, delay):
    is_sync = sync_steps(strategy)
    assert np.flatnonzero(is_sync).tolist() == [*syncs]
    placement = {"backend": "shard_map"}  # lanes and devices
    plain, nothing = train(strategy, **placement)
    state, measured_figures = train(
        record_displacements(strategy, is_sync, EVALUATION_STEPS), **placement
    )

    np.testing.assert_allclose(
        measured_figures, by_hand(syncs, delay), ROUNDING, ROUNDING
    )
    assert np.isnan(nothing).all()
    assert_same_training(state, plain)


def assert_same_training(state, plain):
    """The measured run trained what the plain one did, to the last bits.

    XLA may fuse, and so round, a step in another way where it is compiled with more.
    """
    jax.tree.map(same_array, state.replica, plain.replica)
    jax.tree.map(same_array, state.sync.strategy, plain.sync)


def same_array(x, y):
    x = np.asarray(x)
    y = np.asarray(y)
    within = 100 * np.finfo(x.dtype).eps if np.issubdtype(x.dtype, np.floating) else 0
    np.testing.assert_allclose(x, y, rtol=within, atol=within, strict=True)


def drifting(rows, dtype=float):
    """Figures after one round of two steps in which worker i goes along -rows[i]."""
    rows = np.asarray(rows, float)
    strategy = model_averaging(2)
    noting = record_displacements(strategy, sync_steps(strategy), (2,))
    params = {"x": jnp.ones(rows.shape[1], dtype)}
    return train(noting, (2,), params=params, rows=np.stack([rows] * 2))[1][0]


DRIFTS = {  # and their figures
    "opposite": ([[1.0, 2.0], [-1.0, -2.0]], (0, -1, 5**0.5)),
    "one stays": ([[0.0, 0.0], [3.0, 4.0]], (2.5, np.nan, 2.5)),
    "one worker": ([[3.0, 4.0]], (5, np.nan, 0)),
}


@pytest.mark.parametrize(("rows", "expected"), DRIFTS.values(), ids=DRIFTS)
def test_figures_of_drifts_by_hand(rows, expected):
    np.testing.assert_allclose(drifting(rows), expected, ROUNDING, ROUNDING)


def test_params_that_are_not_finite_give_no_finite_figure():
    assert not np.isfinite(drifting([[np.inf, 1.0], [3.0, 4.0]])).any()


@pytest.mark.slow
def test_short_floats_are_measured_in_float32():
    # Exact in the params, but not as a sum of squares, 2049, that float16 rounds.
    norm, cosine, _ = drifting(np.full((2, 2049), 1 / 16), jnp.float16)

    assert norm == pytest.approx(np.sqrt(2049) / 16, rel=ROUNDING)
    assert cosine == pytest.approx(1.0, rel=ROUNDING)


@pytest.mark.slow
def test_figures_of_palsgd_are_found_inside_it():
    strategy = syncalgos.palsgd(2, learning_rate=RATE)
    _, measured_figures = train(
        record_displacements(strategy, sync_steps(strategy), EVALUATION_STEPS), (2,)
    )
    assert np.isfinite(measured_figures).all()


@pytest.mark.slow
def test_a_run_goes_on_where_displacements_cannot_be_measured(capsys):
    words = "--algo async_diloco --period 2 --workers 2 --steps 4 --displacements"
    run = prepare(parse(words.split()))
    assert np.isnan([*figures(run.state, run.rounds.ends).values()]).all()
    assert "displacements are left out: measured: workers" in capsys.readouterr().err


def test_nothing_is_measured_where_nothing_is_sent():
    _, measured_figures = train(
        record_displacements(
            syncalgos.Strategy(), np.zeros(STEPS, bool), EVALUATION_STEPS
        ),
        (2,),
    )
    assert np.isnan(measured_figures).all()


def test_no_round_is_measured_that_no_evaluation_tells_of():
    strategy = bmuf(2)
    counted = communication(strategy, PARAMS, workers=WORKERS, steps=STEPS)
    is_sync = sync_steps(strategy)

    for evaluated, rounds in (((), 0), ((1,), 0), ((5,), 1), ((8, 9, 12), 2)):
        noting = record_displacements(strategy, is_sync, evaluated)
        acts = [bool(introspection.acts(noting, x)) for x in range(STEPS)]
        np.testing.assert_array_equal(acts, is_sync)
        communicated = communication(noting, PARAMS, workers=WORKERS, steps=STEPS)
        extra_bytes = communicated.bytes_per_worker - counted.bytes_per_worker
        params = 2 * (WORKERS - 1) / WORKERS * PARAMS["x"].nbytes
        flags = 3 * 2 * (WORKERS - 1) / WORKERS * 8  # three scalars at most
        assert 4 * params * rounds <= extra_bytes <= (4 * params + flags) * rounds


@pytest.mark.slow
def test_rows_of_sharded_tables_are_not_measured():
    """The rest of the model does not use the table: its figures are as without it."""
    table = np.random.default_rng(0).normal(size=(2 * WORKERS, 3))

    def loss(params, rows):
        read = syncalgos.lookup(params["table"], jnp.arange(2))
        return drift(params["rest"], rows) + jnp.sum(read**2)

    strategy = bmuf(4)
    is_sync = sync_steps(strategy)
    options = {"loss": loss, "params": {"rest": PARAMS, "table": table}}
    options["tables"] = {"rest": False, "table": True}
    plain, _ = train(strategy, **options)
    state, measured_figures = train(
        record_displacements(strategy, is_sync, EVALUATION_STEPS), **options
    )
    _, expected = train(record_displacements(strategy, is_sync, EVALUATION_STEPS))

    assert_same_training(state, plain)
    trained = np.reshape(state.replica.params["table"], table.shape)
    assert (trained[:2] != table[:2]).all()
    np.testing.assert_allclose(measured_figures, expected, rtol=ROUNDING)


@pytest.mark.slow
def test_all_tables_leave_nothing_to_measure():
    table = {"table": np.ones((WORKERS, 3))}

    def table_loss(params, batch):
        return jnp.sum(syncalgos.lookup(params["table"], jnp.arange(1)) ** 2)

    is_sync = np.arange(STEPS) % 2 == 1
    strategy = record_displacements(model_averaging(2), is_sync, (4,))
    _, measured_figures = train(strategy, (4,), table_loss, table, tables=True)

    assert measured_figures[0, 0] == 0
    assert np.isnan(measured_figures[0, 1])


@pytest.mark.slow
def test_debugging_nans_finds_none_of_ours():
    strategy = reduce_with("mean")
    with jax.debug_nans(True):
        _, measured_figures = train(
            record_displacements(strategy, sync_steps(strategy), (2,)), (2,)
        )

    assert np.isfinite(measured_figures).all()


def test_a_strategy_that_breaks_its_contract_is_refused_as_without_measuring():
    broken = syncalgos.Strategy(sync=lambda replica, state, step: replica)

    with pytest.raises(ValueError, match=r"sync must return \(replica, state\)"):
        train(record_displacements(broken, np.ones(STEPS, bool), EVALUATION_STEPS))
