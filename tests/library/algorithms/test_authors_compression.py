"""Published codes that send little of each gradient and ours, on equal inputs.

Their figures are printed and compared as in test_authors_code.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reducer_cases import assert_close, follow, run, wave

import syncalgos
from syncalgos import reducers
from syncalgos.reducers import _hops

# They print seven digits, and sums of ours are in another order.
TOLERANCE = 1e-5


# epfml/powersgd f07be92, BasicPowerSGD(rank=2, num_iters_per_step=1): the gradient of
# the third step, and what is then left of that in the workers. It takes half an
# iteration at a call, P of Q and Q of P in turn: so it was called twice with each
# matrix, from `step_counter = 1`, and what the first call returned was dropped.
PACKAGE_GRADS = [
    [0.09131989, -0.05467202, 0.5886921, -0.4057887],
    [-0.1934444, 0.2911357, -0.8763652, 0.4889015],
    [0.0993723, 0.1808824, 1.148806, -0.9497978],
    [0.09773604, -0.3280622, 0.06017, 0.13561],
    [-0.1387676, 0.6741242, 0.3550341, -0.6330264],
]
RESIDUALS = [  # the last row of each worker
    [-0.02506936, -0.3380956, -0.5119244, 0.03847289],
    [-0.3095409, 0.05104411, 0.05930823, -0.1017998],
]


def test_power_sgd_matches_the_package_of_its_authors():
    first_factors = [jnp.asarray(wave(4, 2, phase=1.0))]
    combine = reducers.power_sgd(2, min_rate=0).combine
    reducer = reducers.error_feedback(
        reducers.Reducer(combine, lambda params: first_factors)
    )
    combined, _, state = run(reducer, wave(3, 2, 5, 4))
    assert_close(combined[-1], [PACKAGE_GRADS, PACKAGE_GRADS], TOLERANCE)
    assert_close(state.residual[-1, :, -1], RESIDUALS, TOLERANCE)


# microsoft/dion 0a059a4, dion_update of dion_reference.py on NumPy arrays in float64,
# with qr_method="qr", transpose=True and compressed_all_reduce=True, lr=0.5, mu=0.9: of
# a matrix from 0 the transpose, after four steps, each of two workers' gradients.
DION = [
    [-0.5068017, -0.0918253, -0.9275871],
    [-0.2618491, 0.0713356, 0.376291],
    [-0.2527416, -0.1047262, 0.0242818],
    [-0.538599, -0.1399945, -0.6723028],
    [-0.7289088, 0.4117404, 0.8287275],
]


def test_dion_matches_its_authors_code():
    """Their momenta hold the workers' differences; the steps are the same."""
    strategy = syncalgos.dion(rank_fraction=2 / 3, local_momentum=0.9)

    def init(params: Any) -> Any:
        return strategy.init(params)._replace(factors=[wave(3, 2, phase=1.0)])

    starts = np.zeros((2, 5, 3), np.float32)
    steps = strategy._replace(init=init)
    params = follow(steps, optax.sgd(0.5), starts, wave(4, 2, 5, 3))
    assert_close(params[-1], np.stack([DION] * 2), TOLERANCE)


# bloc97/DeMo 0e48145, DeMo(lr=0.5, compression_decay=0.9, compression_topk=2,
# compression_chunk=4) of two params from 0: over lr, after four steps; and, of lr times
# the gradients, what it decodes in the fourth, of which it takes the signs.
DEMO_PARAMS = {
    "matrix": [
        [0, 4, 0, -4],
        [0, -2, -2, -2],
        [-2, -2, -2, 2],
        [2, -2, -2, 0],
        [2, -2, 0, 2],
        [0, -2, 0, 0],
    ],
    "vector": [-2, -2, -2, -2],
}
DEMO_DECODED = {
    "matrix": [
        [-0.5304853, -0.0818036, 0.5014057, 0.1108831],
        [0.7090721, -1.118444, 0.2792402, 0.1301321],
        [0.2231525, 0.2303634, 0.1892387, -0.6427547],
        [-0.4342597, 0.8578281, -0.5883253, 0.1647568],
        [-0.1396602, 0.1466023, 0.1229005, -0.1298426],
        [-0.1344314, 0.1339787, 0.1355241, -0.1350715],
    ],
    "vector": [0.2056739, -0.1963197, 0.07236865, 0.8543451],
}
DEMO_GRADS = {
    "matrix": wave(4, 2, 6, 4, phase=2.0),  # tiles of 3 x 4
    "vector": wave(4, 2, 4, phase=1.0),
}


def train_with_demo(**settings: Any) -> Any:
    strategy = syncalgos.demo(decay=0.9, chunk=4, top_k=2, **settings)
    starts = jax.tree.map(lambda x: np.zeros_like(x[0]), DEMO_GRADS)
    return follow(strategy, optax.sgd(0.5), starts, DEMO_GRADS)


