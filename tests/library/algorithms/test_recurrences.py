"""Each algorithm against its paper's recurrence, written out in float64 NumPy.

Cases with the same number of workers share compiled programs, so that an algorithm
costs a second. `-k bmuf` trains only those of bmuf.
"""

import importlib
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recurrences import (
    LR,
    MOMENTUM,
    START,
    STEPS,
    TARGET,
    X,
    choco_sgd,
    des_loc,
    fedavg,
    zero_one_adam,
)
from support import joint_strategies
from support.chosen_tests import chosen_values
from support.plain_loop import local_steps
from support.problems import flatten, initial_params, loss, relative_error, train

import syncalgos
from syncalgos import Replica, Strategy

pytestmark = pytest.mark.usefixtures("float64")

# Float64 rounds at 1e-16; the sums of a few hundred terms in another order, carried
# through 14 steps, stay below 1e-14. A wrong term of an update shows at 1e-3.
TOLERANCE = 1e-12
AXIS = "worker"
get_workers = attrgetter("workers")
# A graph that mixes after the step, and a matrix too small to be worth compression.
FURTHER_DEFAULT_IDS = {"gossip-2-4", "powersgd-2-4"}
TOGETHER = 8  # by 64 at a time the compiler makes all take half as long again


class Case(NamedTuple):
    """An algorithm with settings and a number of workers.

    Attributes:
        name: its name in the registry.
        number: the place of the settings among those of the recurrence.
        workers: the number of workers.
        recurrence: the paper's, called with the workers and the settings.
        settings: arguments of both.
        departures: further arguments of the recurrence.
        optimizer: the inner one; None: heavy ball.
    """

    name: str
    number: int
    workers: int
    recurrence: Callable[..., Iterator[Any]]
    settings: dict[str, Any]
    departures: dict[str, Any]
    optimizer: optax.GradientTransformation | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{self.number}-{self.workers}"

    def make(self) -> tuple[Strategy, optax.GradientTransformation]:
        rate = self.settings.get("learning_rate", LR)
        optimizer = self.optimizer or optax.sgd(rate, momentum=MOMENTUM)
        return syncalgos.ALGORITHMS[self.name](**self.settings, axis=AXIS), optimizer

    def compute(self) -> list[np.ndarray]:
        """The recurrence's centers and replicas, as `train_together` gives them."""
        arguments = {"workers": self.workers, **self.settings, **self.departures}
        path = [(center, list(theta)) for center, theta in self.recurrence(**arguments)]
        centers, replicas = (np.array(x) for x in zip(*path, strict=True))
        return [np.repeat(centers[:, None], self.workers, axis=1), replicas]


def list_cases() -> Iterator[Any]:
    """The first settings with 1 to 4 workers, the others with 2 or 4 in turn.

    A graph of its own has 4 workers. Only the first settings with 4 workers are not
    slow, in which all terms of an update are alive, and FURTHER_DEFAULT_IDS. With 1
    and 3 they are long, and with 2 where the second settings have as many.
    """

    def mark_case(case: Case, is_default: bool, has_second_of_two: bool = False) -> Any:
        is_long = case.workers in ((1, 2, 3) if has_second_of_two else (1, 3))
        mark = pytest.mark.long if is_long else pytest.mark.slow
        marks = [] if is_default or case.id in FURTHER_DEFAULT_IDS else [mark]
        return pytest.param(case, id=case.id, marks=marks)

    for name in syncalgos.ALGORITHMS:
        module = importlib.import_module(f"recurrences.{name}")
        pairs = [x if isinstance(x, tuple) else (x, {}) for x in module.SETTINGS]
        for number, (settings, departures) in enumerate(pairs):
            counts = (1, 2, 3, 4)
            if number > 0:
                counts = (2,) if number % 2 else (4,)
            is_named = isinstance(settings.get("topology", ""), str)
            if not is_named or "workers" in departures:
                counts = (departures.get("workers", 4),)
            has_second_of_two = not number and any(
                "workers" not in x for _, x in pairs[1:2]
            )
            for workers in counts:
                case = Case(
                    name=name,
                    number=number,
                    workers=workers,
                    recurrence=module.recurrence,
                    settings=settings,
                    departures=departures,
                )
                yield mark_case(case, (number, workers) == (0, 4), has_second_of_two)
    for number, settings in enumerate(des_loc.ADAM_SETTINGS, len(des_loc.SETTINGS)):
        for workers in (1, 2, 3, 4):
            case = Case(
                name="des_loc",
                number=number,
                workers=workers,
                recurrence=des_loc.adam_recurrence,
                settings=settings,
                departures={},
                optimizer=optax.adam(LR),
            )
            is_default = settings == des_loc.ADAM_SETTINGS[-1] and workers == 4
            yield mark_case(case, is_default)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
) -> Callable[[Case], tuple[np.ndarray, np.ndarray]]:
    """Returns trained(case): its centers and replicas after each step.

    If one case cannot be trained, each is trained alone: only that one fails.
    """
    waiting_batches = []
    sorted_cases = sorted(chosen_values(request, "case"), key=get_workers)
    for _, cases_of_a_count in groupby(sorted_cases, get_workers):
        waiting_batches += split_cases(list(cases_of_a_count), TOGETHER)
    results = {}

    def get_trained(case: Case) -> tuple[np.ndarray, np.ndarray]:
        if case.id not in results:
            batch = next((x for x in waiting_batches if case in x), [case])
            waiting_batches[:] = [x for x in waiting_batches if x is not batch]
            try:
                pairs = {batch_case.id: batch_case.make() for batch_case in batch}
                results.update(train_together(pairs, case.workers))
            except Exception:
                if len(batch) == 1:
                    raise
                return get_trained(case)
        return results[case.id]

    return get_trained


