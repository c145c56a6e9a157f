"""Peers: strategies whose workers are processes that a transport joins."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import peer_training
from support.tiers import tiers

import syncalgos
from syncalgos import collectives

# An outer step, and signs as packed bits.
OF_EACH_KIND = "diloco", "sign_sgd"
# Sums of gradients, a graph, pushed sums, draws, clocks of workers, chunks, matchings,
# votes, and weights.
SLOW = (
    "sync_sgd",
    "gossip",
    "push_sum",
    "sparta",
    "async_diloco",
    "demo",
    "noloco",
    "dynamic_averaging",
    "fedavg",
)


@pytest.mark.parametrize("name", tiers(syncalgos.ALGORITHMS, OF_EACH_KIND, SLOW))
def test_algorithm_over_threads_agrees_with_data_parallel(name):
    make = functools.partial(peer_training.make_strategy, name)
    expected = peer_training.train_by_data_parallel(make)
    runs = peer_training.over_threads(
        functools.partial(peer_training.train_over, make=make)
    )
    assert peer_training.difference(runs, expected) < 1e-5
    sent_bytes = peer_training.count_largest_sends(runs)
    np.testing.assert_allclose(sent_bytes, expected.sent_bytes, rtol=1e-9)


class Call(NamedTuple):
    """A collective of a tree and an axis, and what a worker sends for each byte."""

    function: Any
    sent_share: float


WORKERS = 4
SOURCES = [[2, 0, 3, 1], [1, 0, 3, 2]]
CALLS = {
    "mean": Call(collectives.mean, 2 * 3 / 4),
    "agreed": Call(collectives.agreed, 2 * 2 * 3 / 4),
    "group_mean": Call(lambda x, axis: collectives.group_mean(x, 2, axis), 1),
    "gather": Call(collectives.gather, 3),
    "shift": Call(lambda x, axis: collectives.shift(x, 3, axis), 1),
    "exchange": Call(lambda x, axis: collectives.exchange(x, SOURCES, 1, axis), 1),
    "all_to_all": Call(collectives.all_to_all, 3 / 4),
}


def make_rows(dtype: Any) -> jax.Array:
    """Makes numbers that a mean of bfloat16 can hold, (workers, workers, 2)."""
    return (jnp.arange(WORKERS * WORKERS * 2) % 7).reshape(WORKERS, WORKERS, 2) * (
        jnp.ones((), dtype)
    )


@pytest.mark.parametrize(
    "kind",
    [
        peer_training.Threads,
        pytest.param(peer_training.Gathering, marks=pytest.mark.slow),
    ],
)
def test_collectives_over_threads_have_the_values_of_a_mapped_axis(kind):
    trees = {
        "float32": make_rows(jnp.float32),
        "bfloat16": make_rows(jnp.bfloat16),
        "bool": make_rows(jnp.float32) > 3,
        "uint8": make_rows(jnp.uint8),
        "empty": jnp.zeros((WORKERS, WORKERS, 0)),
    }
    trees["key"] = jax.vmap(lambda row: jax.vmap(jax.random.key)(row[:, 0]))(
        make_rows(jnp.int32)
    )

    def work(transport: Any) -> dict[str, Any]:
        peers = syncalgos.Peers(transport)
        worker_trees = jax.tree.map(lambda x: x[transport.rank], trees)

        def call_all(worker_trees: Any) -> dict[str, Any]:
            return {
                name: call.function(worker_trees, peers) for name, call in CALLS.items()
            }

        return peers.run(
            peer_training.compile_first(transport, call_all, worker_trees), worker_trees
        )

    results = peer_training.over_threads(work, WORKERS, kind)

    def call_all_mapped(worker_trees: Any) -> dict[str, Any]:
        return {name: call.function(worker_trees, "x") for name, call in CALLS.items()}

    results_by_name = jax.jit(jax.vmap(call_all_mapped, axis_name="x"))(trees)
    for name, expected in results_by_name.items():
        for rank, result in enumerate(results):
            for dtype, x in result[name].items():
                y = expected[dtype][rank]
                assert (x.dtype, x.shape) == (y.dtype, y.shape), (name, dtype)
                if dtype == "key":
                    x = jax.random.key_data(x)
                    y = jax.random.key_data(y)
                np.testing.assert_array_equal(x, y, err_msg=f"{name} of {dtype}")


@pytest.mark.parametrize("name", CALLS)
def test_collective_sends_each_byte_once_or_as_a_ring_does(name):
    x = make_rows(jnp.float32)

    def work(transport: Any) -> float:
        peers = syncalgos.Peers(transport)
        worker_rows = x[transport.rank]

        def call(worker_rows: jax.Array) -> jax.Array:
            return CALLS[name].function(worker_rows, peers)

        peers.run(
            peer_training.compile_first(transport, call, worker_rows), worker_rows
        )
        return transport.sent_bytes

    sent_bytes = peer_training.over_threads(work, WORKERS)
    assert sent_bytes == [CALLS[name].sent_share * x[0].nbytes] * WORKERS


@pytest.mark.slow
def test_algorithm_over_a_transport_that_only_gathers_agrees():
    make = functools.partial(peer_training.make_strategy, "gossip")
    expected = peer_training.train_by_data_parallel(make)
    train = functools.partial(peer_training.train_over, make=make)
    runs = peer_training.over_threads(train, kind=peer_training.Gathering)
    assert peer_training.difference(runs, expected) < 1e-5


class Failing:
    """A transport that fails once it was called a number of times."""

    rank = 0
    size = 2

    def __init__(self, calls: int = 0):
        self.calls = calls

    def all_gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("reset by peer\nin two lines")
        return [np.stack([x, x]) for x in arrays]

    def all_reduce(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [2 * x.view(np.float32)[0] for x in self.all_gather(arrays)]


LINE = (
    r"all_gather among 2 processes failed \(ConnectionError: reset by peer\): a peer "
    r"may be lost, or waits elsewhere; the arrays before this step are still good: "
    r"join the processes again, and repeat the step with a strategy over Peers of the "
    r"new transport"
)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_error_of_the_transport_is_one_line_and_the_next_call_works(is_jitted, caplog):
    transport = Failing()
    peers = syncalgos.Peers(transport)

    def gather_twice(x: jax.Array) -> jax.Array:
        return collectives.gather(collectives.gather(x, peers), peers)

    function = jax.jit(gather_twice) if is_jitted else gather_twice
    x = jnp.arange(3.0)
    with pytest.raises(syncalgos.TransportError, match=f"^{LINE}$") as caught:
        peers.run(function, x)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert transport.calls == -1  # nothing is sent after an error
    assert caplog.records == []  # jax logs errors of callbacks
    transport.calls = 2
    np.testing.assert_array_equal(peers.run(function, x)[1, 1], x)


def test_error_without_run_is_raised_and_names_the_collective():
    peers = syncalgos.Peers(Failing())

    # In a thread of its own, for which jax keeps the failed order of callbacks.
    def work(_: Any) -> None:
        jax.block_until_ready(collectives.gather(jnp.ones(3), peers))

    with pytest.raises(Exception, match="all_gather among 2 processes failed"):
        peer_training.over_threads(work, workers=1)


def test_error_of_the_function_itself_stays():
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        syncalgos.Peers(Failing()).run(fail)


class Wrong(Failing):
    """A transport that returns what it was given."""

    def all_gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


def test_results_of_a_transport_are_held_against_its_arguments():
    peers = syncalgos.Peers(Wrong())
    line = r"ValueError: it returned uint8\[12\] for uint8\[12\], not uint8\[2, 12\]"
    with pytest.raises(syncalgos.TransportError, match=line):
        peers.run(collectives.gather, jnp.ones(3), peers)


PEERS = syncalgos.Peers(Failing())


@pytest.mark.parametrize(
    "name", tiers(["bmuf", "async_diloco", "hierarchical", "fedavg"], ["bmuf"])
)
def test_communication_and_description_do_not_use_the_transport(name):
    over_peers = peer_training.make_strategy(name, axis=PEERS)
    over_workers = peer_training.make_strategy(name)
    params = peer_training.make_params()
    counted, expected = (
        syncalgos.communication(x, params, workers=4, steps=20)
        for x in (over_peers, over_workers)
    )
    np.testing.assert_array_equal(counted.per_step, expected.per_step)
    assert counted.calls == expected.calls
    described, plain = (
        syncalgos.describe(x, workers=4) for x in (over_peers, over_workers)
    )
    assert described.axis is PEERS
    assert [*described.acting_steps(20)] == [*plain.acting_steps(20)]


def test_effective_rate_does_not_use_the_transport():
    strategy = syncalgos.bmuf(4, axis=PEERS)
    result = syncalgos.effective_rate(strategy, optax.sgd(0.1), workers=4)
    assert result.gain == pytest.approx(4, rel=1e-3)


REFUSALS = {
    "DataParallel": lambda strategy: syncalgos.DataParallel(
        peer_training.loss, optax.sgd(0.1), strategy
    ),
    "stacked": syncalgos.stacked,
    "as_optimizer": lambda strategy: syncalgos.as_optimizer(strategy, optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_functions_that_map_the_axis_themselves_refuse_peers(name):
    line = f"^{name}: maps the strategy's axis itself, .*leave out axis=, or .*own$"
    with pytest.raises(ValueError, match=line):
        REFUSALS[name](syncalgos.chain(syncalgos.bmuf(4, axis=PEERS)))


@pytest.mark.parametrize(
    "axis", [syncalgos.WORKERS, "workers", syncalgos.Peers(Failing())]
)
def test_members_over_peers_and_another_axis_are_refused(axis):
    strategy = syncalgos.bmuf(4, axis=PEERS)
    with pytest.raises(ValueError, match="make one Peers, and give it as axis"):
        syncalgos.at_syncs(strategy, syncalgos.average("buffers", axis=axis))


def test_members_that_send_nothing_need_no_axis():
    reset = syncalgos.reset(optax.sgd(0.1, momentum=0.9))
    strategy = syncalgos.at_syncs(syncalgos.bmuf(4, axis=PEERS), reset)
    assert syncalgos.describe(strategy).axis is PEERS


class Copies:
    """As if all other processes held the same values; their number may change."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [np.stack([x] * self.size) for x in arrays]

    def all_reduce(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [x * self.size for x in arrays]


def test_a_jitted_step_is_traced_again_where_the_size_changes():
    """The mean of equal values is their value, whatever jit kept of another size."""
    transport = Copies(size=2)
    peers = syncalgos.Peers(transport)
    strategy = syncalgos.model_averaging(1, axis=peers)
    replica = syncalgos.Replica(jnp.array([1.0, 3.0]))
    state = strategy.init(replica.params)
    sync = jax.jit(strategy.sync)
    for size in (2, 4, 2):
        transport.size = size
        averaged, _ = peers.run(sync, replica, state, 0)
        np.testing.assert_array_equal(averaged.params, [1, 3])


class Bare:
    rank = 3
    size = 3

    def all_gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


@pytest.mark.parametrize(
    "transport, line",
    [
        (Bare(), "needs rank, size, all_gather and all_reduce, but .* has no all_red"),
        (type("Late", (Failing,), {"rank": 2})(), "must be less than its size, 2, got"),
    ],
)
def test_a_value_that_is_no_transport_is_refused(transport, line):
    with pytest.raises(ValueError, match=f"^Peers: .*{line}"):
        syncalgos.Peers(transport)
