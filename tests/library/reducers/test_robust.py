"""Robust reducers against their authors' figures, and against wrong workers."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from support.reducer_cases import CLOSE, assert_close, normal, run, side_by_side

from syncalgos.reducers import Reducer, clipped, median, trimmed

INPUTS = np.float32([[1, 2], [2, 1], [3, 0], [100, -50]])


class AuthorsMeans(NamedTuple):
    """A reducer, and its means of INPUTS at the first steps, by the authors' code."""

    reducer: Reducer
    means: list[list[float]]


# Of Karimireddy et al. (byzantine-robust-optimizer).
AUTHORS = {
    "median": AuthorsMeans(median(), [[2.5, 0.5]]),
    "trimmed, 1 of 4": AuthorsMeans(trimmed(0.2), [[2.5, 0.5]]),
    "clipped": AuthorsMeans(
        clipped(1.0),
        [[0.80901699, 0.2236068], [1.5169176, 0.47038553], [2.01843654, 0.65003048]],
    ),
    "clipped thrice": AuthorsMeans(
        clipped(1.0, iterations=3), [[2.01843654, 0.65003048]]
    ),
    "clipped wide": AuthorsMeans(clipped(10.0), [[3.73606798, -0.36803399]]),
}


def test_robust_means_are_the_authors_figures():
    """Two leaves, so that a norm over one leaf would show."""
    x = np.broadcast_to(INPUTS, (3, *INPUTS.shape))
    reducer = side_by_side({name: case.reducer for name, case in AUTHORS.items()})
    combined, _, _ = run(reducer, {"a": x[..., :1], "b": x[..., 1]})
    for name, case in AUTHORS.items():
        means = np.stack([combined[name]["a"][:, 0, 0], combined[name]["b"][:, 0]], 1)
        means = means[: len(case.means)]
        np.testing.assert_allclose(means, case.means, rtol=CLOSE, err_msg=name)


@pytest.mark.parametrize("workers", [4, 5])
def test_median_and_trimmed_mean_match_numpy(workers):
    """A third at each end of four workers would leave none: it is rounded down."""
    x = normal((5, 3), workers=workers)
    reducer = side_by_side({"median": median(), "trimmed": trimmed(0.3)})
    combined, sent_updates, _ = run(reducer, x)
    num_left_out = min(int(np.ceil(0.3 * workers)), (workers - 1) // 2)
    middle = np.sort(x[0].astype(np.float64), axis=0)[
        num_left_out : workers - num_left_out
    ]
    assert_close(combined["median"][0, 0], np.median(x[0], axis=0))
    assert_close(combined["trimmed"][0, 0], middle.mean(0))
    np.testing.assert_array_equal(sent_updates["median"], x)


WRONG_VALUES = np.float32([np.nan, np.inf, -np.inf, 1e30, -3e38])  # one at each step


def test_two_of_five_workers_may_send_anything():
    """A sum less its extremes would lose all digits of the others at 1e30."""
    honest = normal((64,), len(WRONG_VALUES), workers=3)
    wrong = np.broadcast_to(WRONG_VALUES[:, None, None], (len(WRONG_VALUES), 2, 64))
    reducers = {"median": median(), "trimmed": trimmed(0.4), "clipped": clipped(4.0)}
    combined, _, _ = run(
        side_by_side(reducers), np.concatenate([honest, wrong], axis=1)
    )
    center = np.zeros(64)
    for step, honest_values in enumerate(np.float64(honest)):
        for name in ("median", "trimmed"):
            assert (honest_values.min(0) <= combined[name][step, 0]).all()
            assert (combined[name][step, 0] <= honest_values.max(0)).all()
        distances = honest_values - center
        norms = np.linalg.norm(distances, axis=1, keepdims=True)
        expected = center + (distances * np.minimum(1, 4 / norms)).sum(0) / 5
        center = combined["clipped"][step, 0].astype(np.float64)
        deviation = np.linalg.norm(center - expected)
        assert deviation <= 2 / 5 * 4 * (1 + CLOSE)


def test_nan_of_too_many_workers_shows():
    x = normal((4,), workers=3)
    x[0, :2] = np.nan
    combined, _, _ = run(side_by_side({"median": median(), "trimmed": trimmed()}), x)
    assert np.isnan(combined["median"]).all() and np.isnan(combined["trimmed"]).all()


def test_clipped_goes_on_from_its_last_result_where_nobody_is_finite():
    x = np.ones((3, 3, 4), np.float32)
    x[1] = np.nan
    combined, _, state = run(clipped(1.0), x)
    # Of norm 2, it moves by 1 at a time; then distances are 0.
    np.testing.assert_allclose(combined[:, 0, 0], [0.5, 0.5, 1], rtol=CLOSE)
    assert all(np.isfinite(x).all() for x in state)


def test_clipped_of_bfloat16_keeps_its_center_in_float32():
    combined, _, [center] = run(clipped(2.0**-9), np.full((600, 2, 1), 1, jnp.bfloat16))
    assert combined.dtype == jnp.bfloat16 and center.dtype == np.float32
    assert center[-1].ravel() == pytest.approx([1.0, 0.0])  # the second has no part
