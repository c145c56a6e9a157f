"""The harness's parts: batches, schedules, evaluation."""

import argparse
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer
from jax.experimental import multihost_utils

import syncalgos
from experiments import files
from experiments.command import factories
from experiments.command.errors import BadRequest
from experiments.data import sampling
from experiments.tasks.task import held_out
from experiments.training import optimizers
from experiments.training.config import parse
from experiments.training.defaults import nearest_multiple
from experiments.training.loop import dispatches, first_diverged, remaining
from experiments.training.prepare import prepare
from experiments.training.process_group import ProcessGroup

PARAMS = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(20, np.float32)}


def test_results_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    events = []
    sync = os.fsync
    rename = os.replace

    def watched_sync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def watched_rename(*paths):
        events.append("renamed")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_rename)
    path = tmp_path / "summary.json"
    files.write_json(path, {"steps": 4})
    assert events == [path.stat().st_ino, "renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize(("batch", "examples"), [(8, 24), (7, 24), (24, 24), (5, 7)])
def test_each_epoch_takes_every_example_once(batch, examples):
    steps = 3 * examples
    flat = sampling.rows(1, 0, steps, batch, examples).reshape(-1)
    epochs = flat[: len(flat) // examples * examples].reshape(-1, examples)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(examples))
    assert len({tuple(epoch) for epoch in epochs[:20]}) > 1  # a fresh order each


def test_stream_is_a_function_of_seed_and_step_alone():
    all_rows = sampling.rows(3, 0, 100, 10, 37)
    assert all_rows.shape == (100, 10)
    for first_step, steps in [(0, 1), (3, 1), (3, 50), (99, 1), (37, 63)]:
        some_rows = sampling.rows(3, first_step, steps, 10, 37)
        np.testing.assert_array_equal(
            some_rows, all_rows[first_step : first_step + steps]
        )
    assert (sampling.rows(4, 0, 100, 10, 37) != all_rows).any()


@pytest.mark.parametrize("workers", [1, 3, 7, 8, 64])
@pytest.mark.parametrize("batch", [1024, 50])
def test_every_held_out_example_counts_once(workers, batch):
    values = np.arange(360.0, dtype=np.float32)
    data, rows = held_out({"v": values}, workers, batch)
    assert rows.shape[1] % workers == 0
    weighted = data["weight"][rows] * data["v"][rows]
    assert np.mean(weighted, dtype=np.float64) == pytest.approx(values.mean(), rel=1e-6)
    np.testing.assert_array_equal(np.sort(rows[rows < 360]), np.arange(360))


@pytest.mark.parametrize("batch", [1024, 50])
def test_filled_data_have_the_shapes_of_more_data_and_the_same_mean(batch):
    values = np.arange(144.0, dtype=np.float32)
    data, rows = held_out({"v": values}, 8, batch, least=360)
    more_data, more_rows = held_out({"v": np.arange(360.0)}, 8, batch)
    assert rows.shape == more_rows.shape
    assert data["v"].shape == more_data["v"].shape
    weighted = data["weight"][rows] * data["v"][rows]
    assert np.mean(weighted, dtype=np.float64) == pytest.approx(values.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("steps", "every_", "max_steps"),
    [(960, 96, 96), (100, 30, 7), (5, 5, 100), (10, 3, 1)],
)
def test_dispatches_end_at_evaluations_and_cover_all_steps(steps, every_, max_steps):
    parts = list(dispatches([*range(every_, steps, every_), steps], max_steps))
    ends = [start + length for start, length in parts]
    assert [start for start, _ in parts] == [0, *ends[:-1]]
    assert ends[-1] == steps
    assert set(range(every_, steps, every_)) <= set(ends)
    lengths = {length for _, length in parts}
    assert min(lengths) >= 1 and max(lengths) <= max_steps
    assert len(lengths) <= 4  # each is compiled anew


@pytest.mark.parametrize("step", [0, 20, 25, 30, 99])
def test_a_run_that_goes_on_takes_the_dispatches_that_are_left(step):
    all_dispatches = list(dispatches([30, 60, 100], 12))
    dispatches_left = list(remaining(iter(all_dispatches), step))

    assert dispatches_left[0][0] == step
    assert dispatches_left[1:] == [part for part in all_dispatches if part[0] > step]
    assert sum(steps for _, steps in dispatches_left) == 100 - step


@pytest.mark.parametrize(
    ("losses", "first_loss", "expected"),
    [
        ([1.0, 999, 1000], 1.0, None),
        ([1.0, 1000.5, np.nan], 1.0, 1),
        ([1.0, np.nan, 2000], 1.0, 1),
        ([np.inf], np.inf, 0),
        # A margin loss, whose first batch may lie beyond the margin, sets no limit.
        ([0.0, 0.156, 2.5, 99.0], 0.0, None),
        ([0.0, 0.156, 2.5, 99.0], 1e-4, None),
        ([0.0, 101.0], 0.0, 1),
        ([0.0, np.nan], 0.0, 1),
    ],
)
def test_first_diverged_loss_is_found(losses, first_loss, expected):
    assert first_diverged(np.array(losses), first_loss) == expected


@pytest.mark.parametrize(
    ("n", "divisor", "expected"),
    [(64, 8, 64), (64, 7, 63), (64, 48, 48), (64, 100, 100), (64, 5, 65), (6, 4, 4)],
)
def test_nearest_multiple(n, divisor, expected):
    assert nearest_multiple(n, divisor) == expected


COSINE = [0.5 * (1 + np.cos(np.pi * t / 8)) for t in range(8)]
STEPS = [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]


class ScheduleCase(NamedTuple):
    """A schedule of rates, step by step."""

    name: str
    lr: float
    warmup_steps: int
    expected: list[float]


@pytest.mark.parametrize(
    ScheduleCase._fields,
    [
        ScheduleCase(name="constant", lr=0.1, warmup_steps=0, expected=[0.1] * 10),
        ScheduleCase(
            name="constant",
            lr=0.4,
            warmup_steps=4,
            expected=[0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4],
        ),
        ScheduleCase(name="step", lr=1.0, warmup_steps=0, expected=STEPS),
        ScheduleCase(name="step", lr=1.0, warmup_steps=2, expected=[0.5, *STEPS[1:]]),
        ScheduleCase(name="step", lr=0.1, warmup_steps=0, expected=[0.1]),
        ScheduleCase(name="step", lr=1.0, warmup_steps=0, expected=[1.0, 0.1]),
        ScheduleCase(
            name="linear", lr=1.0, warmup_steps=0, expected=[1.0, 0.75, 0.5, 0.25]
        ),
        ScheduleCase(
            name="linear",
            lr=1.0,
            warmup_steps=2,
            expected=[0.5, 1.0, 1.0, 0.75, 0.5, 0.25],
        ),
        ScheduleCase(name="wsd", lr=0.5, warmup_steps=0, expected=[*[0.5] * 9, 0.25]),
        ScheduleCase(
            name="wsd", lr=1.0, warmup_steps=2, expected=[0.5, 1.0, *[1.0] * 7, 0.5]
        ),
        ScheduleCase(name="cosine", lr=1.0, warmup_steps=0, expected=COSINE),
        ScheduleCase(
            name="cosine", lr=1.0, warmup_steps=2, expected=[0.5, 1.0, *COSINE]
        ),
    ],
)
def test_schedules(name, lr, warmup_steps, expected):
    schedule = optimizers.schedule(name, lr, len(expected), warmup_steps)
    rates = [
        schedule(t) if callable(schedule) else schedule for t in range(len(expected))
    ]
    np.testing.assert_allclose(rates, expected, 1e-5)


def test_weight_decay_enters_before_momentum_and_clipping_before_both():
    params = {"w": jnp.full(4, 2.0)}
    grads = {"w": jnp.full(4, 3.0)}  # norm 6
    optimizer = optimizers.make_optimizer(
        "sgd", 0.1, momentum=0.9, weight_decay=0.5, clip_norm=1.5
    )
    state = optimizer.init(params)
    velocity = 0.0
    w = 2.0
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        velocity = 0.9 * velocity + 3.0 * 1.5 / 6 + 0.5 * w
        w -= 0.1 * velocity
        np.testing.assert_allclose(params["w"], np.full(4, w), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"b1": 0.5, "b2": 0.7}) for name in ("adam", "adamw", "lion")),
        *(("adamw", options) for options in ({}, {"weight_decay": 0.5})),
    ],
)
def test_what_an_optimizer_has_of_its_own_is_given_to_it(name, options):
    params = {"w": jnp.full(4, 2.0)}
    grads = {"w": jnp.arange(4.0)}
    optimizer = optimizers.make_optimizer(name, 0.1, **options)
    optax_optimizer = getattr(optax, name)(0.1, **options)
    opt_state = optimizer.init(params)
    optax_state = optax_optimizer.init(params)
    for _ in range(3):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        expected, optax_state = optax_optimizer.update(grads, optax_state, params)
        np.testing.assert_array_equal(updates["w"], expected["w"])


