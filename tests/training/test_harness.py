"""The harness's parts: batches, schedules, evaluation, effective learning rates."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos
from experiments.cli import factories
from experiments.pipeline import sampler
from experiments.tasks.digits import digits as digits_task
from experiments.tasks.task import held_out, losses
from experiments.training import optimizers, records
from experiments.training.config import parse
from experiments.training.defaults import nearest_multiple
from experiments.training.loop import dispatches, first_diverged, remaining
from experiments.training.measurements.effective_lr import effective_lr
from experiments.training.run import prepare
from syncalgos import Strategy, collectives, every, outer_step

PARAMS = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(20, np.float32)}


def test_results_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    done, sync, rename = [], os.fsync, os.replace

    def watched_sync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def watched_rename(*paths):
        done.append("renamed")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_rename)
    path = tmp_path / "summary.json"
    records.write_json(path, {"steps": 4})
    assert done == [path.stat().st_ino, "renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize(("batch", "examples"), [(8, 24), (7, 24), (24, 24), (5, 7)])
def test_each_epoch_takes_every_example_once(batch, examples):
    steps = 3 * examples
    flat = sampler.rows(1, 0, steps, batch, examples).reshape(-1)
    epochs = flat[: len(flat) // examples * examples].reshape(-1, examples)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(examples))
    assert len({tuple(epoch) for epoch in epochs[:20]}) > 1  # a fresh order each


def test_stream_is_a_function_of_seed_and_step_alone():
    whole = sampler.rows(3, 0, 100, 10, 37)
    assert whole.shape == (100, 10)
    for first, steps in [(0, 1), (3, 1), (3, 50), (99, 1), (37, 63)]:
        part = sampler.rows(3, first, steps, 10, 37)
        np.testing.assert_array_equal(part, whole[first : first + steps])
    assert (sampler.rows(4, 0, 100, 10, 37) != whole).any()


def test_stream_of_another_worker_count_is_the_same():
    """The batch is cut, not drawn, by workers: rows know nothing of them."""
    task = digits_task()
    digits = task.load()
    params, buffers = task.init(jax.random.key(0))
    data_seen = []
    for workers in (1, 4):
        trainer = syncalgos.DataParallel(
            losses(task)[0], optax.sgd(0.1), syncalgos.sync_sgd(), workers, "vmap"
        )
        state = trainer.init(params, buffers)
        rows = sampler.rows(0, 0, 5, 16, len(digits.train["y"]))
        _, metrics = trainer.run(state, rows, trainer.place(digits.train))
        data_seen.append(np.asarray(metrics["loss"]))
    np.testing.assert_allclose(*data_seen, rtol=1e-5)  # rounding of the mean


@pytest.mark.parametrize("workers", [1, 3, 7, 8, 64])
@pytest.mark.parametrize("batch", [1024, 50])
def test_every_held_out_example_counts_once(workers, batch):
    values = np.arange(360.0, dtype=np.float32)
    data, rows = held_out({"v": values}, workers, batch)
    assert rows.shape[1] % workers == 0
    weighted = data["weight"][rows] * data["v"][rows]
    assert np.mean(weighted, dtype=np.float64) == pytest.approx(values.mean(), rel=1e-6)
    np.testing.assert_array_equal(np.sort(rows[rows < 360]), np.arange(360))


def test_evaluation_does_not_depend_on_the_workers():
    task = digits_task()
    digits = task.load()
    params, buffers = task.init(jax.random.key(0))
    logits_loss, _ = task.apply(params, buffers, digits.test, None, train=False)
    expected = {name: float(np.mean(x)) for name, x in logits_loss.items()}
    for workers in (1, 7, 64):
        trainer = syncalgos.DataParallel(
            losses(task)[0],
            optax.sgd(0.1),
            syncalgos.sync_sgd(),
            workers,
            "vmap",
            eval_loss=losses(task)[1],
        )
        data, rows = held_out(digits.test, workers)
        state = trainer.init(params, buffers)
        metrics = trainer.evaluate(state, rows, trainer.place(data))
        means = {name: float(np.mean(x)) for name, x in metrics.items()}
        assert means == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("steps", "every_", "most"), [(960, 96, 96), (100, 30, 7), (5, 5, 100), (10, 3, 1)]
)
def test_dispatches_end_at_evaluations_and_cover_all_steps(steps, every_, most):
    parts = list(dispatches([*range(every_, steps, every_), steps], most))
    ends = [done + n for done, n in parts]
    assert [done for done, _ in parts] == [0, *ends[:-1]]
    assert ends[-1] == steps
    assert set(range(every_, steps, every_)) <= set(ends)
    lengths = {n for _, n in parts}
    assert min(lengths) >= 1 and max(lengths) <= most
    assert len(lengths) <= 4  # each is compiled anew


@pytest.mark.parametrize("step", [0, 20, 25, 30, 99])
def test_a_run_that_goes_on_takes_the_dispatches_that_are_left(step):
    whole = list(dispatches([30, 60, 100], 12))
    left = list(remaining(iter(whole), step))

    assert left[0][0] == step
    assert left[1:] == [part for part in whole if part[0] > step]
    assert sum(steps for _, steps in left) == 100 - step


def test_first_diverged_loss_is_found():
    assert first_diverged(np.array([1.0, 999, 1000]), 1.0) is None
    assert first_diverged(np.array([1.0, 1000.5, np.nan]), 1.0) == 1
    assert first_diverged(np.array([1.0, np.nan, 2000]), 1.0) == 1
    assert first_diverged(np.array([np.inf]), np.inf) == 0


def test_a_first_loss_of_nothing_sets_no_limit():
    """As of a margin loss, whose first batch may lie beyond the margin."""
    losses = np.array([0.0, 0.156, 2.5, 99.0])
    assert first_diverged(losses, 0.0) is None
    assert first_diverged(losses, 1e-4) is None
    assert first_diverged(np.array([0.0, 101.0]), 0.0) == 1
    assert first_diverged(np.array([0.0, np.nan]), 0.0) == 1


@pytest.mark.parametrize(
    ("n", "of", "expected"),
    [(64, 8, 64), (64, 7, 63), (64, 48, 48), (64, 100, 100), (64, 5, 65), (6, 4, 4)],
)
def test_nearest_multiple(n, of, expected):
    assert nearest_multiple(n, of) == expected


def rates(*arguments, steps):
    made = optimizers.schedule(*arguments)
    return [float(made(t)) if callable(made) else made for t in range(steps)]


def test_schedules():
    assert optimizers.schedule("constant", 0.1, 10, 0) == 0.1
    np.testing.assert_allclose(
        rates("constant", 0.4, 8, 4, steps=8), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]
    )
    np.testing.assert_allclose(
        rates("step", 1.0, 8, 0, steps=8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], 1e-5
    )
    np.testing.assert_allclose(
        rates("step", 1.0, 8, 2, steps=8), [0.5, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], 1e-5
    )
    assert rates("step", 0.1, 1, 0, steps=1) == pytest.approx([0.1])
    assert rates("step", 1.0, 2, 0, steps=2) == pytest.approx([1.0, 0.1])
    cosine = [0.5 * (1 + np.cos(np.pi * t / 8)) for t in range(8)]
    np.testing.assert_allclose(rates("cosine", 1.0, 8, 0, steps=8), cosine, 1e-5)
    np.testing.assert_allclose(
        rates("cosine", 1.0, 10, 2, steps=10), [0.5, 1.0, *cosine], 1e-5
    )


@pytest.mark.parametrize("name", ["sm3", "rprop"])
def test_optimizer_that_takes_no_schedule_is_refused(name):
    decaying = optimizers.schedule("cosine", 0.1, 10, 0)
    with pytest.raises(ValueError, match=f"{name} does not take a schedule"):
        optimizers.make(name, decaying, None, None, None)


def one_step(optimizer, params, grads):
    told = optax.with_extra_args_support(optimizer)
    updates, _ = told.update(grads, told.init(params), params, value=1.0)
    return updates


def test_weight_decay_enters_before_momentum_and_clipping_before_both():
    params, grads = {"w": jnp.full(4, 2.0)}, {"w": jnp.full(4, 3.0)}  # norm 6
    optimizer = optimizers.make("sgd", 0.1, 0.9, 0.5, 1.5)
    state, velocity, w = optimizer.init(params), 0.0, 2.0
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        velocity = 0.9 * velocity + 3.0 * 1.5 / 6 + 0.5 * w
        w -= 0.1 * velocity
        np.testing.assert_allclose(params["w"], np.full(4, w), rtol=1e-6)


def test_weight_decay_goes_to_an_optimizer_that_has_its_own():
    params, grads = {"w": jnp.full(4, 2.0)}, {"w": jnp.full(4, 3.0)}
    ours = one_step(optimizers.make("adamw", 0.1, None, 0.5, None), params, grads)
    theirs = one_step(optax.adamw(0.1, weight_decay=0.5), params, grads)
    np.testing.assert_array_equal(ours["w"], theirs["w"])
    ours = one_step(optimizers.make("adamw", 0.1, None, None, None), params, grads)
    theirs = one_step(optax.adamw(0.1), params, grads)
    np.testing.assert_array_equal(ours["w"], theirs["w"])


@pytest.mark.parametrize("name", ["adam", "adamw", "lion"])
def test_decays_of_moments_go_to_the_optimizer(name):
    params, grads = {"w": jnp.full(4, 2.0)}, {"w": jnp.arange(4.0)}
    made = optimizers.make(name, 0.1, None, None, None, b1=0.5, b2=0.7)
    theirs = getattr(optax, name)(0.1, b1=0.5, b2=0.7)
    own, other = made.init(params), theirs.init(params)
    for _ in range(3):
        updates, own = made.update(grads, own, params)
        expected, other = theirs.update(grads, other, params)
        np.testing.assert_array_equal(updates["w"], expected["w"])


def test_a_decay_that_an_optimizer_lacks_is_refused():
    with pytest.raises(ValueError, match=r"sgd takes no --b2 \(these do: .*adam, "):
        optimizers.make("sgd", 0.1, None, None, None, b2=0.9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lookahead", "optimizer lookahead .*: say --algo lookahead"),
        ("lbfgs", "optimizer lbfgs searches along a line"),
        ("schedule_free_sgd", "optimizer schedule_free_sgd .* evaluates another"),
        ("schedule_fre", "unknown optimizer 'schedule_fre'"),
    ],
)
def test_an_optimizer_that_cannot_be_an_inner_one_says_why(name, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        optimizers.make(name, 0.1, None, None, None)


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # optax retires some
@pytest.mark.parametrize("name", sorted(optimizers.known()))
def test_every_offered_optimizer_takes_a_step(name):
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    optimizer = optimizers.make(name, 0.1, None, None, None)
    updates = one_step(optimizer, params, jax.tree.map(jnp.ones_like, params))
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("strategy", "workers", "times"),
    [
        (syncalgos.sync_sgd(), 8, 1),
        (syncalgos.model_averaging(16), 8, 1),
        (syncalgos.bmuf(16), 8, 8),
        (syncalgos.bmuf(16), 1, 1),
        (syncalgos.bmuf(16), 256, 256),
        (syncalgos.bmuf(10, 0.9, 0.5), 4, 5),
        (syncalgos.bmuf(10, 0.9, 0.5, nesterov=True), 4, 5),
        (syncalgos.diloco(), 8, 7),
        (syncalgos.diloco(period=500), 2, 7),
        (syncalgos.diloco(period=5000), 2, 7),
        (syncalgos.async_diloco(slowest=0.5), 3, 7 * 0.75),
        (syncalgos.dynamic_averaging(bound=1e-3), 3, 1),
        (every(5, outer_step(optax.sgd(0.3))), 2, 0.3),
        (syncalgos.lookahead(8), 2, 0.5),
        (syncalgos.overlap_local_sgd(8), 2, 0.4 / 0.58),
        (syncalgos.overlap_local_sgd(8, anchor_momentum=0), 2, 0.4),
        (syncalgos.co2(8), 2, 1),  # Λ settles at 2
        (syncalgos.co2(8, 0.6, 0.4, penalty=False), 2, 1),
        (syncalgos.muloco(8), 2, 4.5),
        (syncalgos.edit(8), 2, 0.8 / 0.15),
    ],
)
def test_effective_lr_is_the_one_in_closed_form(strategy, workers, times):
    found = effective_lr(strategy, PARAMS, optax.sgd(0.1), workers, 0.02)
    assert found == pytest.approx(0.02 * times, rel=1e-3)


def test_effective_lr_is_that_of_most_entries():
    def reduce(grads, replica, state, step):
        return {"w": grads["w"], "b": 100 * grads["b"]}, state

    params = {"w": np.zeros((30, 33), np.float32), "b": np.zeros(10, np.float32)}
    found = effective_lr(Strategy(reduce=reduce), params, optax.sgd(0.1), 2, 0.02)
    assert found == pytest.approx(0.02 * (990 + 100 * 10) / 1000, rel=1e-3)


def sign_step():
    def reduce(grads, replica, state, step):
        return jax.tree.map(jnp.sign, collectives.mean(grads)), state

    return Strategy(reduce=reduce)


@pytest.mark.parametrize(
    "strategy",
    [
        sign_step(),
        every(4, outer_step(optax.adam(0.1))),  # its step does not grow with gradients
    ],
)
def test_effective_lr_is_none_where_there_is_none(strategy):
    assert effective_lr(strategy, PARAMS, optax.sgd(0.1), 4, 0.02) is None


def test_effective_lr_is_nan_where_movement_never_gets_steady():
    faster_and_faster = every(4, outer_step(optax.sgd(0.1, momentum=1.0)))
    found = effective_lr(faster_and_faster, PARAMS, optax.sgd(0.1), 4, 0.02)
    assert found is not None and np.isnan(found)


def fixed_kinds():
    """A strategy that knows the shapes and dtypes of the params it is for."""

    def init(params):
        return {"sum": jnp.zeros((30, 20), jnp.float32)}

    def sync(replica, state, step):
        mean = collectives.mean(replica.params)
        total = {"sum": state["sum"] + mean["w"] * jax.lax.rem(step, jnp.int32(4))}
        return replica._replace(params=mean), total

    return every(4, Strategy(init=init, sync=sync))


def test_effective_lr_of_a_strategy_that_knows_its_shapes():
    found = effective_lr(fixed_kinds(), PARAMS, optax.sgd(0.1), 4, 0.02)
    assert found == pytest.approx(0.02, rel=1e-3)


def test_help_texts_come_from_the_docstring():
    texts = factories.argument_texts(inspect.getdoc(syncalgos.bmuf) or "")
    assert list(texts) == ["period", "block_momentum", "block_lr", "nesterov", "axis"]
    assert texts["block_lr"] == "ζ, the factor on a block's mean update, above 0."


def test_parameters_that_no_word_can_set_are_no_flags():
    def factory(period: int, rate=0.5, outer=optax.sgd(0.1), dtype=jnp.float32):  # noqa: B008
        return syncalgos.model_averaging(period)

    found = factories.of_function(factories.ALGORITHM, "own", factory)
    assert [*found.flags] == ["period", "rate"]


GIVEN = """
import syncalgos
given = []

