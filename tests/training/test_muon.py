"""Leaves of each model that Muon takes; stacked layers are apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from jax.tree_util import keystr, tree_leaves_with_path
from support.reducer_cases import assert_close

from experiments.tasks import classify
from experiments.training import optimizers
from experiments.training.config import parse
from experiments.training.plan import make_plan
from models import gpt, lenet, lstm, mlp, ngram, resnet

KEY = jax.random.key(0)
GPT = gpt.init(KEY, vocabulary=7, context=5, width=4, layers=3)
CONV = classify.CONVOLUTION
STACK = classify.DENSE

# Each of five Newton-Schulz iterations makes small singular values 3.44 times as large,
# and with them rounding of float32, 6e-8.
ROUNDING = 3e-5

# Params, and what Muon takes of them: how many, and some by name.
MODELS = {
    "mlp": (lambda: mlp.init(KEY, (4, 6, 6, 3)), 2, {"[0]['w']": STACK}),
    "lenet": (lambda: lenet.init(KEY), 2, {"['conv1']['w']": CONV}),
    "lstm": (
        lambda: lstm.init(KEY, 3, 4, 2, layers=2),
        4,
        {"['layers'][1]['recurrent']": STACK},
    ),
    "ngram": (lambda: ngram.init(KEY, 9, 4, 3), 1, {"['hidden']['w']": STACK}),
    "gpt": (
        lambda: GPT,
        4,
        {f"['blocks'][{name!r}]['w']": STACK for name in ("qkv", "out", "up", "down")},
    ),
    "resnet20": (
        lambda: resnet.init(KEY, resnet.RESNET20, 10)[0],
        13,  # the stem, and per stage two convolutions of the first block and the rest
        {"['stem']['w']": CONV, "['stages'][2]['rest']['conv2']['w']": CONV},
    ),
}


@pytest.mark.parametrize(("params", "count", "some"), MODELS.values(), ids=MODELS)
def test_muon_takes_the_hidden_matrices(params, count, some):
    axes_by_leaf = classify.muon_axes(jax.eval_shape(params))
    is_taken = {
        keystr(path): axes
        for path, axes in tree_leaves_with_path(
            axes_by_leaf, is_leaf=lambda x: x is None or x in (CONV, STACK)
        )
        if axes is not None
    }
    assert len(is_taken) == count
    assert some.items() <= is_taken.items()


@pytest.mark.slow
def test_muon_orthogonalises_each_stacked_layer_by_itself():
    optimizer = optimizers.make_optimizer("muon", 0.1, muon=classify.muon_axes)
    grads = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape), GPT)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(GPT), GPT)

    alone = optax.contrib.muon(0.1)
    w = grads["blocks"]["up"]["w"]
    step = updates["blocks"]["up"]["w"]
    update = jax.jit(alone.update)
    for layer in range(3):
        expected, _ = update(w[layer], alone.init(w[layer]), w[layer])
        assert_close(step[layer], expected, ROUNDING)
    for path in (("tokens",), ("blocks", "up", "b"), ("norm", "scale")):
        step = updates
        grad = grads
        for name in path:
            step = step[name]
            grad = grad[name]
        # Adam's first step, Nesterov's way: a sign but for its averages.
        assert (jnp.sign(step) == -jnp.sign(grad)).all()
        np.testing.assert_allclose(jnp.ptp(jnp.abs(step)), 0, atol=1e-6)


def test_the_command_line_gives_muon_the_tasks_own_matrices():
    parts = make_plan(parse(["--optimizer", "muon", "--weight-decay", "0.1"]))
    state: Any = parts.method.optimizer.init(parts.task.init(KEY)[0])
    moments = state.inner_states["muon"].inner_state[0].mu
    assert [x.shape for x in jax.tree.leaves(moments)] == [(64, 128), (128, 128)]