COSINE_RATE = optimizers.schedule("cosine", 0.1, 10, 0)


class RefusedOptimizer(NamedTuple):
    """An optimizer that is refused with a message."""

    name: str
    rate: Any
    options: dict
    message: str


@pytest.mark.parametrize(
    RefusedOptimizer._fields,
    [
        RefusedOptimizer(
            name="sm3",
            rate=COSINE_RATE,
            options={},
            message="--optimizer sm3 refuses a schedule",
        ),
        RefusedOptimizer(
            name="rprop",
            rate=COSINE_RATE,
            options={},
            message="--optimizer rprop refuses a schedule",
        ),
        RefusedOptimizer(
            name="sgd",
            rate=0.1,
            options={"b2": 0.9},
            message=r"--optimizer sgd has no --b2 \(these have: .*adam",
        ),
        RefusedOptimizer(
            name="lookahead",
            rate=0.1,
            options={},
            message="--optimizer lookahead .*: use --algo lookahead",
        ),
        RefusedOptimizer(
            name="lbfgs",
            rate=0.1,
            options={},
            message="--optimizer lbfgs .* needs the loss",
        ),
        RefusedOptimizer(
            name="schedule_free_sgd",
            rate=0.1,
            options={},
            message="--optimizer schedule_free_sgd .* another",
        ),
        RefusedOptimizer(
            name="schedule_fre",
            rate=0.1,
            options={},
            message="unknown optimizer 'schedule_fre'",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_so_says_why(name, rate, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        optimizers.make_optimizer(name, rate, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # optax retires some
@pytest.mark.parametrize("name", sorted(optimizers.find_optimizers()))
def test_every_offered_optimizer_takes_a_step(name):
    """Its shapes alone, as of a traced one: a step itself is optax's business."""
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    optimizer = optax.with_extra_args_support(optimizers.make_optimizer(name, 0.1))

    def step(params):
        return optimizer.update(params, optimizer.init(params), params, value=1.0)[0]

    updates = jax.eval_shape(step, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_parameters_that_no_word_can_set_are_no_flags():
    def factory(period: int, rate=0.5, outer=optax.sgd(0.1), dtype=jnp.float32):  # noqa: B008
        return syncalgos.model_averaging(period)

    call = factories.of_function(factories.ALGORITHM, "own", factory)
    assert [*call.flags] == ["period", "rate"]


@pytest.mark.parametrize("names", [("b1",), ("beta1",), ("beta1", "switch", "warmup")])
def test_a_factory_of_ones_own_may_have_any_of_these_names(names):
    """`--b1` is the inner optimizer's, and `--switch` was a flag of 0.2."""
    parameters = ", ".join(f"{name}=0.5" for name in names)
    scope = {}
    exec(f"def factory({parameters}): return dict(locals())", scope)
    scope["factory"].__doc__ = f"Mine.\n\nArgs:\n    {names[0]}: the share.\n"
    call = factories.of_function(factories.ALGORITHM, "own", scope["factory"])
    parser = argparse.ArgumentParser()
    call.add_flags(parser)
    assert "the share." in parser.format_help()
    words = [f"--{name.replace('_', '-')}=0.25" for name in call.flags]
    parsed_flags = vars(parser.parse_args(words))
    assert parsed_flags == dict.fromkeys(call.flags, 0.25)
    assert "b1" not in parsed_flags


RECORDING_FACTORY = """
import syncalgos
given = []

def factory(period: int, learning_rate, optimizer, seed, axis):
    given.append((period, learning_rate, optimizer, seed, axis))
    return syncalgos.every(syncalgos.reset(optimizer), period)

factory.static = ()  # it needs no number's value
"""


def test_factory_gets_what_the_run_has(tmp_path, monkeypatch):
    (tmp_path / "strategies.py").write_text(RECORDING_FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    words = "--algo strategies:factory --period 4 --lr 0.3 --seed 5 --momentum 0.9"
    plan = prepare(parse([*words.split(), "--schedule", "cosine"]))
    import strategies  # pyright: ignore[reportMissingImports]

    declaring, scheduled = strategies.given[:2]
    traced = strategies.given[-1]
    assert declaring[0] == 4
    assert scheduled[0] == 4
    assert float(scheduled[1](0)) == pytest.approx(0.3)
    assert float(scheduled[1](plan.config.steps)) == pytest.approx(0)
    assert scheduled[2] is plan.plan.method.optimizer
    assert scheduled[3:] == (5, syncalgos.WORKERS)
    assert isinstance(traced[3], Tracer)  # data to the programs
    assert plan.config.arguments == {"period": 4}


def test_processes_that_read_other_data_are_refused(monkeypatch):
    """The digest of the other of two is another."""
    gathered = multihost_utils, "process_allgather"
    monkeypatch.setattr(*gathered, lambda x: np.stack([x, x + 1]))
    with pytest.raises(BadRequest, match=r"^processes read different data"):
        prepare(parse(["--workers", "2"]), ProcessGroup(processes=2))


def test_numbers_that_are_not_finite_are_null():
    line = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}}
    assert files.to_json_value(line) == {"a": None, "b": [None, 1.5], "c": {"d": None}}
