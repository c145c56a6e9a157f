"""Layers stacked in one leaf are treated as leaves of their own."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import load
from reducing import assert_close, normal, of_gradients, run, shapes_of
from tiny_tasks import drawing

import syncalgos
from experiments import run as command
from models import gpt, resnet
from syncalgos import communication, powersgd, reducers
from syncalgos.reducers import stacking

LAYERS = 2
STACK = {"b": normal((LAYERS, 6), 2, seed=1), "w": normal((LAYERS, 5, 8), 2)}
STACKED = {"b": 1, "w": 1}


def apart(stack):
    """The same layers, each a leaf of its own, in the same order."""
    return {k: [x[:, :, i] for i in range(LAYERS)] for k, x in stack.items()}


def reduced(factory, stacked=0):
    """A strategy's reduce as a reducer."""
    return of_gradients(factory(stacked=stacked))


def mixed(factory, stacked=0):
    """A strategy's sync as a reducer of params."""
    strategy = factory(stacked=stacked)

    def combine(params, state, step):
        replica, state = strategy.sync(syncalgos.Replica(params), state, step)
        return replica.params, replica.params, state

    return reducers.Reducer(combine, strategy.init)


REDUCERS = {
    "demo": partial(reduced, partial(syncalgos.demo, decay=0.9, chunk=4, top_k=3)),
    "dgc": partial(reduced, partial(syncalgos.dgc, density=0.3, dense_steps=0)),
    "choco_sgd": partial(mixed, partial(syncalgos.choco_sgd, density=0.3)),
    "sign": reducers.sign,
    "chunked_top_k": partial(reducers.chunked_top_k, 0.3, 2, 16),
    "top_k": partial(reducers.top_k, 0.3),
    "top_k-int4": partial(reducers.top_k, 0.5, 4),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REDUCERS)
def test_stacked_layers_are_combined_as_leaves_of_their_own(name):
    make = REDUCERS[name]
    got = run(make(stacked=STACKED), STACK)[:2]
    expected = run(make(), apart(STACK))[:2]
    assert_close([*map(apart, got)], [*expected])


@pytest.mark.parametrize("rank", [1, 2])
def test_power_sgd_gives_each_stacked_layer_a_product_of_its_own(rank):
    """One power iteration a step from the first Q on, in NumPy."""
    reducer = reducers.power_sgd(rank, min_rate=0, stacked=STACKED)
    first = jax.tree.map(lambda x: x[0, 0], STACK)
    _, q = jax.tree.map(np.float64, reducer.init(first))
    combined, sent, _ = run(reducer, STACK)
    for step, layer in np.ndindex(2, LAYERS):
        matrices = np.asarray(STACK["w"][step, :, layer], np.float64)  # (workers, 5, 8)
        p = np.linalg.qr(np.mean(matrices @ q[layer], 0)).Q
        own = [matrix.T @ p for matrix in matrices]
        q[layer] = np.mean(own, 0)
        assert_close(combined["w"][step, 0, layer], p @ q[layer].T, 1e-5)
        assert_close(sent["w"][step, 1, layer], p @ own[1].T, 1e-5)
    mean = STACK["b"].mean(1, keepdims=True)  # stacked vectors are no matrix
    assert_close(combined["b"], np.broadcast_to(mean, STACK["b"].shape))


def test_power_sgd_takes_the_last_axis_for_the_columns():
    x = normal((3, 3, 4, 6), steps=2)
    matrix = reducers.power_sgd(2, min_rate=0)
    as_matrix, _, _ = run(matrix, x.reshape(2, 3, 36, 6))
    kernel, _, _ = run(matrix, x)
    assert_close(kernel.reshape(as_matrix.shape), as_matrix)


