"""The GPT against its equations in NumPy, and what training relies on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 5, 7, 8, 3, 2
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(VOCABULARY, size=(2, 6), dtype=np.int32)


def make_params():
    return larger(gpt.init(jax.random.key(1), VOCABULARY, CONTEXT, WIDTH, LAYERS))


def larger(params):
    """Larger weights than `init`'s, none of them equal: no entry goes unseen."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), params)


def loss(params, tokens=TOKENS):
    """The cross-entropy of each token after those before it."""
    log_p = jax.nn.log_softmax(gpt.apply(params, tokens[:, :-1], HEADS))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], 2).mean()


def norm_in_numpy(layer, x):
    deviation = math.sqrt(x.var() + 1e-5)
    return (x - x.mean()) / deviation * layer["scale"] + layer["b"]


def gelu_in_numpy(x):
    """Hendrycks and Gimpel, "Gaussian error linear units", 2016: the tanh formula."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turned_in_numpy(x, position):
    """Su et al., "RoFormer", equation 15, where a pair is a complex number."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    turned = [
        pair * np.exp(1j * position * 10000 ** (-2 * i / len(x)))
        for i, pair in enumerate(pairs)
    ]
    return np.concatenate([np.real(turned), np.imag(turned)])


def gpt_in_numpy(params, tokens, heads):
    """One sequence, as rows; one position and one head at a time."""
    params = jax.tree.map(np.asarray, params)
    rotary = "positions" not in params
    x = [
        params["tokens"][token] + (0 if rotary else params["positions"][i])
        for i, token in enumerate(tokens)
    ]
    for n in range(LAYERS):
        block = jax.tree.map(lambda leaf, n=n: leaf[n], params["blocks"])
        normed = np.array([norm_in_numpy(block["norm1"], row) for row in x])
        qkv = normed @ block["qkv"]["w"] + block["qkv"].get("b", 0)
        q, k, v = np.split(qkv, 3, axis=1)
        for i in range(len(x)):
            read = []
            for head in np.split(np.arange(q.shape[1]), heads):
                if rotary:
                    q[i, head] = turned_in_numpy(q[i, head], i)
                    k[i, head] = turned_in_numpy(k[i, head], i)
                scores = [q[i, head] @ k[j, head] for j in range(i + 1)]
                odds = np.exp(np.array(scores) / math.sqrt(len(head)))
                read.extend(odds / odds.sum() @ v[: i + 1, head])
            x[i] = x[i] + np.array(read) @ block["out"]["w"] + block["out"]["b"]
        for i in range(len(x)):
            up = norm_in_numpy(block["norm2"], x[i]) @ block["up"]["w"]
            hidden = gelu_in_numpy(up + block["up"]["b"])
            x[i] = x[i] + hidden @ block["down"]["w"] + block["down"]["b"]
    return [norm_in_numpy(params["norm"], row) @ params["tokens"].T for row in x]


@pytest.mark.sample(1)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_gpt_matches_its_equations(heads):
    params = make_params()
    actual = gpt.apply(params, TOKENS, heads)
    expected = [gpt_in_numpy(params, row, heads) for row in TOKENS]
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("head_size", [4, 6])  # 8 numbers in all heads, the width; 12
def test_a_shape_matches_its_equations(rotary, head_size):
    """With the biases of GPT-2, none of them zero, and both kinds of positions."""
    shape = gpt.Shape(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, head_size, rotary)
    params = larger(shape.init(jax.random.key(1)))
    assert params["blocks"]["qkv"]["b"].shape == (LAYERS, 3 * HEADS * head_size)
    assert params.keys() == shape.stacked.keys()
    actual = gpt.apply(params, TOKENS, HEADS)
    expected = [gpt_in_numpy(params, row, HEADS) for row in TOKENS]
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.slow
def test_every_weight_has_a_gradient():
    """For all tokens and positions: rounding alone would be 1e-17 of the loss."""
    tokens = np.concatenate([np.arange(CONTEXT + 1), np.arange(1, 10)]).reshape(1, -1)
    tokens = (tokens[:, : CONTEXT + 1] % VOCABULARY).astype(np.int32)
    grads = jax.jit(jax.grad(loss))(make_params(), tokens)
    for grad in jax.tree.leaves(grads):
        assert abs(grad).min() > 1e-9


def test_logits_do_not_depend_on_later_tokens():
    params, apply = make_params(), jax.jit(gpt.apply, static_argnums=2)
    whole = apply(params, TOKENS, HEADS)
    for position in range(TOKENS.shape[1]):
        changed = TOKENS.copy()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        difference = np.abs(apply(params, changed, HEADS) - whole).max((0, 2))
        assert difference[:position].max(initial=0) <= 1e-13
        assert difference[position:].min() > 1e-4  # all of the later ones see it


def test_a_shorter_sequence_gives_the_first_logits_of_a_longer():
    params = make_params()
    whole = gpt.apply(params, TOKENS, HEADS)
    np.testing.assert_allclose(
        gpt.apply(params, TOKENS[:, :4], HEADS), whole[:, :4], atol=1e-12
    )


def test_initial_loss_is_that_of_guessing():
    params = gpt.init(jax.random.key(0), 65, 32, 64, 4)
    tokens = np.random.default_rng(0).integers(65, size=(16, 33), dtype=np.int32)
    # Logits have a standard deviation of about 0.02 sqrt(64) = 0.16, which adds half
    # its square, 0.013, to the loss; the mean over 512 tokens errs by 0.007.
    assert abs(loss(params, tokens) - math.log(65)) < 0.04


@pytest.mark.parametrize(
    ("vocabulary", "context", "width", "layers"), [(5, 7, 8, 3), (65, 128, 128, 4)]
)
def test_params_are_as_many_as_the_formula_says(vocabulary, context, width, layers):
    """12 widths² a layer; 2 norms, and biases behind 3 matmuls: 10 widths a layer."""
    params = jax.eval_shape(
        lambda: gpt.init(jax.random.key(0), vocabulary, context, width, layers)
    )
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    per_layer = 12 * width**2 + 10 * width
    tables = (vocabulary + context) * width
    assert count == layers * per_layer + tables + 2 * width
    assert {x.shape[0] for x in jax.tree.leaves(params["blocks"])} == {layers}


def test_matrices_start_small_and_those_that_end_a_branch_smaller():
    params = gpt.init(jax.random.key(0), 100, 100, 64, 8)
    blocks = params["blocks"]
    expected = {
        0.02: [
            params["tokens"],
            params["positions"],
            blocks["qkv"]["w"],
            blocks["up"]["w"],
        ],
        0.02 / math.sqrt(16): [blocks["out"]["w"], blocks["down"]["w"]],
    }
    for deviation, matrices in expected.items():
        for matrix in matrices:
            # The deviation of n normals errs by sqrt(1 / 2 n), 0.9 %: 5 of those.
            assert abs(matrix.std() / deviation - 1) < 0.045
            assert abs(matrix.mean()) < 0.07 * deviation
    norms = [blocks["norm1"], blocks["norm2"], params["norm"]]
    assert all((norm["scale"] == 1).all() for norm in norms)
    biased = [*norms, blocks["out"], blocks["up"], blocks["down"]]
    assert not any(layer["b"].any() for layer in biased)
