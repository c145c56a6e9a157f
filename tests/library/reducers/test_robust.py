"""Robust reducers against their authors' figures, and against wrong workers."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.reducer_cases import CLOSE, assert_close, normal, run, side_by_side

from syncalgos.reducers import clipped, median, trimmed

# What the code of Karimireddy et al. (byzantine-robust-optimizer) makes of these.
INPUTS = np.float32([[1, 2], [2, 1], [3, 0], [100, -50]])
AUTHORS = {
    "median": (median(), [[2.5, 0.5]]),
    "trimmed, 1 of 4": (trimmed(0.2), [[2.5, 0.5]]),
    "clipped": (
        clipped(1.0),
        [[0.80901699, 0.2236068], [1.5169176, 0.47038553], [2.01843654, 0.65003048]],
    ),
    "clipped thrice": (clipped(1.0, iterations=3), [[2.01843654, 0.65003048]]),
    "clipped wide": (clipped(10.0), [[3.73606798, -0.36803399]]),
}


def test_authors_figures():
    """Two leaves, so that a norm over one leaf would show."""
    x = np.broadcast_to(INPUTS, (3, *INPUTS.shape))
    several = side_by_side({name: reducer for name, (reducer, _) in AUTHORS.items()})
    combined, _, _ = run(several, {"a": x[..., :1], "b": x[..., 1]})
    for name, (_, expected) in AUTHORS.items():
        found = np.stack([combined[name]["a"][:, 0, 0], combined[name]["b"][:, 0]], 1)
        found = found[: len(expected)]
        np.testing.assert_allclose(found, expected, rtol=CLOSE, err_msg=name)


@pytest.mark.parametrize("workers", [4, 5])
def test_median_and_trimmed_mean_match_numpy(workers):
    """A third at each end of four workers would leave none: it is rounded down."""
    x = normal((5, 3), workers=workers)
    several = side_by_side({"median": median(), "trimmed": trimmed(0.3)})
    combined, sent, _ = run(several, x)
    cut = min(int(np.ceil(0.3 * workers)), (workers - 1) // 2)
    middle = np.sort(x[0].astype(np.float64), axis=0)[cut : workers - cut]
    assert_close(combined["median"][0, 0], np.median(x[0], axis=0))
    assert_close(combined["trimmed"][0, 0], middle.mean(0))
    np.testing.assert_array_equal(sent["median"], x)


WRONG = np.float32([np.nan, np.inf, -np.inf, 1e30, -3e38])  # one at each step


def test_two_of_five_workers_may_send_anything():
    """A sum less its extremes would lose all digits of the others at 1e30."""
    honest = normal((64,), len(WRONG), workers=3)
    wrong = np.broadcast_to(WRONG[:, None, None], (len(WRONG), 2, 64))
    robust = {"median": median(), "trimmed": trimmed(0.4), "clipped": clipped(4.0)}
    combined, _, _ = run(side_by_side(robust), np.concatenate([honest, wrong], axis=1))
    center = np.zeros(64)
    for step, own in enumerate(np.float64(honest)):
        for name in ("median", "trimmed"):
            assert (own.min(0) <= combined[name][step, 0]).all()
            assert (combined[name][step, 0] <= own.max(0)).all()
        apart = own - center
        norms = np.linalg.norm(apart, axis=1, keepdims=True)
        expected = center + (apart * np.minimum(1, 4 / norms)).sum(0) / 5
        center = combined["clipped"][step, 0].astype(np.float64)
        pushed = np.linalg.norm(center - expected)
        assert pushed <= 2 / 5 * 4 * (1 + CLOSE)


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
