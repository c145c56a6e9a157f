"""Displacements that the harness measures, against NumPy."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import initial_params, loss
from recurrences import LR, MOMENTUM, START, STEPS, TARGET, X

import syncalgos
from experiments.training.rounds import figures, measured
from syncalgos import (
    bmuf,
    communication,
    model_averaging,
    reduce_with,
)
from syncalgos.combinators import introspection

pytestmark = pytest.mark.usefixtures("float64")

WORKERS = 4
AT = (2, 4, 6, 8, 10, 12, 14)  # evaluations: at rounds' ends and within rounds
ROUNDING = 1e-6  # of what is kept, which is float32
NAMES = ("pseudo_gradient", "displacement_cosine", "drift")


def train(strategy, at=AT, workers=WORKERS, backend="vmap", **given):
    """Trains on X and TARGET; returns the last state and the figures at `at`."""
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(given.get("loss", loss)),
        given.get("optimizer", optax.sgd(LR, momentum=MOMENTUM)),
        strategy,
        workers=workers,
        backend=backend,
        tables=given.get("sharded"),
    )
    batches = given.get("batches", (X, TARGET))
    state = trainer.init(given.get("params", initial_params()))
    seen = []
    for start, stop in itertools.pairwise((0, *at)):
        state, _ = trainer.run(state, tuple(x[start:stop] for x in batches))
        seen.append(figures(state))
    return state, np.array([[each[name] for name in NAMES] for each in seen])


def sync_steps(strategy, workers=WORKERS, params=None):
    """At which steps anything is sent."""
    params = initial_params() if params is None else params
    sent = communication(strategy, params, workers=workers, steps=STEPS)
    return np.diff(sent.per_step, prepend=0) > 0


def compared(strategy, sent, at=AT, **given):
    """The figures, of a run that trained what it trains without being measured."""
    plain, nothing = train(strategy, at, **given)
    state, found = train(measured(strategy, sent, at), at, **given)
    assert np.isnan(nothing).all()
    same(state, plain)
    return found


def of_round(moved, ends):
    """The figures of a round in which workers went so far, and where they came."""
    pairs = [*itertools.combinations(moved, 2)]
    with np.errstate(invalid="ignore"):  # of a worker that stays
        cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    drift = np.sqrt(((ends - ends.mean(0)) ** 2).sum(1).mean())
    cosine = np.mean(cosines) if pairs else np.nan
    return np.linalg.norm(moved.mean(0)), cosine, drift


def literal(module, monkeypatch, settings, syncs):
    """The figures at AT from a paper's recurrence, watched before and after syncs."""
    before, behind = [], [np.array([START] * WORKERS)]
    plain = module.local_steps

    def watched(*arguments, **options):
        for step, theta in plain(*arguments, **options):
            before.append(np.array(theta))
            yield step, theta
            behind.append(np.array(theta))  # as the recurrence left it

    monkeypatch.setattr(module, "local_steps", watched)
    list(module.recurrence(WORKERS, **settings))
    found = []
    for done in AT:
        ended = [step for step in syncs if step < done]
        if not ended:
            found.append((np.nan,) * 3)
            continue
        began, end = behind[ended[-2] + 1 if ended[1:] else 0], before[ended[-1]]
        found.append(of_round(end - began, end))
    return np.array(found)


ALWAYS = range(STEPS)
CASES = [
    ("bmuf", {"period": 3, "nesterov": True}, (2, 5, 8, 11)),
    # Sent one step before it arrives, so that it is part of the next round.
    pytest.param(
        "streaming_diloco",
        {"period": 6, "fragments": 2, "delay": 1},
        (1, 4, 7, 10, 13),
        marks=pytest.mark.slow,
    ),
    pytest.param("sync_sgd", {}, ALWAYS, marks=pytest.mark.slow),
    pytest.param("gossip", {"topology": "ring"}, ALWAYS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "settings", "syncs"), CASES)
def test_figures_are_those_of_a_literal_run_and_training_is_the_same(
    name, settings, syncs, monkeypatch
):
    strategy = syncalgos.ALGORITHMS[name](**settings)
    sent = sync_steps(strategy)
    assert np.flatnonzero(sent).tolist() == list(syncs)
    module = importlib.import_module(f"recurrences.{name}")
    expected = literal(module, monkeypatch, settings, syncs)

    found = compared(strategy, sent, backend="shard_map")  # lanes and devices
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


def same(state, plain):
    """The measured run trained what the plain one did, to the last bits.

    XLA may fuse, and so round, a step in another way where it is compiled with more.
    """
    jax.tree.map(same_array, state.replica, plain.replica)
    jax.tree.map(same_array, state.sync.strategy, plain.sync)


def same_array(x, y):
    x, y = np.asarray(x), np.asarray(y)
    rounds = np.issubdtype(x.dtype, np.floating)
    within = 100 * np.finfo(x.dtype).eps if rounds else 0
    np.testing.assert_allclose(x, y, rtol=within, atol=within, strict=True)


def drift(params, batch):
    """Its gradient is the mean of the batch's rows."""
    return jnp.sum(params["x"] * jnp.mean(batch[0], axis=0))