def test_demo_matches_its_authors_code():
    params = train_with_demo(sign=True, learning_rate=0.5)
    for name, expected in DEMO_PARAMS.items():
        workers_params = np.broadcast_to(expected, params[name][-1].shape)
        np.testing.assert_array_equal(params[name][-1] / 0.5, workers_params)


def test_demo_decodes_what_its_authors_code_does():
    params = train_with_demo()
    for name, expected in DEMO_DECODED.items():
        moves = params[name][-2] - params[name][-1]
        assert_close(moves, np.broadcast_to(expected, moves.shape), TOLERANCE)


# tplr-ai/templar c2397ac, TopKCompressor(use_quantization=True, quantization_bins=4,
# quantization_range=6) of a tile of 64 x 64 and its largest 64: their indices in order,
# as it packs them, the numbers of their bins, and its table plus its shift.
PACKED_INDICES = """
    61c0101cd11352a11505022cd842300aa336bf133ee6d3401c04433fb445b16456731559a2657028c773
    5317767d3779bc077d488886e838949629a68c7aa9a75aabb73aadffaab527dcc3837cc8c3accc6a2de3
    532ee692ceedecfef298dffb
"""
BINS = "3123233121133333321212211113331122331321123113132123113333112231"
TABLE = [-9.866536, -45.95142, -39.17699, 42.36122]
# Of the mean with the tile of another worker: its entries that are not 0, their sum,
# that of their squares, and of their products with a `wave`. batch_decompress with
# clip_norm=False; by default it shrinks workers' values to the median of their norms.
MEAN_FIGURES = 88, -559.98853, 188011.05, 1875.0346


def test_sparseloco_codes_a_tile_as_its_authors_code_does():
    tiles = wave(2, 64, 64)
    tiles /= np.float32(1.02) + tiles[:, ::-1].copy()
    tiles[1, :40] = 1.25 * tiles[0, :40]
    combined, sent_updates, _ = run(reducers.chunked_top_k(1 / 64), tiles[None])
    indices = np.flatnonzero(sent_updates[0, 0])
    packed = np.asarray(_hops.pack_12(jnp.array(indices)))
    assert packed.tobytes() == bytes.fromhex(PACKED_INDICES)
    expected = np.array(TABLE)[list(map(int, BINS))]
    assert_close(sent_updates[0, 0].ravel()[indices], expected, TOLERANCE)
    # Theirs is the mean over those that sent an entry, ours over all.
    mean = np.float64(combined[0, 0]) * 2 / np.maximum((sent_updates[0] != 0).sum(0), 1)
    sums = mean.sum(), (mean**2).sum(), (mean * wave(64, 64, phase=1.0)).sum()
    np.testing.assert_allclose(
        (np.count_nonzero(mean), *sums), MEAN_FIGURES, rtol=TOLERANCE
    )


# There, prepare_gradient_dict and outer_step with momentum_decay=0.95 and an outer
# SGD(lr=1): params after four rounds of one worker that sends 6 of 16 entries; and of
# two that send all, of the same values in other places, so that nothing is clipped.
ONE_WORKERS_PARAMS = [
    [-0.9589243, -2.794171, 0.4230309, -0.821559],
    [-0.9601722, 0.4979846, 1.634412, 0.9995473],
    [-2.562925, -0.9052013, -1.925574, 0.9048262],
    [-1.811312, 1.708343, -0.7845925, -2.232587],
]
TWO_WORKERS_PARAMS = [
    [-0.5296541, -0.7346764, 0.9462813, -1.782651],
    [-2.268902, -0.3594221, 0.2833564, 0.8689451],
    [-2.245334, -0.7774488, 0.8332664, 0.8558803],
    [-0.4197617, -0.8857661, -0.7890657, -1.58831],
]


@pytest.mark.parametrize(
    ("workers", "density", "expected"),
    [(1, 6 / 16, ONE_WORKERS_PARAMS), (2, 1.0, TWO_WORKERS_PARAMS)],
)
def test_sparseloco_matches_its_authors_rounds(workers, density, expected):
    """Steps along given gradients make the params differ from the anchor by them."""
    grads = wave(4, 1, 4, 4, phase=6.0)
    grads = np.concatenate([grads, grads[:, :, ::-1]], axis=1)[:, :workers]
    starts = np.stack([wave(4, 4, phase=5.0)] * workers)
    strategy = syncalgos.sparseloco(1, density=density)
    params = follow(strategy, optax.sgd(1.0), starts, grads)
    assert_close(params[-1], np.stack([expected] * workers), TOLERANCE)
