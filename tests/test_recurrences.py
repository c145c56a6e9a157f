"""Each algorithm against its paper's recurrence, written out in float64 NumPy.

A recurrence knows nothing of the library or of JAX. It is a generator: after each local
step it yields the center and the list of the workers' params. A new algorithm adds its
recurrence and a row of RECURRENCES, with the settings to run it under.
"""

import jax
import numpy as np
import optax
import pytest
from problems import (
    flatten,
    gradient,
    initial_params,
    make_batches,
    relative_error,
    train,
)

import syncalgos

STEPS = 14  # three blocks of PERIOD and half a block
PERIOD = 4
LR = 0.2
MOMENTUM = 0.9
START = flatten(initial_params())
X, TARGET = make_batches(STEPS)

# Float64 rounds at 1e-16; the sums of a few hundred terms in another order, carried
# through 14 steps, stay below 1e-14. A wrong term of an update shows at 1e-3.
TOLERANCE = 1e-12


def worker_gradient(theta, step, worker, workers):
    """The gradient on the worker's contiguous slice of the step's global batch."""
    size = X.shape[1] // workers
    part = slice(worker * size, (worker + 1) * size)
    return gradient(theta, X[step, part], TARGET[step, part])


def mean(vectors):
    return np.mean(vectors, axis=0)


def local_steps(workers):
    """Yields (step, θ), with every worker's θ stepped by its own heavy ball.

    The caller may replace entries of the list θ: the next step starts from them.
    """
    theta = [START] * workers
    momentum = [np.zeros_like(START)] * workers
    for step in range(STEPS):
        for i in range(workers):
            g = worker_gradient(theta[i], step, i, workers)
            momentum[i] = MOMENTUM * momentum[i] + g
            theta[i] = theta[i] - LR * momentum[i]
        yield step, theta


def sync_sgd(workers):
    theta, momentum = START, np.zeros_like(START)
    for step in range(STEPS):
        g = mean([worker_gradient(theta, step, i, workers) for i in range(workers)])
        momentum = MOMENTUM * momentum + g
        theta = theta - LR * momentum
        yield theta, [theta] * workers


def model_averaging(workers, period):
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            theta[:] = [mean(theta)] * workers
        yield mean(theta), theta


def bmuf(workers, period, block_momentum=None, block_lr=1.0, nesterov=False):
    """Chen and Huo 2016: G = mean(θ) - y; Δ ← μ Δ + ζ G; w ← w + Δ."""
    mu = 1 - 1 / workers if block_momentum is None else block_momentum
    w, y, delta = START, START, np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            block_update = mean(theta) - y
            delta = mu * delta + block_lr * block_update
            w = w + delta
            y = w + mu * delta if nesterov else w
            theta[:] = [y] * workers
        yield w, theta


def diloco(workers, period, outer_lr=0.7, outer_momentum=0.9):
    """Douillard 2023, algorithm 1: outer Nesterov momentum as in Sutskever 2013."""
    anchor, velocity = START, np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            pseudo_gradient = anchor - mean(theta)
            velocity = outer_momentum * velocity + pseudo_gradient
            look_ahead = pseudo_gradient + outer_momentum * velocity
            anchor = anchor - outer_lr * look_ahead
            theta[:] = [anchor] * workers
        yield anchor, theta


# name: (the recurrence, the settings that it and the algorithm are run under)
RECURRENCES = {
    "sync_sgd": (sync_sgd, [{}]),
    "model_averaging": (model_averaging, [{"period": PERIOD}]),
    "bmuf": (
        bmuf,
        [
            {"period": PERIOD},
            {"period": PERIOD, "block_momentum": 0.6, "block_lr": 0.7},
            {"period": PERIOD, "nesterov": True},
            {
                "period": PERIOD,
                "block_momentum": 0.8,
                "block_lr": 1.2,
                "nesterov": True,
            },
        ],
    ),
    "diloco": (
        diloco,
        [
            {"period": PERIOD},
            {"period": PERIOD, "outer_lr": 0.4, "outer_momentum": 0.5},
        ],
    ),
}

CASES = [
    pytest.param(name, settings, id="-".join([name, *map(str, settings.values())]))
    for name, (_, many) in RECURRENCES.items()
    for settings in many
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name, settings", CASES)
def test_algorithm_matches_its_recurrence(name, settings, workers):
    recurrence = RECURRENCES[name][0]
    path = [
        (center, list(all_theta))
        for center, all_theta in recurrence(workers, **settings)
    ]
    seen = range(2, STEPS + 1, 2)  # inside blocks too

    trained = train(
        syncalgos.ALGORITHMS[name](**settings),
        optax.sgd(LR, momentum=MOMENTUM),
        workers,
        at=tuple(seen),
        batches=(X, TARGET),
        backend="pmap",
    )

    centers = np.array([path[steps - 1][0] for steps in seen])
    replicas = np.array([path[steps - 1][1] for steps in seen])
    assert relative_error(trained.centers, centers) <= TOLERANCE
    assert relative_error(trained.replicas, replicas) <= TOLERANCE


def test_every_algorithm_has_a_recurrence():
    assert RECURRENCES.keys() == syncalgos.ALGORITHMS.keys()