@functools.cache
def drifting_trainer(workers):
    """The same one for all tests, which takes one round of two steps of 0.5."""
    strategy = model_averaging(2)
    sent = sync_steps(strategy, 2)  # one worker sends nothing, yet its rounds end
    return syncalgos.DataParallel(
        syncalgos.stateless(drift),
        optax.sgd(0.5),
        measured(strategy, sent, (2,)),
        workers=workers,
        backend="vmap",
    )


def drifting(rows, dtype=float):
    """Figures after one round of two steps in which worker i goes along -rows[i]."""
    rows = np.asarray(rows, float)
    trainer = drifting_trainer(len(rows))
    state = trainer.init({"x": jnp.ones(rows.shape[1], dtype)})
    state, _ = trainer.run(state, (np.stack([rows] * 2),))
    found = figures(state)
    return np.array([found[name] for name in NAMES])


DRIFTS = {  # and their cosine
    "orthogonal, of other lengths": (np.diag([3.0, 6.0, 12.0]), 0),
    "opposite": ([[1.0, 2.0], [-1.0, -2.0]], -1),
    "one stays": ([[0.0, 0.0], [3.0, 4.0]], np.nan),
    "one worker": ([[3.0, 4.0]], np.nan),
}


@pytest.mark.parametrize(("rows", "cosine"), DRIFTS.values(), ids=DRIFTS)
def test_figures_of_drifts_by_hand(rows, cosine):
    found, moved = drifting(rows), np.asarray(rows)  # two steps of 0.5
    assert found[1] == pytest.approx(cosine, abs=ROUNDING, nan_ok=True)
    assert not found[1] > 1
    expected = of_round(moved, moved)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_params_that_are_not_finite_give_no_finite_figure():
    assert not np.isfinite(drifting([[np.inf, 1.0], [3.0, 4.0]])).any()


def test_short_floats_are_measured_in_float32():
    # Exact in the params, but not as a sum of squares, 2049, that float16 rounds.
    norm, cosine, _ = drifting(np.full((2, 2049), 1 / 16), jnp.float16)

    assert norm == pytest.approx(np.sqrt(2049) / 16, rel=ROUNDING)
    assert cosine == pytest.approx(1.0, rel=ROUNDING)


def test_nothing_is_measured_where_nothing_is_sent():
    _, found = train(measured(syncalgos.Strategy(), np.zeros(STEPS, bool), AT), (2,))
    assert np.isnan(found).all()


def test_no_round_is_measured_that_no_evaluation_tells_of():
    strategy = bmuf(2)
    counted = communication(strategy, initial_params(), workers=WORKERS, steps=STEPS)
    sent = np.diff(counted.per_step, prepend=0) > 0

    for evaluated, rounds in (((), 0), ((1,), 0), ((5,), 1), ((8, 9, 12), 2)):
        noting = measured(strategy, sent, evaluated)
        acts = [bool(introspection.acts(noting, x)) for x in ALWAYS]
        np.testing.assert_array_equal(acts, sent)
        all_of_it = communication(
            noting, initial_params(), workers=WORKERS, steps=STEPS
        )
        more = all_of_it.bytes_per_worker - counted.bytes_per_worker
        params = 2 * (WORKERS - 1) / WORKERS * START.nbytes
        flags = 3 * 2 * (WORKERS - 1) / WORKERS * 8  # three scalars at most
        assert 4 * params * rounds <= more <= (4 * params + flags) * rounds


@pytest.mark.slow
def test_rows_of_sharded_tables_are_not_measured():
    """The rest of the model does not use the table: its figures are as without it."""
    table = np.random.default_rng(0).normal(size=(2 * WORKERS, 3))
    params = {"rest": initial_params(), "table": table}

    def rest_loss(params, batch):
        rows = syncalgos.lookup(params["table"], jnp.arange(2))
        return loss(params["rest"], batch) + jnp.sum(rows**2)

    strategy = bmuf(4)
    sent = sync_steps(strategy)
    given = {"loss": rest_loss, "params": params, "sharded": {"rest": False}}
    given["sharded"]["table"] = True
    plain, _ = train(strategy, **given)
    state, found = train(measured(strategy, sent, AT), **given)
    _, expected = train(measured(strategy, sent, AT))

    same(state, plain)
    trained = np.reshape(state.replica.params["table"], table.shape)
    assert (trained[:2] != table[:2]).all()
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.slow
def test_all_tables_leave_nothing_to_measure():
    table = {"table": np.ones((WORKERS, 3))}

    def table_loss(params, batch):
        return jnp.sum(syncalgos.lookup(params["table"], jnp.arange(1)) ** 2)

    sent = np.arange(STEPS) % 2 == 1
    strategy = measured(model_averaging(2), sent, (4,))
    given = {"loss": table_loss, "params": table, "sharded": True}
    _, found = train(strategy, (4,), **given)

    assert found[0, 0] == 0
    assert np.isnan(found[0, 1])


@pytest.mark.slow
def test_debugging_nans_finds_none_of_ours():
    strategy = reduce_with("mean")
    with jax.debug_nans(True):
        _, found = train(measured(strategy, sync_steps(strategy), (2,)), (2,))

    assert np.isfinite(found).all()


def test_a_strategy_that_breaks_its_contract_is_refused_as_without_measuring():
    broken = syncalgos.Strategy(sync=lambda replica, state, step: replica)

    with pytest.raises(ValueError, match=r"sync must return \(replica, state\)"):
        train(measured(broken, np.ones(STEPS, bool), AT))
