"""Methods of examples/compositions.py against the updates of their papers, by NumPy."""

import runpy

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


def loscar():
    on_the_way = {}
    for step, theta in local_steps(WORKERS):
        if step in on_the_way:
            theta[:] = [x + d for x, d in zip(theta, on_the_way[step], strict=True)]
        if (step + 1) % PERIOD == 0:
            draws = np.asarray(jax.random.uniform(draw_key(0, step), START.shape))
            sent = by_leaf(
                lambda _, u: u >= np.sort(u, None)[-sparta.ceil(0.3 * u.size)], draws
            )
            on_the_way[step + DELAY] = [(mean(theta) - x) * sent for x in theta]
        yield mean(theta), theta


def adacomm():
    before = [START] * WORKERS
    period = 1
    last = -1
    first = None
    for step, theta in local_steps(WORKERS):
        if step - last == period:
            losses = [
                loss(unflatten(x), (rows, target))
                for x, rows, target in zip(
                    before,
                    np.split(X[step], WORKERS),
                    np.split(TARGET[step], WORKERS),
                    strict=True,
                )
            ]
            first = first or np.mean(losses)  # of step 0
            period = np.ceil(np.sqrt(np.mean(losses) / first) * PERIOD)
            last = step
            theta[:] = [mean(theta)] * WORKERS
        before = list(theta)
        yield mean(theta), theta


def saps_psgd():
    for step, theta in local_steps(WORKERS):
        count = round(0.3 * START.size)
        sent = np.asarray(
            jax.random.choice(draw_key(0, step), START.size, (count,), replace=False)
        )
        new = [x.copy() for x in theta]
        for i, j in enumerate(MATCHINGS[step % 2]):
            new[i][sent] = (theta[i][sent] + theta[j][sent]) / 2
        theta[:] = new
        yield mean(theta), theta


def acco():
    def gradient(theta, step):
        return mean([worker_gradient(theta, step, i, WORKERS) for i in range(WORKERS)])

    theta = estimate = START
    velocity = both = np.zeros_like(START)
    for step in range(0, STEPS, 2):
        half = gradient(estimate, step)
        velocity = MOMENTUM * velocity + both  # of the round before
        theta = theta - LR * velocity
        yield theta, [theta] * WORKERS
        both = (half + gradient(theta, step + 1)) / 2
        estimate = theta - LR * (MOMENTUM * velocity + half)
        yield estimate, [estimate] * WORKERS


def cocodc():
    fragment = by_leaf(lambda number, x: np.full(x.shape, number % 2), START)
    anchor = START
    velocity = np.zeros_like(START)
    arrived = START
    on_the_way = {}
    for step, theta in local_steps(WORKERS):
        if step in on_the_way:
            inside, y, arriving = on_the_way[step]
            arrived = np.where(inside, arriving, arrived)
            for i in range(WORKERS):
                theta[i] = np.where(inside, arriving + (theta[i] - y[i]), theta[i])
        for f in range(2):
            if (step + 1 - f * PERIOD // 2) % PERIOD == 0:
                inside = fragment == f
                g = anchor - mean(theta)
                velocity = np.where(inside, 0.9 * velocity + g, velocity)
                anchor = np.where(inside, anchor - 0.7 * (g + 0.9 * velocity), anchor)
                on_the_way[step + 1] = inside, list(theta), anchor
        yield arrived, theta


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