def factory(period: int, learning_rate, optimizer, seed, axis):
    given.append((period, learning_rate, optimizer, seed, axis))
    return syncalgos.every(period, syncalgos.reset(optimizer))
"""


def test_factory_gets_what_the_run_has(tmp_path, monkeypatch):
    (tmp_path / "strategies.py").write_text(GIVEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")  # as they are
    words = "--algo strategies:factory --period 4 --lr 0.3 --seed 5 --momentum 0.9"
    plan = prepare(parse([*words.split(), "--schedule", "cosine"]))
    import strategies  # pyright: ignore[reportMissingImports]

    scheduled, steady = strategies.given
    assert scheduled[0] == 4
    assert float(scheduled[1](0)) == pytest.approx(0.3)
    assert float(scheduled[1](plan.config.steps)) == pytest.approx(0)
    assert scheduled[2] is plan.optimizer
    assert scheduled[3:] == (5, syncalgos.WORKERS)
    assert steady[1] == 0.3
    assert plan.config.arguments == {"period": 4}


def test_numbers_that_are_not_finite_are_null():
    line = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}}
    assert records.plain(line) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_effective_lr_of_a_model_with_a_leaf_of_size_0():
    params = {**PARAMS, "none": np.zeros((0, 3), np.float32)}
    found = effective_lr(syncalgos.bmuf(4), params, optax.sgd(0.1), 2, 0.02)
    assert found == pytest.approx(0.04, rel=1e-3)
