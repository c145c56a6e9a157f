"""PowerSGD against what theory says of its products."""

import numpy as np
from reducing import CLOSE, ZEROS, assert_close, mean_over_workers, normal, outcome, run

from syncalgos.reducers import power_sgd


def test_power_sgd_loses_only_what_is_orthogonal_to_what_it_sends():
    updates, combined, sent = outcome("power_sgd")
    for step in range(ZEROS):
        values = np.linalg.svd(combined["matrix"][step, 0])[1]
        assert values[2] < CLOSE * values[0]  # its rank is 2
        for worker in range(3):
            matrix, part = (
                t["matrix"][step, worker].astype(np.float64) for t in (updates, sent)
            )
            size = np.linalg.norm(matrix) ** 2
            np.testing.assert_allclose(part.T @ (matrix - part) / size, 0, atol=CLOSE)
            assert 0 < np.linalg.norm(part) < np.linalg.norm(matrix)


def test_power_sgd_sends_a_mean_of_its_rank_exactly():
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20))
    apart = rng.normal(size=(30, 20))  # by which the two workers differ from their mean
    x = np.float32([[mean + apart, mean - apart]])
    combined, _, _ = run(power_sgd(2), x)
    # Rounding of what cancels in the mean, over a QR of some condition.
    assert_close(combined[0, 0], mean, 1e-5)


def test_power_sgd_of_a_steady_gradient_becomes_its_best_approximation():
    rng = np.random.default_rng(1)
    left, _ = np.linalg.qr(rng.normal(size=(30, 20)))
    right, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    values = 2.0 ** -np.arange(20)
    x = np.float32((left * values) @ right.T)
    combined, _, _ = run(power_sgd(2), np.broadcast_to(x, (16, 2, 30, 20)))
    best = (left[:, :2] * values[:2]) @ right[:, :2].T  # Eckart and Young
    # Each iteration shrinks the error by the square of the third value over the second.
    assert_close(combined[-1, 0], best, 1e-5)


def test_power_sgd_recovers_from_a_zero_gradient():
    # As behind a readout that starts from zeros, of inputs whose first are never lit.
    x = np.zeros((12, 2, 8, 6), np.float32)
    rng = np.random.default_rng(0)
    x[1:, :, 4:] = np.outer(rng.normal(size=4), rng.normal(size=6))
    combined, _, _ = run(power_sgd(2, min_rate=0), x)
    assert_close(combined[-1, 0], x[-1, 0], 1e-5)


def test_power_sgd_keeps_a_matrix_of_integers():
    count = np.arange(12, dtype=np.int32).reshape(1, 2, 2, 3)
    combined, _, _ = run(power_sgd(2), {"count": count, "x": normal((3,), 1, 2)})
    np.testing.assert_array_equal(combined["count"], count)


def test_wide_matrix_at_full_rank_is_sent_whole():
    x = normal((3, 1, 8), steps=2)  # a matrix of 3 × 8
    combined, sent, _ = run(power_sgd(3, min_rate=0), x)
    assert_close(combined, mean_over_workers(x))
    assert_close(sent, x)
