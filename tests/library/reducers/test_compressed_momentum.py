"""Algorithms that send little of each worker's own momentum: NaN, 0 and first steps.

All else of them is in their recurrences, which are tested with all.
"""

import jax
import numpy as np
import pytest
from reducing import of_gradients, run

import syncalgos

GRADS = np.array([[1.0, -1.0, 0.0, 0.5], [2.0, 1.0, 0.0, -0.5], [-1.0, -3.0, 0.0, 0.0]])


def reduced(strategy, grads, first=0):
    """Reduces gradients; returns results and states, both (steps, workers, …)."""
    steps = range(first, first + len(grads))
    combined, _, state = run(of_gradients(strategy), np.float32(grads), steps)
    return combined, state


@pytest.mark.parametrize("majority", [True, False])
def test_first_step_of_distributed_lion_is_the_papers(majority):
    """Signs of 0 and ties are drawn, and differ."""
    strategy = syncalgos.distributed_lion(majority=majority)
    combined, momentum = reduced(strategy, GRADS[None])
    expected = [1, -1] if majority else [1 / 3, -1 / 3]
    np.testing.assert_allclose(combined[0, 0, :2], expected, rtol=1e-6)
    levels = [1] if majority else [1 / 3, 1]
    assert np.isclose(np.abs(combined[0, 0, 2:, None]), levels).any(1).all()
    np.testing.assert_allclose(momentum[0], 0.01 * GRADS, rtol=1e-5)


@pytest.mark.parametrize("name", ["signum", "distributed_lion"])
def test_a_sign_of_nan_shows_on_all_workers_and_leaves_no_momentum(name):
    grads = np.tile(GRADS, (4, 1, 1))
    grads[2, 1, 3] = np.nan
    combined, momentum = reduced(syncalgos.ALGORITHMS[name](), grads)
    assert np.isnan(combined[2]).all()
    assert np.isfinite(combined[[0, 1, 3]]).all()
    np.testing.assert_array_equal(momentum[2], momentum[1])


# What the authors' code (synxlin/deep-gradient-compression) makes of three gradients,
# of which it sends one entry each: (place, value), and u and v behind it.
COLUMN = np.float32([[1, 2, 3], [1, 2, 3], [4, 0, 0]]).reshape(3, 1, 3, 1)
SENT = [
    (2, 3.0, [1, 2, 0], [1, 2, 0]),
    (1, 5.8, [1.9, 0, 3], [2.9, 0, 3]),
    (0, 8.61, [0, 0, 2.7], [0, 0, 5.7]),
]


def test_dgc_sends_what_the_authors_code_does():
    strategy = syncalgos.dgc(density=0.3, dense_steps=0)
    combined, state = reduced(strategy, COLUMN)
    for step, (place, value, u, v) in enumerate(SENT):
        sent = np.zeros(3)
        sent[place] = value
        found = combined[step, 0], state.momentum[step, 0], state.unsent[step, 0]
        for x, y in zip(found, (sent, u, v), strict=True):
            np.testing.assert_allclose(x.ravel(), y, rtol=1e-5)


# Two workers' gradients; the means of the last entry are 0.
TWO = np.array([[1.0, -2.0, 0.5, 0.5], [2.0, 1.0, -0.25, -0.5]])


def test_one_bit_adam_trains_entries_that_had_no_gradient_in_its_dense_steps():
    """They get the leaf's mean variance; entries that still have none never move.

    Divided by ε alone, signs would move them by some ten millions.
    """
    grads = np.zeros((40, 2, 9))
    grads[:, :, :4] = TWO
    grads[8:, 1, 5] = 0.5
    combined, state = reduced(syncalgos.one_bit_adam(dense_steps=4), grads)
    np.testing.assert_array_equal(combined[:, :, [4, 6, 7, 8]], 0)
    np.testing.assert_array_equal(combined[:9, :, 5], 0)
    assert combined[-20:, 0, 5].mean() > 0.1
    second = state.second[-1, 0]
    np.testing.assert_allclose(second[5], second[:4].mean(), rtol=1e-6)
    assert np.abs(combined).max() < 7.28  # (1 - β₁) / √((1 - β₂) (1 - β₁² / β₂))


def test_one_bit_adam_that_never_warmed_up_takes_its_first_momenta_for_a_scale():
    two = np.concatenate([TWO, 0 * TWO], axis=1)
    combined, state = reduced(syncalgos.one_bit_adam(dense_steps=4), [two] * 3, first=4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    np.testing.assert_array_equal(combined[0], 0)
    np.testing.assert_array_equal(combined[:, :, 4:], 0)
    moved = np.abs(combined[1:, :, :4])
    assert moved.min() > 0.01
    assert moved.max() < 1
