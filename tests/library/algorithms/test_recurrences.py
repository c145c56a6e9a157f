"""Each algorithm against its paper's recurrence, written out in float64 NumPy."""

import importlib

import numpy as np
import optax
import pytest
from problems import relative_error, train
from recurrences import LR, MOMENTUM, STEPS, TARGET, X, des_loc

import syncalgos

pytestmark = pytest.mark.usefixtures("float64")

# Float64 rounds at 1e-16; the sums of a few hundred terms in another order, carried
# through 14 steps, stay below 1e-14. A wrong term of an update shows at 1e-3.
TOLERANCE = 1e-12


def cases():
    """Each setting with 2 or 4 workers in turn; the first one with all numbers.

    The first one with 4 is not slow, with 1 and 2 it is long.
    """
    for name in syncalgos.ALGORITHMS:
        module = importlib.import_module(f"recurrences.{name}")
        for number, settings in enumerate(module.SETTINGS):
            even = (4, 2)[number % 2]
            for workers in (even,) if number else (1, 2, 3, 4):
                is_long = number == 0 and workers < 3
                marks = pytest.mark.long if is_long else pytest.mark.slow
                marks = () if (number, workers) == (0, 4) else marks
                case = module.recurrence, name, settings, workers
                yield pytest.param(*case, id=f"{name}-{number}-{workers}", marks=marks)


@pytest.mark.sample(12, slow=120)
@pytest.mark.parametrize(("recurrence", "name", "settings", "workers"), list(cases()))
def test_algorithm_matches_its_recurrence(recurrence, name, settings, workers):
    optimizer = optax.sgd(settings.get("learning_rate", LR), momentum=MOMENTUM)
    strategy = syncalgos.ALGORITHMS[name](**settings)
    check(strategy, optimizer, recurrence(workers, **settings), workers)


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", des_loc.ADAM_SETTINGS)
def test_des_loc_averages_both_moments_of_adam(settings, workers):
    recurrence = des_loc.adam_recurrence(workers, **settings)
    check(syncalgos.des_loc(**settings), optax.adam(LR), recurrence, workers)


def check(strategy, optimizer, recurrence, workers):
    path = [(center, list(theta)) for center, theta in recurrence]
    seen = range(2, STEPS + 1, 2)  # inside blocks too

    trained = train(
        strategy,
        optimizer,
        workers,
        at=tuple(seen),
        batches=(X, TARGET),
        backend="pmap",
    )

    centers = np.array([path[steps - 1][0] for steps in seen])
    replicas = np.array([path[steps - 1][1] for steps in seen])
    assert relative_error(trained.centers, centers) <= TOLERANCE
    assert relative_error(trained.replicas, replicas) <= TOLERANCE
