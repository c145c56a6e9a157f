"""Workers that do not wait: the server's steps, speeds, and rounds that end alone."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recurrences import LR, MOMENTUM, START, STEPS, TARGET, X, async_diloco, palsgd
from support.problems import relative_error, train
from support.tiers import tiers
from support.trees import assert_equal

import syncalgos as sa
from syncalgos.algorithms import _asynchrony as asynchrony
from syncalgos.algorithms.async_diloco import Nesterov, init_server

pytestmark = pytest.mark.usefixtures("float64")

ROUNDING = 1e-12


class PrintedServer(NamedTuple):
    """A server of HALoS, and what its authors' code gives.

    Attributes:
        early_momentum: the share of momentum before the buffer is full.
        start: the server's first params.
        updates: the workers' updates in turn.
        params: the server's params after each of them.
    """

    early_momentum: float
    start: Sequence[float]
    updates: Sequence[Sequence[float]]
    params: Sequence[Sequence[float]]


# With lr 0.5, momentum 0.9, buffer 2: utnslab/halos, src/halos/opt.py at 4b5bf73, run
# in NumPy.
PRINTED_SERVERS = [
    PrintedServer(
        early_momentum=0.0,
        start=[1.0, -2.0],
        updates=[[0.1, 0.2], [0.3, -0.1], [0.2, 0.2], [0.1, 0.1]],
        params=[[0.975, -2.05], [0.81, -2.0475], [0.76, -2.0975], [0.5865, -2.21025]],
    ),
    PrintedServer(
        early_momentum=0.25,
        start=[1.0],
        updates=[[0.1]] * 6,
        params=[[0.975], [0.91625], [0.88], [0.790875], [0.7445], [0.6280375]],
    ),
]


@pytest.mark.parametrize(
    "printed", PRINTED_SERVERS, ids=["no early momentum", "early momentum"]
)
def test_delayed_nesterov_is_the_authors(printed):
    start = np.array(printed.start)
    server = init_server(start)
    rule = Nesterov(0.5, 0.9, 2, printed.early_momentum)
    oracle = async_diloco.Server(start, 0.5, 0.9, 2, printed.early_momentum)
    for update, params in zip(printed.updates, printed.params, strict=True):
        server = rule.step(server, np.array(update))
        np.testing.assert_allclose(server.params, params, rtol=1e-12)
        np.testing.assert_allclose(oracle.push(np.array(update)), params, rtol=1e-12)


def test_an_update_that_is_not_finite_leaves_the_server_as_it_was():
    rule = Nesterov(0.5, 0.9, 2)
    server = rule.step(init_server(np.ones(2)), np.ones(2))
    assert_equal(rule.step(server, np.array([1.0, np.nan])), server)


RESTING = {
    palsgd: {"period": 4, "learning_rate": LR, "chance": 0.4},
    async_diloco: {"period": 3, "slowest": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("recurrence", tiers(RESTING, [palsgd]))
def test_the_optimizers_state_rests_as_its_worker_does(recurrence):
    """At a pull, and while others train."""
    optimizer = optax.sgd(LR, momentum=MOMENTUM)
    zeros = [np.zeros_like(START) for _ in range(3)]
    settings = RESTING[recurrence]
    *_, (center, theta) = recurrence.recurrence(3, momentum=zeros, **settings)
    name = recurrence.__name__.split(".")[-1]
    strategy = sa.ALGORITHMS[name](**settings, optimizer=optimizer)
    trained = train(strategy, optimizer, 3, look_steps=(STEPS,), batches=(X, TARGET))
    assert relative_error(trained.centers[0], center) <= ROUNDING
    assert relative_error(trained.replicas[0], np.array(theta)) <= ROUNDING


@pytest.mark.slow
def test_a_start_in_step_leaves_the_optimizers_state_to_who_rests_first():
    """Momentum under a constant gradient only grows; one made anew would be 0."""
    optimizer = optax.sgd(LR, momentum=MOMENTUM)
    late = sa.async_diloco(4, slowest=0.25, optimizer=optimizer)
    strategy = sa.chain(sa.until(sa.sync_sgd(), 8), sa.after(late, 8))
    loss = sa.stateless(lambda params, batch: jnp.sum(params * batch[0]))
    trainer = sa.DataParallel(loss, optimizer, strategy, workers=4, backend="vmap")
    state = trainer.init(jnp.zeros(1))
    old_traces = np.zeros(4)
    for _ in range(5):
        state, _ = trainer.run(state, jnp.ones((2, 4, 1)))
        traces = np.ravel(state.replica.opt_state[0].trace)
        assert (traces >= old_traces).all() and traces[0] > old_traces[0]
        old_traces = traces


def test_a_clock_is_exact_at_any_step():
    clock = asynchrony.even_speeds(5, 0.3, 8, paced=False)
    assert clock.speeds == (1024, 845, 666, 487, 307)
    for step in (0, 1, 1023, 1024, 5_000_000, 2**31 - 2):
        expected = [step * s // 1024 for s in clock.speeds]
        np.testing.assert_array_equal(clock.finished_steps(jnp.int32(step)), expected)


def test_a_clock_tells_when_each_worker_ends_a_local_step():
    clock = asynchrony.even_speeds(5, 0.3, 8, paced=False)
    for step in (0, 1, 5, 1020, 1022, 1023, 5_000_001):
        has_step = [clock.makes_step(jnp.int32(step + k)) for k in range(4)]
        np.testing.assert_array_equal(
            clock.waiting_steps(jnp.int32(step)), np.argmax(has_step, 0)
        )


def test_paced_rounds_end_at_almost_the_same_time():
    """DyLU: nobody is more than a step of his own behind the fastest."""
    clock = asynchrony.even_speeds(4, 0.25, 16, paced=True)
    assert clock.periods == (16, 12, 8, 4)
    arrivals = np.array([clock.ends_round(jnp.int32(t)) for t in range(64)])
    np.testing.assert_array_equal(arrivals.sum(0), 4)
    np.testing.assert_array_equal(np.flatnonzero(arrivals.all(1)), [15, 31, 47, 63])


def test_a_phase_holds_slow_workers_back():
    """Four steps of the phase move a worker of half the speed by two."""
    trainer = sa.DataParallel(
        sa.stateless(lambda params, batch: params["w"] - params["w"] * batch.mean()),
        optax.sgd(1.0),
        sa.until(sa.async_diloco(99, slowest=0.5), 4),
        workers=2,
        backend="vmap",
    )
    state, _ = trainer.run(trainer.init({"w": jnp.zeros(())}), np.zeros((4, 2)))
    np.testing.assert_array_equal(state.replica.params["w"].ravel(), [-4, -2])
