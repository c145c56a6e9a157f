"""Graphs of workers: weights by definition, gaps in closed form, mixing by permutes."""

import re
from collections.abc import Callable
from functools import partial
from math import cos, pi
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import graphs
from support.commands import ROOT
from support.mapped_workers import on_workers

import syncalgos as sa
from syncalgos._engine.placement.make_layout import Placement, make_layout
from syncalgos.collectives import _matchings, _topology
from syncalgos.graphs import ONE_WAY, SYMMETRIC

BY_DEFINITION = ("ring", "hypercube", "star", "complete")
BY_DEFINITION += ("exponential", "static_exponential")
SIZES = (1, 2, 3, 4, 5, 8, 16)


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_named_graphs_have_the_weights_of_their_definitions(name):
    for workers in SIZES:
        if name == "hypercube" and workers & (workers - 1):
            continue
        weights = sa.graph(name, workers).weights.reshape(-1, workers, workers)
        for step in range(2 * len(weights)):
            expected = graphs.matrix(name, step, workers)
            np.testing.assert_allclose(
                weights[step % len(weights)], expected, atol=1e-15
            )


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_two_workers_send_to_each_other_once_and_agree(name):
    """A ring of two has one edge, and 1 / (1 + d) is a half."""
    np.testing.assert_array_equal(sa.graph(name, 2).weights, np.full((2, 2), 0.5))
    assert sa.graph(name, 2).degree == 1
    strategy = sa.gossip(topology=name)
    counts = sa.communication(strategy, np.ones(10, np.float32), workers=2, steps=3)
    assert counts.by_collective["permute"].bytes_per_worker == 3 * 40


def test_the_guide_explains_every_name():
    guide = (ROOT / "docs/strategies.md").read_text("utf-8")
    assert {*re.findall(r'^\| `"(\w+)"` \|', guide, re.M)} == {*ONE_WAY, *SYMMETRIC}


@pytest.mark.parametrize(
    ("workers", "rows"), [(4, 2), (6, 2), (12, 3), (16, 4), (7, 1)]
)
def test_a_torus_is_a_grid_whose_ends_are_joined(workers, rows):
    length = workers // rows
    pairs = []
    for i in range(workers):
        row, column = divmod(i, length)
        pairs.append((i, row * length + (column + 1) % length))
        pairs.append((i, (row + 1) % rows * length + column))
    expected = graphs.metropolis(pairs, workers)
    np.testing.assert_allclose(sa.graph("torus", workers).weights, expected, atol=1e-15)


def test_erdos_renyi_graphs_are_connected_and_drawn_by_the_seed():
    drawn_graphs = [sa.graph("erdos_renyi", 16, seed=seed) for seed in range(4)]
    assert all(graph.gap > 0.01 for graph in drawn_graphs)
    assert len({graph.weights.tobytes() for graph in drawn_graphs}) == 4
    again = sa.graph("erdos_renyi", 16, seed=3).weights
    np.testing.assert_array_equal(drawn_graphs[3].weights, again)
    for graph in drawn_graphs:
        expected = graphs.metropolis(np.argwhere(graph.weights).tolist(), 16)
        np.testing.assert_allclose(graph.weights, expected, atol=1e-15)


GAPS = {  # of 16 workers; a torus of k² is the product of two rings
    "ring": 2 / 3 * (1 - cos(pi / 8)),
    "star": 1 / 16,
    "torus": 2 / 5 * (1 - cos(pi / 2)),
    "exponential": 1,  # of 2ᵏ workers the exact mean in k steps
    "static_exponential": 2 / 5,
}


@pytest.mark.parametrize("name", GAPS)
def test_gaps_are_those_of_closed_forms(name):
    assert sa.graph(name, 16).gap == pytest.approx(GAPS[name], abs=1e-9)


# Weights and pairs, drawn.


@st.composite
def one_way(draw, workers):
    """A doubly stochastic matrix: some permutations, weighed."""
    count = draw(st.integers(1, 4))
    drawn = [draw(st.permutations(range(workers))) for _ in range(count)]
    shares = np.array([draw(st.integers(1, 5)) for _ in drawn], float)
    weights = np.zeros((workers, workers))
    for sources, share in zip(drawn, shares / shares.sum(), strict=True):
        weights[np.arange(workers), sources] += share
    return weights


@st.composite
def edges(draw, workers):
    """The weights of edges."""
    ends = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    pairs = draw(st.lists(ends.filter(lambda pair: pair[0] != pair[1]), min_size=1))
    return sa.graph(pairs, workers).weights


def drawn_weights(workers):
    return st.one_of(one_way(workers), edges(workers))


