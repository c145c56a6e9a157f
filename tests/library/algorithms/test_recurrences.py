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
workers_of = attrgetter("workers")
# A graph that mixes after the step, and a matrix too small to be worth compression.
MORE = {"gossip-2-4", "powersgd-2-4"}
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

    def made(self) -> tuple[Strategy, optax.GradientTransformation]:
        rate = self.settings.get("learning_rate", LR)
        inner = self.optimizer or optax.sgd(rate, momentum=MOMENTUM)
        return syncalgos.ALGORITHMS[self.name](**self.settings, axis=AXIS), inner

    def followed(self) -> list[np.ndarray]:
        """The recurrence's centers and replicas, as `train_together` gives them."""
        given = {"workers": self.workers, **self.settings, **self.departures}
        path = [(center, list(theta)) for center, theta in self.recurrence(**given)]
        centers, replicas = (np.array(x) for x in zip(*path, strict=True))
        return [np.repeat(centers[:, None], self.workers, axis=1), replicas]


def cases() -> Iterator[Any]:
    """The first settings with 1 to 4 workers, the others with 2 or 4 in turn.

    A graph of its own has 4 workers. Only the first settings with 4 workers are not
    slow, in which all terms of an update are alive, and those of MORE. With 1 and 3
    they are long, and with 2 where the second settings have as many.
    """

    def of_tier(case, by_default, twos=False):
        is_long = case.workers in ((1, 2, 3) if twos else (1, 3))
        mark = pytest.mark.long if is_long else pytest.mark.slow
        marks = [] if by_default or case.id in MORE else [mark]
        return pytest.param(case, id=case.id, marks=marks)

    for name in syncalgos.ALGORITHMS:
        module = importlib.import_module(f"recurrences.{name}")
        pairs = [x if isinstance(x, tuple) else (x, {}) for x in module.SETTINGS]
        for number, (settings, own) in enumerate(pairs):
            counts = ((4, 2)[number % 2],) if number else (1, 2, 3, 4)
            is_named = isinstance(settings.get("topology", ""), str)
            if not is_named or "workers" in own:
                counts = (own.get("workers", 4),)
            twos = not number and any("workers" not in x for _, x in pairs[1:2])
            for workers in counts:
                case = Case(name, number, workers, module.recurrence, settings, own)
                yield of_tier(case, (number, workers) == (0, 4), twos)
    for number, settings in enumerate(des_loc.ADAM_SETTINGS, len(des_loc.SETTINGS)):
        for workers in (1, 2, 3, 4):
            adam = des_loc.adam_recurrence, settings, {}, optax.adam(LR)
            case = Case("des_loc", number, workers, *adam)
            yield of_tier(case, (settings, workers) == (des_loc.ADAM_SETTINGS[-1], 4))


@pytest.fixture(scope="module")
def trained(request):
    """Returns trained(case): its centers and replicas after each step.

    If one case cannot be trained, each is trained alone: only that one fails.
    """
    by_count = groupby(
        sorted(chosen_values(request, "case"), key=workers_of), workers_of
    )
    waiting = [part for _, x in by_count for part in batched(list(x), TOGETHER)]
    found = {}

    def of(case):
        if case.id not in found:
            together = next((x for x in waiting if case in x), [case])
            waiting[:] = [x for x in waiting if x is not together]
            try:
                made = {each.id: each.made() for each in together}
                found.update(train_together(made, case.workers))
            except Exception:
                if len(together) == 1:
                    raise
                return of(case)
        return found[case.id]

    return of


def batched(cases, most):
    """Cuts a list into lists of at most so many."""
    return [cases[i : i + most] for i in range(0, len(cases), most)]


def train_together(made, workers):
    """Trains each of some strategies on its own, all in one compiled program.

    Args:
        made: pairs of a strategy and its inner optimizer.
        workers: the number of workers, laid over one axis.

    Returns:
        For each, the workers' centers and replicas, (steps, workers, size).
    """
    strategy = joint_strategies.strategies({name: x for name, (x, _) in made.items()})
    optimizer = joint_strategies.optimizers({name: x for name, (_, x) in made.items()})

    def gradients(params, batch):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *params.values())
        found = jax.vmap(jax.grad(loss), (0, None))(stacked, batch)
        each = enumerate(params)
        return {name: jax.tree.map(lambda x, i=i: x[i], found) for i, name in each}

    def worker(batches):
        params = dict.fromkeys(made, jax.tree.map(jnp.asarray, initial_params()))
        start = Replica(params, optimizer.init(params)), strategy.init(params)
        replica, center = local_steps(strategy, optimizer, gradients, start, batches)
        return {name: (center[name], replica.params[name]) for name in made}

    def by_step(tree):
        found = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), tree)
        return flatten(found, lead=2)

    parts = [x.reshape(STEPS, workers, -1, *x.shape[2:]) for x in (X, TARGET)]
    own = tuple(jnp.asarray(np.moveaxis(x, 1, 0)) for x in parts)
    found = jax.jit(jax.vmap(worker, axis_name=AXIS))(own)
    return {name: tuple(map(by_step, both)) for name, both in found.items()}


@pytest.mark.parametrize("case", list(cases()))
def test_algorithm_matches_its_recurrence(case, trained):
    expected, replicas = case.followed()
    centers, found = trained(case)
    apart = [relative_error(*both) for both in zip(found, replicas, strict=True)]
    wrong = [step for step, error in enumerate(apart) if not error <= TOLERANCE]
    assert not wrong, f"replicas after these steps, from 0: {wrong}"
    if case.recurrence is fedavg.recurrence:  # its center in a round is the engine's
        ends = slice(case.settings["period"] - 1, None, case.settings["period"])
        centers = centers[ends]
        expected = expected[ends]
    assert relative_error(centers, expected) <= TOLERANCE


def test_choco_sgd_whose_peers_know_nothing_is_its_papers():
    case = Case("choco_sgd", 0, 4, choco_sgd.recurrence, choco_sgd.SETTINGS[0][0], {})
    strategy, inner = case.made()

    def nothing_known(params):
        return jax.tree.map(jnp.zeros_like, strategy.init(params))

    made = {"": (strategy._replace(init=nothing_known), inner)}
    _, replicas = train_together(made, 4)[""]
    assert relative_error(replicas, case.followed()[1]) <= TOLERANCE


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
    seen = tuple(range(2, STEPS + 1, 2))
    found = train(strategy, optimizer, 4, look_steps=seen, batches=(X, TARGET))
    assert relative_error(found.centers, np.array(path)[1::2]) <= TOLERANCE
