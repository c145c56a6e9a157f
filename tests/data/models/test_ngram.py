"""The n-gram model against NumPy, and sampled softmax against the full one."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import ngram

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY, WIDTH, ORDER = 9, 4, 4
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
    full, sampled = [], []
    for context, target in zip(CONTEXTS, TARGETS, strict=True):
        odds = np.exp(logits_in_numpy(params, context))
        full.append(-math.log(odds[target] / odds.sum()))
        others = [word for word in NEGATIVES if word != target]
        total = odds[target] + sum(odds[others] / (len(NEGATIVES) * Q[others]))
        sampled.append(-math.log(odds[target] / total))
    actual = ngram.full_loss(params, CONTEXTS, TARGETS)
    np.testing.assert_allclose(actual, full, atol=1e-12)
    actual = ngram.sampled_loss(params, CONTEXTS, TARGETS, NEGATIVES, np.log(Q))
    np.testing.assert_allclose(actual, sampled, atol=1e-12)


def test_sampled_is_full_with_every_word_once():
    params = make_params()
    negatives = np.random.default_rng(2).permutation(VOCABULARY)
    log_q = np.full(VOCABULARY, -math.log(VOCABULARY))

    def both(params):
        full = ngram.full_loss(params, CONTEXTS, TARGETS)
        part = ngram.sampled_loss(params, CONTEXTS, TARGETS, negatives, log_q)
        return full, part

    full, part = jax.jit(both)(params)
    np.testing.assert_allclose(part, full, atol=1e-12)
    full, part = jax.jit(jax.jacobian(both))(params)
    jax.tree.map(lambda p, f: np.testing.assert_allclose(p, f, atol=1e-12), part, full)


def enumerate_draws(k, words=4):
    """Every outcome of k independent draws from Q over few words: (draws, odds)."""
    q = Q[:words] / Q[:words].sum()
    draws = np.array(list(itertools.product(range(words), repeat=k)), np.int32)
    return draws, q[draws].prod(1), np.log(q)


def losses_of_draws(k):
    """The losses after all outcomes, (draws, batch), their odds and the full losses."""
    params = make_params(vocabulary=4)
    contexts, targets = CONTEXTS % 4, TARGETS % 4
    draws, odds, log_q = enumerate_draws(k)
    losses = jax.jit(
        jax.vmap(
            lambda draw: ngram.sampled_loss(params, contexts, targets, draw, log_q)
        )
    )(draws)
    return losses, odds, ngram.full_loss(params, contexts, targets)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_sampled_sum_is_the_full_one_in_expectation(k):
    """Over all outcomes, exp(loss) = sum / exp(target's logit) has the full mean."""
    losses, odds, full = losses_of_draws(k)
    np.testing.assert_allclose(odds @ np.exp(losses), np.exp(full), rtol=1e-12)


def test_more_negatives_err_less():
    errors = []
    for k in (1, 2, 4, 8):
        losses, odds, full = losses_of_draws(k)
        errors.append((odds @ (losses - full) ** 2).mean())
    # The variance of a mean of k draws falls as 1 / k.
    assert all(more < 0.7 * less for less, more in itertools.pairwise(errors))


@pytest.mark.slow
def test_a_distinct_sample_takes_its_words_expected_counts():
    """All sets of 2 words of 4, drawn alike: each word is in half of them."""
    params = make_params(vocabulary=4)
    contexts, targets = CONTEXTS % 4, TARGETS % 4
    log_q = np.full(4, math.log(0.5 / 2))
    losses = [
        ngram.sampled_loss(params, contexts, targets, np.array(draw), log_q)
        for draw in itertools.combinations(range(4), 2)
    ]
    full = ngram.full_loss(params, contexts, targets)
    np.testing.assert_allclose(np.exp(losses).mean(0), np.exp(full), rtol=1e-12)


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
        others = sorted({*range(VOCABULARY)} - ids)
        assert len(others) > 2
        assert not by_row[others].any()
        assert by_row[sorted(ids)].min() > 1e-6


def test_initial_loss_is_that_of_guessing():
    params = ngram.init(jax.random.key(0), 1000, 32, ORDER)
    contexts = np.random.default_rng(0).integers(1000, size=(64, ORDER - 1))
    losses = ngram.full_loss(params, contexts, contexts[:, 0])
    # Logits are sums of 32 products of two numbers near 0.1: half of 0.06² is 0.002.
    assert abs(losses.mean() - math.log(1000)) < 0.03


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


@pytest.mark.slow
def test_training_on_sampled_loss_finds_the_words_frequencies():
    """One context, words of unequal frequency: the full loss falls to their entropy."""
    p = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.05, 0, 0, 0])
    optimizer, batch, k = optax.adam(0.03), 256, 6
    contexts = jnp.zeros((batch, ORDER - 1), jnp.int32)

    def loss(params, targets, negatives):
        losses = ngram.sampled_loss(params, contexts, targets, negatives, np.log(Q))
        return losses.mean()

    def step(carry, key):
        params, opt_state = carry
        keys = jax.random.split(key)
        targets = jax.random.choice(keys[0], VOCABULARY, (batch,), p=p)
        negatives = jax.random.choice(keys[1], VOCABULARY, (k,), p=Q)
        grads = jax.grad(loss)(params, targets, negatives)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    params = ngram.init(jax.random.key(0), VOCABULARY, WIDTH, ORDER)
    carry = params, optimizer.init(params)
    keys = jax.random.split(jax.random.key(1), 300)
    (trained, _), _ = jax.jit(lambda c, k: jax.lax.scan(step, c, k))(carry, keys)

    def expected_loss(params):
        every = ngram.full_loss(params, contexts[:VOCABULARY], np.arange(VOCABULARY))
        return p @ every

    entropy = -(p[:6] * np.log(p[:6])).sum()
    assert expected_loss(params) > entropy + 0.5
    assert expected_loss(trained) < entropy + 0.15
