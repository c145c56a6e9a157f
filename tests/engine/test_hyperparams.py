"""Hyperparameters as data: one program for all values, and for many at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems.linear import BATCHES, DATA, ROWS, make_params, plain_loss

import syncalgos as sa
from syncalgos.engine.placement.make_layout import BACKENDS

FIRST, SECOND = {"lr": 0.1, "mu": 0.5}, {"lr": 0.03, "mu": 0.8}
FORMS = ["vectorized", "sequential"]


def sgd(numbers):
    return optax.sgd(numbers["lr"], momentum=0.9)


def bmuf(numbers):
    return sa.bmuf(2, block_momentum=numbers["mu"])


def trainer_of(optimizer=sgd, strategy=bmuf, numbers=FIRST, loss=plain_loss, **rest):
    return sa.DataParallel(
        loss, optimizer, strategy, workers=4, hyperparams=numbers, **rest
    )


def constant(numbers, **rest):
    return sa.DataParallel(plain_loss, sgd(numbers), bmuf(numbers), workers=4, **rest)


def results(trainer, state):
    """The center, and the metrics of training and evaluation."""
    state, metrics = trainer.run(state, BATCHES)
    evaluated = trainer.evaluate(state, BATCHES)
    found = trainer.center(state).params, metrics, evaluated
    return jax.tree.map(np.asarray, found)


def assert_close(found, expected):
    # Constants are folded in double precision, data is not.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        found,
        expected,
    )


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_record_compiles_nothing_and_trains_as_a_constant_does(backend):
    trainer = trainer_of(backend=backend)
    assert_close(
        results(trainer, trainer.init(make_params())),
        results(own := constant(FIRST, backend=backend), own.init(make_params())),
    )
    before = trainer.compile_seconds
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    assert trainer.compile_seconds == before
    own = constant(SECOND, backend=backend)
    assert_close(found, results(own, own.init(make_params())))


@pytest.mark.parametrize("form", ["sequential", "merged"])
def test_every_lane_form_takes_them(form):
    strategy = bmuf if form == "sequential" else lambda numbers: sa.sync_sgd()
    where = sa.Placement(devices=[0], lane_form=form)
    trainer = trainer_of(strategy=strategy, placement=where)
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    own = sa.DataParallel(
        plain_loss, sgd(SECOND), strategy(SECOND), workers=4, placement=where
    )
    assert trainer.lane_form == own.lane_form or own.lane_form is None
    assert_close(found, results(own, own.init(make_params())))


def test_a_state_from_the_host_has_its_own_and_compiles_nothing():
    trainer = trainer_of()
    state, _ = trainer.run(trainer.init(make_params(), hyperparams=SECOND), BATCHES)
    held = trainer.to_host(state)
    assert held.hyperparams["lr"] == np.float32(0.03)
    state, _ = trainer.run(state, BATCHES)
    before = trainer.compile_seconds
    again, _ = trainer.run(trainer.from_host(held), BATCHES)
    assert trainer.compile_seconds == before
    assert_equal(trainer.to_host(again).replica, trainer.to_host(state).replica)


def test_others_may_take_their_place_in_the_middle():
    trainer = trainer_of()
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    before = trainer.compile_seconds
    _, metrics = trainer.run(state._replace(hyperparams=SECOND), BATCHES)
    assert trainer.compile_seconds == before
    first, second = constant(FIRST), constant(SECOND)
    half, _ = first.run(first.init(make_params()), BATCHES)
    expected = second.run(second.from_host(first.to_host(half)), BATCHES)[1]
    assert_close(metrics["loss"], expected["loss"])


@pytest.mark.parametrize("settings", [None, 2])
def test_bfloat16_params_keep_their_dtype(settings):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
    trainer = trainer_of(optimizer=lambda numbers: optax.adam(numbers["lr"]))
    given = FIRST if settings is None else {"lr": np.array([0.1, 0.2]), "mu": 0.5}
    state, _ = trainer.run(trainer.init(params, hyperparams=given), BATCHES)
    assert {x.dtype for x in jax.tree.leaves(state.replica.params)} == {
        params["w"].dtype
    }


def test_what_is_sent_follows_them():
    def from_there(numbers):
        return sa.when(sa.average(), lambda step: step > numbers["from"])

    trainer = trainer_of(strategy=from_there, numbers={"lr": 0.1, "from": 3.0})
    for first in (3.0, 7.0):
        state = trainer.init(make_params(), hyperparams={"lr": 0.1, "from": first})
        assert trainer.communication(state, 12).syncs == 11 - first


def test_rounds_that_follow_the_learning_rate_are_counted_at_each():
    def qsr(numbers):
        return sa.qsr(2, growth=0.2, learning_rate=numbers["lr"])

    trainer = trainer_of(strategy=qsr, numbers={"lr": 0.1})
    for lr in (0.1, 0.05):
        state = trainer.init(make_params(), hyperparams={"lr": lr})
        sent = trainer.communication(state, 64)
        alone = sa.communication(qsr({"lr": lr}), make_params(), workers=4, steps=64)
        assert sent.syncs == 64 * lr**2 / 0.2**2
        np.testing.assert_array_equal(sent.per_step, alone.per_step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"numbers": {"lr": "0.1", "mu": 0.5}},
            r"hyperparams\['lr'\] must be a number",
        ),
        ({"numbers": {"lr": 0.1, "mu": True}}, r"hyperparams\['mu'\] must be a number"),
        (
            {"numbers": {"lr": 0.1, "mu": 1.0}},
            "block_momentum must be .* below 1, got 1.0",
        ),
        ({"numbers": None}, "expected a Strategy, got <function bmuf"),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**change)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"lr": 0.1}, r"hyperparams\['mu'\] is missing"),
        ({"lr": 0.1, "mu": 0.5, "b": 1}, r"hyperparams\['b'\] is unexpected"),
        ({"lr": 0.1, "mu": -0.5}, "block_momentum must be .* got -0.5"),
        ({"lr": np.ones(2), "mu": np.ones(3)}, r"vectors of lengths \[2, 3\]"),
        ({"lr": np.ones((2, 2)), "mu": 0.5}, r"hyperparams\['lr'\] must be a number"),
    ],
)
def test_records_unlike_the_trainers_are_refused_before_compilation(numbers, message):
    trainer = trainer_of()
    with pytest.raises(ValueError, match=message):
        trainer.init(make_params(), hyperparams=numbers)
    assert trainer.compile_seconds == 0


def test_a_period_is_no_hyperparameter():
    trainer = trainer_of(
        strategy=lambda numbers: sa.bmuf(numbers["mu"]), numbers={"lr": 0.1, "mu": 2}
    )
    with pytest.raises(ValueError, match=r"period must be a Python number"):
        trainer.init(make_params())


# Many at once.

GRID = {"lr": np.array([0.1, 0.03, 0.3]), "mu": np.array([0.5, 0.8, 0.0])}


def alone(trainer):
    """The results of each setting of the grid by itself, stacked."""
    each = [{k: x[i] for k, x in GRID.items()} for i in range(3)]
    found = [results(trainer, trainer.init(make_params(), hyperparams=x)) for x in each]
    return jax.tree.map(lambda *x: np.stack(x), *found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grid_trains_in_one_call_as_each_setting_does_alone(backend, form):
    trainer = trainer_of(backend=backend, placement=sa.Placement(setting_form=form))
    state = trainer.init(make_params(), hyperparams=GRID)
    assert state.settings == 3
    found = results(trainer, state)
    assert found[1]["loss"].shape == (3, 12)
    assert_close(found, alone(trainer))


@pytest.mark.parametrize("form", FORMS)
def test_a_setting_goes_on_alone(form):
    trainer = trainer_of(placement=sa.Placement(setting_form=form))
    state, _ = trainer.run(trainer.init(make_params(), hyperparams=GRID), BATCHES)
    one, metrics = trainer.run(state.setting(1), BATCHES)
    state, of_all = trainer.run(state, BATCHES)
    assert_close(metrics["loss"], of_all["loss"][1])
    assert (int(one.step), int(state.step), one.settings) == (24, 24, 0)


@pytest.mark.parametrize("form", FORMS)
def test_seeds_have_their_own_models_keys_and_rows(form):
    def noisy(params, buffers, batch, key):
        noise = jax.random.normal(key)
        return plain_loss(params, batch) + noise, (buffers, {"noise": noise})

    trainer = trainer_of(loss=noisy, placement=sa.Placement(setting_form=form))
    data = trainer.place(DATA)
    models = [jax.tree.map(lambda x, k=k: x * k, make_params()) for k in (1, 2)]
    rows = np.stack([ROWS, ROWS[::-1]])
    states = [trainer.init(model, seed=seed) for seed, model in enumerate(models)]
    copies = [trainer.init(model, seed=seed) for seed, model in enumerate(models)]
    state, metrics = trainer.run(trainer.stack(states), rows, data)
    for i, copy in enumerate(copies):
        one, own = trainer.run(copy, rows[i], data)
        assert_close(jax.tree.map(lambda x, i=i: x[i], metrics), own)
        center = jax.tree.map(lambda x, i=i: x[i], trainer.center(state).params)
        assert_close(center, trainer.center(one).params)
    with pytest.raises(ValueError, match="batches hold 3 settings, but state has 2"):
        trainer.run(state, np.stack([ROWS] * 3), data)


def test_states_that_are_no_settings_of_one_training_are_refused():
    trainer = trainer_of()
    first, second = trainer.init(make_params()), trainer.init(make_params())
    second, _ = trainer.run(second, BATCHES)
    with pytest.raises(ValueError, match="have the same number of local steps"):
        trainer.stack([first, second])
    with pytest.raises(ValueError, match="stack: states must hold at least one"):
        trainer.stack([])
    state = trainer.init(make_params(), hyperparams=GRID)
    calls = trainer.to_host, trainer.divergence, lambda x: trainer.communication(x, 4)
    for call in calls:
        with pytest.raises(ValueError, match=r"state\.setting\(i\)"):
            call(state)
    with pytest.raises(ValueError, match="has a single setting"):
        first.setting(0)


def test_workers_that_are_meshes_train_one_setting_after_the_other():
    where = sa.Placement(mesh={"fsdp": 2}, lanes=4)
    trainer = trainer_of(placement=where)
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    own = constant(SECOND)
    assert_close(found, results(own, own.init(make_params())))
    with pytest.raises(ValueError, match="one setting after the other"):
        trainer.init(make_params(), hyperparams=GRID)
