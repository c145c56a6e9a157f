"""The n-gram model against NumPy, and sampled softmax against the full one."""

import itertools
import math

import jax
import numpy as np
import pytest

from models import ngram

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY = 9
WIDTH = 4
ORDER = 4
CONTEXTS = np.array([[0, 1, 2], [2, 2, 5], [5, 5, 5]], np.int32)
TARGETS = np.array([3, 2, 7], np.int32)
NEGATIVES = np.array([1, 3, 6, 1], np.int32)  # 3 is the first row's target
Q = np.array([0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])


def make_params(vocabulary=VOCABULARY):
    """Larger weights than `init`'s, none of them equal."""
    params = ngram.init(jax.random.key(0), vocabulary, WIDTH, ORDER)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.5 * rng.normal(size=x.shape), params)


def sampled(params):
    return ngram.sampled_loss(params, CONTEXTS, TARGETS, NEGATIVES, np.log(Q)).sum()


def logits_in_numpy(params, context):
    """Bengio et al. 2003, without direct connections: b + U tanh(d + H x)."""
    params = jax.tree.map(np.asarray, params)
    x = np.concatenate([params["words"][word] for word in context])
    hidden = np.tanh(params["hidden"]["b"] + params["hidden"]["w"].T @ x)
    return np.array(
        [b + u @ hidden for u, b in zip(params["outputs"], params["bias"], strict=True)]
    )


def test_losses_match_their_sums():
    params = make_params()
    full = []
    sampled = []
    for context, target in zip(CONTEXTS, TARGETS, strict=True):
        odds = np.exp(logits_in_numpy(params, context))
        full.append(-math.log(odds[target] / odds.sum()))
        other_words = [word for word in NEGATIVES if word != target]
        total = odds[target] + sum(
            odds[other_words] / (len(NEGATIVES) * Q[other_words])
        )
        sampled.append(-math.log(odds[target] / total))
    actual = jax.jit(ngram.full_loss)(params, CONTEXTS, TARGETS)
    np.testing.assert_allclose(actual, full, atol=1e-12)
    arguments = params, CONTEXTS, TARGETS, NEGATIVES, np.log(Q)
    np.testing.assert_allclose(
        jax.jit(ngram.sampled_loss)(*arguments), sampled, atol=1e-12
    )


@pytest.mark.slow
def test_sampled_sum_is_the_full_one_in_expectation():
    """Over all draws of two words, exp(loss) = sum / exp(target's logit) is full."""
    params = make_params(vocabulary=4)
    q = Q[:4] / Q[:4].sum()
    contexts = CONTEXTS % 4
    targets = TARGETS % 4
    draws = np.array([*itertools.product(range(4), repeat=2)], np.int32)

    def compute_loss(draw):
        return ngram.sampled_loss(params, contexts, targets, draw, np.log(q))

    odds = q[draws].prod(1)
    losses = jax.jit(jax.vmap(compute_loss))(draws)
    full = ngram.full_loss(params, contexts, targets)
    np.testing.assert_allclose(odds @ np.exp(losses), np.exp(full), rtol=1e-12)


def test_gradients_are_zeros_in_rows_that_are_not_read():
    """Reducers of few rows rely on it. A target that is drawn gives no NaN."""
    grads = jax.jit(jax.grad(sampled))(make_params())
    read = {
        "words": {*CONTEXTS.ravel()},
        "outputs": {*TARGETS, *NEGATIVES},
        "bias": {*TARGETS, *NEGATIVES},
    }
    for name, ids in read.items():
        by_row = np.abs(grads[name]).reshape(VOCABULARY, -1)
        unread_rows = sorted({*range(VOCABULARY)} - ids)
        assert len(unread_rows) > 2
        assert not by_row[unread_rows].any()
        assert by_row[sorted(ids)].min() > 1e-6


def test_tables_start_small_and_biases_at_zero():
    params = ngram.init(jax.random.key(0), 500, 32, ORDER)
    assert params["hidden"]["w"].shape == (96, 32)
    expected = {0.1: [params["words"], params["outputs"]]}
    expected[96**-0.5] = [params["hidden"]["w"]]
    for deviation, matrices in expected.items():
        for matrix in matrices:
            # The deviation of n normals errs by sqrt(1 / 2 n), 1.3 %: 5 of those.
            assert abs(matrix.std() / deviation - 1) < 0.065
    assert not params["bias"].any()
    assert not params["hidden"]["b"].any()
    assert params["bias"].shape == (500,)
