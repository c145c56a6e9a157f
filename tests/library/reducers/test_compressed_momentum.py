"""Algorithms that send little of each worker's own momentum: NaN, 0 and first steps.

All else of them is in their recurrences, which are tested with all.
"""

from typing import Any

import jax
import numpy as np
import pytest
from support.reducer_cases import of_gradients, run
from support.tiers import tiers

import syncalgos

GRADS = np.array([[1.0, -1.0, 0.0, 0.5], [2.0, 1.0, 0.0, -0.5], [-1.0, -3.0, 0.0, 0.0]])


def reduce_grads(
    strategy: syncalgos.Strategy, grads: Any, first_step: int = 0
) -> tuple[Any, Any]:
    """Reduces gradients; returns results and states, both (steps, workers, …)."""
    steps = range(first_step, first_step + len(grads))
    combined, _, state = run(of_gradients(strategy), np.float32(grads), steps)
    return combined, state


@pytest.mark.parametrize("name", tiers(["signum", "distributed_lion"], ["signum"]))
def test_a_sign_of_nan_shows_on_all_workers_and_leaves_no_momentum(name):
    grads = np.tile(GRADS, (4, 1, 1))
    grads[2, 1, 3] = np.nan
    combined, momentum = reduce_grads(syncalgos.ALGORITHMS[name](), grads)
    assert np.isnan(combined[2]).all()
    assert np.isfinite(combined[[0, 1, 3]]).all()
    np.testing.assert_array_equal(momentum[2], momentum[1])


# Two workers' gradients; the means of the last entry are 0.
TWO_WORKERS_GRADS = np.array([[1.0, -2.0, 0.5, 0.5], [2.0, 1.0, -0.25, -0.5]])


def test_one_bit_adam_trains_entries_that_had_no_gradient_in_its_dense_steps():
    """They get the leaf's mean variance; entries that still have none never move.

    Divided by ε alone, signs would move them by some ten millions.
    """
    grads = np.zeros((40, 2, 9))
    grads[:, :, :4] = TWO_WORKERS_GRADS
    grads[8:, 1, 5] = 0.5
    combined, state = reduce_grads(syncalgos.one_bit_adam(dense_steps=4), grads)
    np.testing.assert_array_equal(combined[:, :, [4, 6, 7, 8]], 0)
    np.testing.assert_array_equal(combined[:9, :, 5], 0)
    assert combined[-20:, 0, 5].mean() > 0.1
    variance = state.second[-1, 0]
    np.testing.assert_allclose(variance[5], variance[:4].mean(), rtol=1e-6)
    assert np.abs(combined).max() < 7.28  # (1 - β₁) / √((1 - β₂) (1 - β₁² / β₂))


@pytest.mark.slow
def test_one_bit_adam_that_never_warmed_up_takes_its_first_momenta_for_a_scale():
    grads = np.concatenate([TWO_WORKERS_GRADS, 0 * TWO_WORKERS_GRADS], axis=1)
    combined, state = reduce_grads(
        syncalgos.one_bit_adam(dense_steps=4), [grads] * 3, first_step=4
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    np.testing.assert_array_equal(combined[0], 0)
    np.testing.assert_array_equal(combined[:, :, 4:], 0)
    step_sizes = np.abs(combined[1:, :, :4])
    assert step_sizes.min() > 0.01
    assert step_sizes.max() < 1


@pytest.mark.parametrize("step", [1, 3], ids=["dense", "signs"])
@pytest.mark.parametrize("value", tiers(["inf", "-inf", "nan"], ["nan"]))
def test_one_bit_adam_passes_values_that_are_not_finite_as_nan(step, value):
    grads = np.tile(TWO_WORKERS_GRADS, (5, 1, 1))
    grads[step, 1, 0] = float(value)
    combined, state = reduce_grads(syncalgos.one_bit_adam(dense_steps=2), grads)
    assert np.isnan(combined[step, :, 0]).all()
    assert np.isfinite(np.delete(combined, step, 0)).all()
    np.testing.assert_array_equal(state.second[step], state.second[step - 1])
