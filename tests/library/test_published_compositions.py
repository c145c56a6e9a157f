"""Methods of examples/compositions.py against the updates of their papers, by NumPy."""

import runpy
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from recurrences import (
    LR,
    MOMENTUM,
    PERIOD,
    START,
    STEPS,
    TARGET,
    X,
    by_leaf,
    draw_key,
    local_steps,
    mean,
    sparta,
    worker_gradient,
)
from support.commands import ROOT
from support.problems import loss, relative_error, train, unflatten
from support.tiers import tiers

pytestmark = pytest.mark.usefixtures("float64")

WORKERS = 4
DELAY = 2
MATCHINGS = [[1, 0, 3, 2], [2, 3, 0, 1]]
SGD = optax.sgd(LR, momentum=MOMENTUM)


def loscar() -> Iterator[Any]:
    on_the_way = {}
    for step, theta in local_steps(WORKERS):
        if step in on_the_way:
            theta[:] = [x + d for x, d in zip(theta, on_the_way[step], strict=True)]
        if (step + 1) % PERIOD == 0:
            draws = np.asarray(jax.random.uniform(draw_key(0, step), START.shape))
            is_sent = by_leaf(
                lambda _, u: u >= np.sort(u, None)[-sparta.ceil(0.3 * u.size)], draws
            )
            on_the_way[step + DELAY] = [(mean(theta) - x) * is_sent for x in theta]
        yield mean(theta), theta


def adacomm() -> Iterator[Any]:
    step_starts = [START] * WORKERS
    period = 1
    last_sync = -1
    first_loss = None
    for step, theta in local_steps(WORKERS):
        if step - last_sync == period:
            losses = [
                loss(unflatten(x), (rows, target))
                for x, rows, target in zip(
                    step_starts,
                    np.split(X[step], WORKERS),
                    np.split(TARGET[step], WORKERS),
                    strict=True,
                )
            ]
            first_loss = first_loss or np.mean(losses)  # of step 0
            period = np.ceil(np.sqrt(np.mean(losses) / first_loss) * PERIOD)
            last_sync = step
            theta[:] = [mean(theta)] * WORKERS
        step_starts = list(theta)
        yield mean(theta), theta


def saps_psgd() -> Iterator[Any]:
    for step, theta in local_steps(WORKERS):
        count = round(0.3 * START.size)
        sent_entries = np.asarray(
            jax.random.choice(draw_key(0, step), START.size, (count,), replace=False)
        )
        new_theta = [x.copy() for x in theta]
        for i, j in enumerate(MATCHINGS[step % 2]):
            new_theta[i][sent_entries] = (
                theta[i][sent_entries] + theta[j][sent_entries]
            ) / 2
        theta[:] = new_theta
        yield mean(theta), theta


def acco() -> Iterator[Any]:
    def gradient(theta: np.ndarray, step: int) -> np.ndarray:
        return mean([worker_gradient(theta, step, i, WORKERS) for i in range(WORKERS)])

    theta = estimate = START
    velocity = round_grads = np.zeros_like(START)
    for step in range(0, STEPS, 2):
        half_grads = gradient(estimate, step)
        velocity = MOMENTUM * velocity + round_grads  # of the round before
        theta = theta - LR * velocity
        yield theta, [theta] * WORKERS
        round_grads = (half_grads + gradient(theta, step + 1)) / 2
        estimate = theta - LR * (MOMENTUM * velocity + half_grads)
        yield estimate, [estimate] * WORKERS


def cocodc() -> Iterator[Any]:
    fragment = by_leaf(lambda number, x: np.full(x.shape, number % 2), START)
    anchor = START
    velocity = np.zeros_like(START)
    arrived_center = START
    on_the_way = {}
    for step, theta in local_steps(WORKERS):
        if step in on_the_way:
            in_fragment, y, arriving = on_the_way[step]
            arrived_center = np.where(in_fragment, arriving, arrived_center)
            for i in range(WORKERS):
                theta[i] = np.where(in_fragment, arriving + (theta[i] - y[i]), theta[i])
        for f in range(2):
            if (step + 1 - f * PERIOD // 2) % PERIOD == 0:
                in_fragment = fragment == f
                g = anchor - mean(theta)
                velocity = np.where(in_fragment, 0.9 * velocity + g, velocity)
                anchor = np.where(
                    in_fragment, anchor - 0.7 * (g + 0.9 * velocity), anchor
                )
                on_the_way[step + 1] = in_fragment, list(theta), anchor
        yield arrived_center, theta


CASES = {
    "loscar": (loscar, {"period": PERIOD, "density": 0.3, "delay": DELAY}),
    "adacomm": (adacomm, {"period": PERIOD}),
    "saps_psgd": (saps_psgd, {"matchings": MATCHINGS, "density": 0.3}),
    "acco": (acco, {"optimizer": SGD}),
    "cocodc": (cocodc, {"period": PERIOD, "fragments": 2, "delay": 1}),
}


@pytest.mark.parametrize("name", tiers(CASES, ["saps_psgd"]))
def test_composition_is_its_papers_update(name):
    recurrence, arguments = CASES[name]
    path = [(center, list(theta)) for center, theta in recurrence()]
    program = runpy.run_path(str(ROOT / "examples" / "compositions.py"))
    strategy = program[name](**arguments)

    trained = train(strategy, SGD, WORKERS, tuple(range(1, STEPS + 1)), (X, TARGET))

    assert relative_error(trained.centers, np.array([x for x, _ in path])) <= 1e-12
    assert relative_error(trained.replicas, np.array([x for _, x in path])) <= 1e-12