MODELS = {
    "resnet20": (
        lambda: shapes_of(lambda key: resnet.init(key, resnet.RESNET20, 10)),
        resnet.stacked(resnet.RESNET20),
        5.26,
    ),
    "resnet50": (
        lambda: shapes_of(lambda key: resnet.init(key, resnet.RESNET50, 1000)),
        resnet.stacked(resnet.RESNET50),
        0.857,
    ),
    "gpt2": (
        lambda: shapes_of(lambda key: gpt.init(key, 50257, 1024, 768, 12)),
        gpt.STACKED,
        0.397,
    ),
    "kernel": (lambda: jax.ShapeDtypeStruct((3, 3, 512, 512), jnp.float32), 0, 0.434),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_powersgd_of_rank_2_sends_so_many_per_cent_of_dense(name):
    make, stacked, per_cent = MODELS[name]
    params = make()
    dense = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    strategy = powersgd(rank=2, stacked=stacked)
    sent = communication(strategy, params, workers=2, steps=1)  # a ring sends all once
    assert 100 * sent.bytes_per_worker / dense == pytest.approx(per_cent, rel=2e-3)


def test_powersgd_sends_a_matrix_whole_that_its_rank_halves_at_best():
    def sent(rows, columns, **settings):
        shape = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        return (
            communication(
                powersgd(rank=2, **settings), shape, workers=2, steps=1
            ).bytes_per_worker
            / 4
        )

    assert sent(8, 8) == 64  # 2 (8 + 8) is the half
    assert sent(8, 9) == 2 * (8 + 9)
    assert sent(8, 8, min_rate=1) == 2 * (8 + 8)
    assert sent(2, 3, min_rate=0) == 2 * (2 + 3)


def test_powersgd_averages_its_first_steps():
    sent = communication(
        powersgd(rank=1, dense_steps=3), jnp.zeros((16, 16)), workers=2, steps=5
    )
    assert np.diff(sent.per_step, prepend=0).tolist() == [1024] * 3 + [128] * 2


BLOCKS = {"w": np.zeros((2, 3, 4)), "b": np.zeros((2, 4))}
PARAMS = {"blocks": BLOCKS, "out": [np.ones(3)]}


@pytest.mark.parametrize(
    "stacked",
    [
        {"blocks": {"w": 1, "b": 1}, "out": [0]},
        {"blocks": 1, "out": 0},
        lambda path, shape: int(path.startswith("blocks/")),
        lambda path, shape: {"blocks/w": 1, "blocks/b": 1, "out/0": 0}[path],
        lambda path, shape: int(len(shape) > 1),
    ],
    ids=["tree", "prefix", "path", "whole path", "shape"],
)
def test_stacked_is_a_tree_or_a_function_of_path_and_shape(stacked):
    assert stacking.counts(stacked, PARAMS) == [1, 1, 0]


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        ({"blocks": 1}, "stacked must be a tree like params"),
        (
            {"blocks": 1, "out": 2},
            "'out/0' must be at most 1, its axes, got 2",
        ),
        (lambda path, shape: True, "stacked of 'blocks/b' must be a whole number"),
        (lambda path, shape: None, "'blocks/b' must be a whole number .* got None"),
    ],
)
def test_wrong_stacks_are_refused_when_the_state_is_made(stacked, message):
    with pytest.raises(ValueError, match=message):
        powersgd(stacked=stacked).init(PARAMS)


def stacked_task():
    """The rows of the last matrix count as layers."""
    return drawing()._replace(stacked=lambda path, shape: int(path == "out"))


def counting(stacked=0):
    """Returns a strategy that sends as many numbers as its task has stacked leaves."""

    def reduce(grads, replica, state, step):
        number = sum(stacking.counts(stacked, grads))
        sent = syncalgos.collectives.gather(jnp.zeros(number))
        return jax.tree.map(lambda g: g + 0 * sent.sum(), grads), state

    return syncalgos.Strategy(reduce=reduce)


def bytes_sent(out, *flags):
    rest = ["--workers", "2", "--steps", "2", "--out", str(out)]
    assert command.main([*flags, *rest]) == 0
    return load((out / "summary.json").read_text())["bytes_per_worker"]


@pytest.mark.slow
def test_algorithms_get_what_the_task_says_of_its_model(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")  # as they are
    own = ["--task", f"{__name__}:stacked_task", "--algo", f"{__name__}:counting"]
    assert bytes_sent(tmp_path / "out", *own) == 2 * 4  # one number a step


@pytest.mark.slow
def test_streaming_diloco_cuts_a_model_of_stacked_layers_by_bytes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    first = ["--algo", "streaming_diloco", "--period", "4", "--fragments", "2"]

    def sent(name, task, *flags):  # one fragment of two
        task = ["--task", f"{__name__}:{task}"]
        return bytes_sent(tmp_path / name, *first, *task, *flags)

    by_bytes = sent("a", "stacked_task", "--cut", "bytes")
    by_leaves = sent("b", "stacked_task", "--cut", "leaves")
    assert sent("c", "stacked_task") == by_bytes != by_leaves
    assert sent("d", "drawing") == by_leaves