@settings(max_examples=40, derandomize=True)
@given(st.data(), st.integers(2, 12))
def test_weights_are_cut_into_as_many_permutations_as_the_largest_degree(data, workers):
    weights = data.draw(drawn_weights(workers))
    links = _matchings.find_links(weights[None], workers)[0]
    heard = (weights > 0) & ~np.eye(workers, dtype=bool)
    assert len(links) == max(heard.sum(0).max(), heard.sum(1).max())
    together = np.diag(np.diag(weights))
    for link in links:
        assert sorted(link.sources) == list(range(workers))
        together[np.arange(workers), link.sources] += link.weights
    np.testing.assert_allclose(together, weights, atol=1e-15)
    # Where all links go both ways nothing is sent that nobody takes.
    if (weights == weights.T).all():
        everyone = np.arange(workers)
        assert all(((x.weights > 0) | (x.sources == everyone)).all() for x in links)


def over_workers(function: Callable, weights: np.ndarray, *values: Any) -> jax.Array:
    """Applies one of `topology` to each worker's values, by the weights."""

    def worker(*worker_values: Any) -> jax.Array:
        return function(*worker_values, weights, 0, "workers")

    return jax.vmap(worker, axis_name="workers")(*map(jnp.asarray, values))


@settings(max_examples=5, derandomize=True)
@given(st.data(), st.sampled_from([3, 4, 6]), st.integers(0, 99))
def test_mixing_by_permutes_is_the_dense_product(data, workers, seed):
    weights = data.draw(drawn_weights(workers))[None]
    values = np.random.default_rng(seed).normal(size=(workers, 5)).astype(np.float32)
    expected = weights[0] @ values.astype(np.float64) - values
    moves = over_workers(_topology.moves, weights, values)
    np.testing.assert_allclose(moves, expected, atol=2e-6)
    # All hold the same: nothing moves, exactly.
    moves = over_workers(_topology.moves, weights, np.tile(values[:1], (workers, 1)))
    np.testing.assert_array_equal(moves, np.zeros((workers, 5)))


@pytest.mark.parametrize("fails", [None, 1])
def test_givers_share_their_sums_by_columns(fails):
    """Rows do not add up to 1; who fails to give keeps its whole sum."""
    weights = graphs.COLUMNS[:1]
    values = np.float32([1, 10, 100, 1000])
    sends = np.arange(4) != fails
    shares = weights[0].copy()
    shares[:, ~sends] = np.eye(4)[:, ~sends]
    sums = over_workers(_topology.push, weights, values, sends)
    np.testing.assert_allclose(sums, shares @ values, rtol=1e-6)


MIXED_NAMES = (
    "static_exponential",
    "torus",
    "exponential",
)  # shifts, exchanges, by step


@pytest.mark.slow
def test_mixing_is_the_same_on_devices_and_lanes():
    """Collectives are tested in more layouts, and graphs know of no others."""
    values = np.random.default_rng(1).normal(size=(6, 7)).astype(np.float32)

    def program(worker_values: Any, shared: Any) -> tuple[list, list]:
        moves = [
            _topology.moves(worker_values, name, 1, sa.WORKERS) for name in MIXED_NAMES
        ]
        return moves, [
            _topology.push(worker_values, True, name, 1, sa.WORKERS)
            for name in MIXED_NAMES
        ]

    def mix_on(backend: str, devices: int) -> list[np.ndarray]:
        layout = make_layout(6, backend, Placement(range(devices)))
        result = on_workers(layout, program, values.reshape(*layout.shape, 7))
        return [np.asarray(x).reshape(6, 7) for x in jax.tree.leaves(result)]

    on_lanes = mix_on("vmap", 1)
    on_devices = mix_on("shard_map", 2)
    np.testing.assert_array_equal(on_lanes, on_devices)
    for name, move, pushed in zip(MIXED_NAMES, on_lanes[:3], on_lanes[3:], strict=True):
        step_weights = sa.graph(name, 6).weights
        weights = step_weights if step_weights.ndim == 2 else step_weights[1]
        wide_values = values.astype(np.float64)
        np.testing.assert_allclose(move, weights @ wide_values - wide_values, atol=2e-6)
        np.testing.assert_allclose(pushed, weights @ wide_values, atol=2e-6)


PARAMS = {"w": np.ones((10, 10), np.float32)}
# A strategy, its graph, and how often it sends its params to each peer.
SENDING_FACTORIES = [
    (sa.gossip, "torus", 1),
    (sa.gradient_tracking, "star", 2),
    (sa.d2, "complete", 1),
    (sa.push_sum, [(0, 1), (1, 2)], 1.01),  # and its weight
    (partial(sa.qg_dsgdm, learning_rate=0.1), "torus", 1),
    (partial(sa.gasloc, 1), "star", 1),
]