def split_cases(cases: list[Case], size: int) -> list[list[Case]]:
    """Cuts a list into lists of at most so many."""
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def train_together(
    pairs: dict[str, tuple[Strategy, optax.GradientTransformation]], workers: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Trains each of some strategies on its own, all in one compiled program.

    Args:
        pairs: of a strategy and its inner optimizer.
        workers: the number of workers, laid over one axis.

    Returns:
        For each, the workers' centers and replicas, (steps, workers, size).
    """
    strategies = {name: strategy for name, (strategy, _) in pairs.items()}
    optimizers = {name: optimizer for name, (_, optimizer) in pairs.items()}
    strategy = joint_strategies.strategies(strategies)
    optimizer = joint_strategies.optimizers(optimizers)

    def gradients(params: dict[str, Any], batch: Any) -> dict[str, Any]:
        stacked_params = jax.tree.map(lambda *x: jnp.stack(x), *params.values())
        stacked_grads = jax.vmap(jax.grad(loss), (0, None))(stacked_params, batch)
        return {
            name: jax.tree.map(lambda x, i=i: x[i], stacked_grads)
            for i, name in enumerate(params)
        }

    def worker(batches: Any) -> dict[str, tuple[Any, Any]]:
        params = dict.fromkeys(pairs, jax.tree.map(jnp.asarray, initial_params()))
        start = Replica(params, optimizer.init(params)), strategy.init(params)
        replica, center = local_steps(strategy, optimizer, gradients, start, batches)
        return {name: (center[name], replica.params[name]) for name in pairs}

    def flatten_by_step(tree: Any) -> np.ndarray:
        arrays = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), tree)
        return flatten(arrays, lead=2)

    def split_by_worker(x: np.ndarray) -> jax.Array:
        rows = x.reshape(STEPS, workers, -1, *x.shape[2:])
        return jnp.asarray(np.moveaxis(rows, 1, 0))  # (workers, steps, batch, …)

    batches = split_by_worker(X), split_by_worker(TARGET)
    outcome = jax.jit(jax.vmap(worker, axis_name=AXIS))(batches)
    return {
        name: (flatten_by_step(center), flatten_by_step(replica))
        for name, (center, replica) in outcome.items()
    }


@pytest.mark.parametrize("case", list(list_cases()))
def test_algorithm_matches_its_recurrence(case, trained):
    expected, replicas = case.compute()
    centers, trained_replicas = trained(case)
    errors = [
        relative_error(*pair) for pair in zip(trained_replicas, replicas, strict=True)
    ]
    wrong_steps = [step for step, error in enumerate(errors) if not error <= TOLERANCE]
    assert not wrong_steps, f"replicas after these steps, from 0: {wrong_steps}"
    if case.recurrence is fedavg.recurrence:  # its center in a round is the engine's
        ends = slice(case.settings["period"] - 1, None, case.settings["period"])
        centers = centers[ends]
        expected = expected[ends]
    assert relative_error(centers, expected) <= TOLERANCE


def test_choco_sgd_whose_peers_know_nothing_is_its_papers():
    case = Case("choco_sgd", 0, 4, choco_sgd.recurrence, choco_sgd.SETTINGS[0][0], {})
    strategy, optimizer = case.make()

    def init_to_zeros(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, strategy.init(params))

    pairs = {"": (strategy._replace(init=init_to_zeros), optimizer)}
    _, replicas = train_together(pairs, 4)[""]
    _, expected = case.compute()
    assert relative_error(replicas, expected) <= TOLERANCE


def test_zero_one_adam_in_its_papers_order_does_not_move_before_it_freezes_v():
    """So that the recurrence departs from it: see its docstring."""
    for center, _ in zero_one_adam.recurrence(2, LR, variance_steps=STEPS):
        np.testing.assert_array_equal(center, START)


@pytest.mark.slow
@pytest.mark.parametrize("settings", fedavg.SETTINGS[:1])
def test_the_engine_s_center_of_fedavg_is_of_those_who_take_part(settings):
    path = [center for center, _ in fedavg.recurrence(4, **settings)]
    strategy = syncalgos.fedavg(**settings)
    optimizer = optax.sgd(LR, momentum=MOMENTUM)
    sync_steps = tuple(range(2, STEPS + 1, 2))
    trained_run = train(
        strategy, optimizer, 4, look_steps=sync_steps, batches=(X, TARGET)
    )
    assert relative_error(trained_run.centers, np.array(path)[1::2]) <= TOLERANCE
