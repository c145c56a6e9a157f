"""The GPT against its equations in NumPy, and what training relies on."""

import math

import jax
import numpy as np
import pytest

from models import gpt

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY = 5
CONTEXT = 7
WIDTH = 8
LAYERS = 3
HEADS = 2
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(VOCABULARY, size=(2, 6), dtype=np.int32)


def larger(params):
    """Larger weights than `init`'s, none of them equal: no entry goes unseen."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), params)


def norm_in_numpy(layer, x):
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * layer["scale"] + layer["b"]


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
    for n in range(len(params["blocks"]["qkv"]["w"])):
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


SMALL = VOCABULARY, CONTEXT, WIDTH, LAYERS


@pytest.mark.parametrize(
    ("init", "heads"),
    [
        pytest.param(lambda key: gpt.init(key, *SMALL), 1, marks=pytest.mark.slow),
        (lambda key: gpt.init(key, *SMALL), 8),
        # With the biases of GPT-2; 8 numbers in all heads, the width, and 12.
        (gpt.Shape(*SMALL, HEADS, head_size=4, rotary=False).init, HEADS),
        (gpt.Shape(*SMALL, HEADS, head_size=6, rotary=True).init, HEADS),
    ],
    ids=["one head", "heads of one", "learnt", "rotary"],
)
def test_gpt_matches_its_equations(init, heads):
    params = larger(init(jax.random.key(1)))
    expected = [gpt_in_numpy(params, row, heads) for row in TOKENS]
    np.testing.assert_allclose(gpt.apply(params, TOKENS, heads), expected, atol=1e-12)


@pytest.mark.parametrize("rotary", [False, True])
def test_a_shape_tells_which_leaves_are_stacked(rotary):
    shape = gpt.Shape(*SMALL, HEADS, head_size=6, rotary=rotary)
    params = jax.eval_shape(shape.init, jax.random.key(1))
    assert params["blocks"]["qkv"]["b"].shape == (LAYERS, 3 * HEADS * 6)
    assert params.keys() == shape.layered.keys()


@pytest.mark.slow
def test_matrices_start_small_and_those_that_end_a_branch_smaller():
    params = jax.jit(lambda key: gpt.init(key, 100, 100, 64, 8))(jax.random.key(0))
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