@pytest.mark.parametrize(("factory", "graph", "times"), SENDING_FACTORIES)
def test_each_peer_is_sent_the_params_so_often(factory, graph, times):
    counts = sa.communication(factory(topology=graph), PARAMS, workers=12, steps=3)
    assert counts.bytes_per_worker == 3 * sa.graph(graph, 12).degree * times * 400
    assert [*counts.by_collective] == ["permute"]


def test_a_graph_that_changes_sends_what_each_step_needs():
    weights = np.stack([sa.graph(name, 8).weights for name in ("ring", "complete")])
    counts = sa.communication(
        sa.gossip_pga(4, topology=weights), PARAMS, workers=8, steps=4
    )
    assert np.diff(counts.per_step, prepend=0).tolist() == [800, 2800, 800, 700]
    assert sa.graph(weights, 8).gap == pytest.approx(1)


def test_a_function_of_the_step_is_the_sequence_of_one_period():
    weights = [sa.graph(name, 8).weights for name in ("ring", "complete", "star")]
    changing_graph = sa.graph(lambda step: weights[step % 3], 8)
    np.testing.assert_array_equal(changing_graph.weights, weights)
    fixed = sa.d2(topology=lambda step: weights[0])  # which must not change
    assert sa.communication(fixed, PARAMS, workers=8, steps=2).bytes_per_worker == 1600


FAIR = np.full((2, 2), 0.5)
WRONG_ROW = np.array([[0.5, 0.5], [0.4, 0.5]])
REFUSED = {
    "unknown topology 'rin'; did you mean 'ring'": "rin",
    r"row \[1\] adds up to 0.9, not 1": WRONG_ROW,
    r"column \[0\] adds up to 1.1, not 1": [[0.6, 0.4], [0.5, 0.5]],
    r"column \[0\] of matrix 1 adds up": [np.eye(2), [[0.5, 0.5], [0.0, 1.0]]],
    r"weight \[0, 1\] must be at least 0, got -0.5": [[1.5, -0.5], [-0.5, 1.5]],
    r"weight \[0, 0\] must be at least 0, got nan": [[np.nan, 1.0], [1.0, 0.0]],
    r"matrix \(workers, workers\), or several of them, got shape \(2, 3\)": np.ones(
        (2, 3)
    ),
    r"an edge joins two workers, numbered from 0, got \(1, 1\)": [(0, 1), (1, 1)],
    r"\[\[1, 0\], \[0, 1\]\] may be edges or weights": np.eye(2, dtype=int),
    "may be edges or weights": [(0, 1), (1, 0)],
    "or a function from the step to one, got": lambda step: None,
    "must repeat within 64 steps": lambda step: np.eye(2) if step < 70 else FAIR,
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_graph_that_cannot_be_used_is_refused_at_once(message):
    with pytest.raises(ValueError, match=message) as error:
        sa.gossip(topology=REFUSED[message])
    assert "\n" not in str(error.value)


ELSEWHERE = {
    "the weights are for 4 workers, but there are 6": graphs.WEIGHTS,
    "an edge goes to worker 7, but the last of 6 is 5": [(0, 7)],
    "a hypercube has 2, 4, 8, … workers, but there are 6": "hypercube",
}


@pytest.mark.parametrize("message", ELSEWHERE)
def test_a_graph_of_other_workers_is_refused_before_anything_is_compiled(message):
    strategy = sa.gossip(topology=ELSEWHERE[message])
    with pytest.raises(ValueError, match=message) as error:
        sa.DataParallel(
            lambda params, batch: 0.0, optax.sgd(0.1), strategy, workers=6
        ).init(PARAMS)
    assert "\n" not in str(error.value)


def test_algorithms_refuse_what_their_theory_does_not_allow():
    with pytest.raises(ValueError, match=r"symmetric: weight \[0, 1\] is 0.6, but \[1"):
        sa.d2(topology=graphs.ONE_WAY)
    with pytest.raises(ValueError, match="must not change, got 2 matrices"):
        sa.choco_sgd(topology=[graphs.WEIGHTS, graphs.WEIGHTS])
    with pytest.raises(ValueError, match="unknown topology 'exponential'"):
        sa.gasloc(topology="exponential")
    with pytest.raises(ValueError, match=r"keep a share: weight \[0, 0\] is 0"):
        sa.push_sum(topology=[[0.0, 1.0], [1.0, 0.0]])
    sa.push_sum(topology=WRONG_ROW / WRONG_ROW.sum(0))  # columns suffice
