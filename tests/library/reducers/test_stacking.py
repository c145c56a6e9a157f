"""Layers stacked in one leaf are treated as leaves of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from support.reducer_cases import assert_close, normal, of_gradients, run
from support.tiers import tiers
from support.tiny_tasks import drawing

import syncalgos
from experiments.training.config import parse
from experiments.training.plan import declaring
from syncalgos import communication, powersgd, reducers
from syncalgos.reducers import _stacking

LAYERS = 2
STACK = {"b": normal((LAYERS, 6), 2, seed=1), "w": normal((LAYERS, 5, 8), 2)}
STACKED = {"b": 1, "w": 1}


def split_layers(stack: dict[str, np.ndarray], lead: int = 2) -> dict[str, list]:
    """The same layers, each a leaf of its own, in the same order."""
    return {k: [*np.moveaxis(x, lead, 0)] for k, x in stack.items()}


def make_factory(factory: Callable, *leading: Any, **settings: Any) -> Callable:
    """Returns a factory of strategies that reduce gradients by a reducer."""
    return lambda **axis_settings: syncalgos.reduce_with(
        factory(*leading, **settings, **axis_settings)
    )


# Of 5 × 8 entries 13 are sent, of 2 × 5 × 8 entries 25.
STRATEGIES = {
    "demo": partial(syncalgos.demo, decay=0.9, chunk=4, top_k=3),
    "dgc": partial(syncalgos.dgc, density=0.31, dense_steps=0),
    "choco_sgd": partial(syncalgos.choco_sgd, density=0.31),
    "sign": make_factory(reducers.sign),
    "chunked_top_k": make_factory(reducers.chunked_top_k, 0.3, bits=2, chunk=16),
    "top_k": make_factory(reducers.top_k, 0.31),
    "top_k-int4": make_factory(reducers.top_k, 0.3, bits=4),
}


@pytest.mark.parametrize("name", tiers(STRATEGIES, ["choco_sgd", "demo", "top_k"]))
def test_stacked_layers_are_sent_as_leaves_of_their_own(name):
    make = STRATEGIES[name]
    stack = jax.tree.map(lambda x: x[0, 0], STACK)

    def count_bytes(strategy: syncalgos.Strategy, params: Any) -> float:
        return communication(strategy, params, workers=2, steps=1).bytes_per_worker

    expected = count_bytes(make(), split_layers(stack, 0))
    assert (
        count_bytes(make(layered=STACKED), stack)
        == expected
        != count_bytes(make(), stack)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "top_k-int4"])  # of a state, and of draws
def test_stacked_layers_are_combined_as_leaves_of_their_own(name):
    make = STRATEGIES[name]
    combined, _, _ = run(of_gradients(make(layered=STACKED)), STACK)
    expected, _, _ = run(of_gradients(make()), split_layers(STACK))
    assert_close(split_layers(combined), expected)


BLOCKS = {"w": np.zeros((2, 3, 4)), "b": np.zeros((2, 4))}
PARAMS = {"blocks": BLOCKS, "out": [np.ones(3)]}


@pytest.mark.parametrize(
    "layered",
    [
        {"blocks": {"w": 1, "b": 1}, "out": [0]},
        {"blocks": 1, "out": 0},
        lambda path, shape: int(path.startswith("blocks/")),
        lambda path, shape: {"blocks/w": 1, "blocks/b": 1, "out/0": 0}[path],
        lambda path, shape: int(len(shape) > 1),
    ],
    ids=["tree", "prefix", "path", "whole path", "shape"],
)
def test_stacked_is_a_tree_or_a_function_of_path_and_shape(layered):
    assert _stacking.counts(layered, PARAMS) == [1, 1, 0]


@pytest.mark.parametrize(
    ("layered", "message"),
    [
        ({"blocks": 1}, "layered must be a tree like params"),
        ({"blocks": 1, "out": 2}, "'out/0' must be at most 1, its axes, got 2"),
        (lambda path, shape: True, "layered of 'blocks/b' must be a whole number"),
        (lambda path, shape: None, "'blocks/b' must be a whole number .* got None"),
    ],
)
def test_wrong_stacks_are_refused_when_the_state_is_made(layered, message):
    with pytest.raises(ValueError, match=message):
        powersgd(layered=layered).init(PARAMS)


def count_layered_axes(layered: Any = 0) -> syncalgos.Strategy:
    """Returns a strategy whose state is the number of layered axes of each leaf."""
    return syncalgos.Strategy(init=lambda params: _stacking.counts(layered, params))


# The rows of the last matrix count as layers.
STACKED_TASK = drawing()._replace(layered=lambda path, shape: int(path == "out"))


def test_algorithms_get_the_layered_axes_of_the_tasks_model():
    config = parse(["--algo", f"{__name__}:count_layered_axes"])
    params, _ = drawing().init(jax.random.key(0))
    assert declaring(config, STACKED_TASK).init(params) == [0, 0, 1]


def test_streaming_diloco_cuts_a_model_of_stacked_layers_by_bytes():
    words = ["--algo", "streaming_diloco", "--period", "4", "--fragments", "2"]
    params, _ = drawing().init(jax.random.key(0))

    def count_bytes(task: Any, *flags: str) -> float:  # one fragment of two
        strategy = declaring(parse([*words, *flags]), task)
        return communication(strategy, params, workers=2, steps=2).bytes_per_worker

    bytes_by_leaves = count_bytes(STACKED_TASK, "--cut", "leaves")
    assert (
        count_bytes(STACKED_TASK)
        == count_bytes(STACKED_TASK, "--cut", "bytes")
        != bytes_by_leaves
    )
    assert count_bytes(drawing()) == bytes_by_leaves
