"""The effective learning rate that a steady drift shows."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos
import syncalgos as sa
from syncalgos import Strategy, collectives, effective_rate, every, outer_step

PARAMS = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(20, np.float32)}
STUDIES = Path(__file__).parents[2] / "docs" / "studies"


def fixed_kinds() -> Strategy:
    """A strategy that knows the shapes and dtypes of the params it is for."""

    def init(params):
        return {"sum": jnp.zeros((30, 20), jnp.float32)}

    def sync(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        mean = collectives.mean(replica.params)
        total = {"sum": state["sum"] + mean["w"] * jax.lax.rem(step, jnp.int32(4))}
        return replica._replace(params=mean), total

    return every(Strategy(init=init, sync=sync), 4)


@pytest.mark.parametrize(
    ("strategy", "workers", "gain"),
    [
        (syncalgos.bmuf(10, block_momentum=0.9, block_lr=0.5, nesterov=True), 4, 5),
        (syncalgos.diloco(period=5000), 2, 7),
        (syncalgos.async_diloco(slowest=0.5, outer_momentum=0.9), 3, 7 * 0.75),
        (fixed_kinds(), 4, 1),
        pytest.param(syncalgos.bmuf(16), 256, 256, marks=pytest.mark.slow),
    ],
)
def test_the_gain_is_the_one_in_closed_form(strategy, workers, gain):
    result = effective_rate(strategy, optax.sgd(0.02), workers=workers, params=PARAMS)
    assert result == pytest.approx((gain, 0.02 * gain), rel=1e-3)


def test_the_gain_is_that_of_most_entries():
    def reduce(
        grads: Any, replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[Any, Any]:
        return {**grads, "b": 100 * grads["b"]}, state

    params = {"w": np.zeros((30, 33), np.float32), "b": np.zeros(10, np.float32)}
    params["none"] = np.zeros((0, 3), np.float32)
    result = effective_rate(
        Strategy(reduce=reduce), optax.sgd(0.1), workers=2, params=params
    )
    assert result.gain == pytest.approx((990 + 100 * 10) / 1000, rel=1e-3)


def sign_step() -> Strategy:
    def reduce(
        grads: Any, replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[Any, Any]:
        return jax.tree.map(jnp.sign, collectives.mean(grads)), state

    return Strategy(reduce=reduce)


@pytest.mark.parametrize(
    "strategy",
    [
        sign_step(),
        every(outer_step(optax.adam(0.1)), 4),  # its step does not grow with gradients
    ],
)
def test_a_step_that_does_not_grow_with_the_gradient_has_no_gain(strategy):
    assert effective_rate(strategy, optax.sgd(0.1), workers=4) == (None, None)


@pytest.mark.slow
def test_the_gain_is_nan_where_movement_does_not_become_steady():
    growing = every(outer_step(optax.sgd(0.1, momentum=1.0)), 4)
    result = effective_rate(growing, optax.sgd(0.1), workers=4, steps=4096)
    assert np.isnan(result).all()


@pytest.mark.slow
def test_the_gain_of_a_random_strategy_is_known_to_a_percent():
    paced = syncalgos.async_diloco(slowest=0.5, outer_lr=0.7, outer_momentum=0.5)
    result = effective_rate(paced, optax.sgd(0.1), workers=4)
    assert result.gain == pytest.approx(1.4 * 0.75, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (optax.sgd(0.02, momentum=0.9), 0.02),
        (optax.adamw(0.003), 0.003),
        (optax.sgd(0.02, momentum=0.9, nesterov=True), 0.02 * 1.9),
    ],
)
def test_the_inner_rate_is_the_optimizers_first_step(optimizer, rate):
    result = effective_rate(
        syncalgos.model_averaging(4, axis="batch"), optimizer, workers=2
    )
    assert result == pytest.approx((1, rate), rel=1e-3)


def test_a_strategys_learning_rate_comes_before_the_optimizers():
    result = effective_rate(
        syncalgos.scaffold(4, learning_rate=0.05), optax.sgd(0.02), workers=2
    )
    assert result.rate == pytest.approx(0.05, rel=1e-3)


def test_a_rate_that_cannot_be_found_is_asked_for():
    warmup = optax.sgd(optax.linear_schedule(0.0, 0.1, 100))
    with pytest.raises(ValueError, match="shows no learning rate: pass learning_rate"):
        effective_rate(syncalgos.bmuf(4), warmup, workers=2)


def test_hyperparams_compile_once(monkeypatch):
    traces = []

    def make_strategy(numbers):
        traces.append(numbers)
        return syncalgos.bmuf(4, block_momentum=numbers["momentum"])

    gains = [
        effective_rate(
            make_strategy,
            make_sgd,
            workers=2,
            learning_rate=0.1,
            hyperparams={"momentum": momentum},
        ).gain
        for momentum in (0.5, 0.8)
    ]
    assert gains == pytest.approx([2, 5], rel=1e-3)
    assert len(traces) == 2  # at the start, and in a chunk of steps


def make_sgd(numbers: dict[str, Any]) -> optax.GradientTransformation:
    return optax.sgd(0.1)


COARSE_STEP = (0.205 / 0.0016) ** (1 / 6)  # the grid of the atlas on MNIST-1D


def read_starts(atlas: str) -> list[tuple[float, int]]:
    """Reads (rate of sync_sgd / gain / chosen rate, syncs) of each other row."""
    with (STUDIES / atlas / "table.csv").open() as table:
        rows = list(csv.DictReader(table))
    sync_sgd = next(row for row in rows if row["algorithm"] == "sync_sgd")
    return [
        (float(sync_sgd["lr"]) / float(row["effective_lr"]), int(row["syncs"]))
        for row in rows
        if row is not sync_sgd and row["effective_lr"]
    ]


def count_near(starts: list[float]) -> tuple[int, int]:
    near = [x for x in starts if 1 / COARSE_STEP <= x <= COARSE_STEP]
    return len(near), len(starts)


class NearStarts(NamedTuple):
    """How many of a page's starts are near the chosen rate, and of how many.

    Attributes:
        frequent: of strategies that sync at each step.
        periodic: of those with a period.
        halved: of those, with half of the rate.
    """

    frequent: tuple[int, int]
    periodic: tuple[int, int]
    halved: tuple[int, int]


NEAR_STARTS = {
    "atlas-mnist1d": NearStarts((15, 18), periodic=(12, 24), halved=(19, 24)),
    "atlas-gpt": NearStarts((4, 5), periodic=(6, 6), halved=(6, 6)),
    "atlas-spoken-digits": NearStarts((4, 13), periodic=(5, 9), halved=(2, 9)),
}


@pytest.mark.parametrize("atlas", NEAR_STARTS)
def test_a_rate_divided_by_the_gain_is_as_near_as_the_pages_say(atlas):
    expected = NEAR_STARTS[atlas]
    starts = read_starts(atlas)
    most_syncs = max(syncs for _, syncs in starts)
    frequent = [start for start, syncs in starts if syncs >= most_syncs / 4]
    periodic = [start for start, syncs in starts if syncs < most_syncs / 4]
    assert count_near(frequent) == expected.frequent
    assert count_near(periodic) == expected.periodic
    assert count_near([start / 2 for start in periodic]) == expected.halved
