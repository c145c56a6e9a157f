"""Robust reducers against their authors' figures, and against wrong workers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import CLOSE, assert_close, normal, run, side_by_side

import syncalgos
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
    "clipped thrice": (clipped(1.0, 3), [[2.01843654, 0.65003048]]),
    "clipped wide": (clipped(10.0), [[3.73606798, -0.36803399]]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("reducer", "expected"), AUTHORS.values(), ids=AUTHORS)
def test_authors_figures(reducer, expected):
    """Two leaves, so that a norm over one leaf would show."""
    x = np.broadcast_to(INPUTS, (len(expected), *INPUTS.shape))
    combined, _, _ = run(reducer, {"a": x[..., :1], "b": x[..., 1]})
    found = np.stack([combined["a"][:, 0, 0], combined["b"][:, 0]], axis=1)
    np.testing.assert_allclose(found, expected, rtol=CLOSE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_median_and_trimmed_mean_match_numpy(workers):
    x = normal((5, 3), workers=workers)
    several = side_by_side({"median": median(), "trimmed": trimmed(0.3)})
    combined, sent, _ = run(several, x)
    cut = min(int(np.ceil(0.3 * workers)), (workers - 1) // 2)
    middle = np.sort(x[0].astype(np.float64), axis=0)[cut : workers - cut]
    assert_close(combined["median"][0, 0], np.median(x[0], axis=0))
    assert_close(combined["trimmed"][0, 0], middle.mean(0))
    np.testing.assert_array_equal(sent["median"], x)


WRONG = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "large": 1e30, "-large": -3e38}


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_two_of_five_workers_may_send_anything(wrong):
    """A sum less its extremes would lose all digits of the others at 1e30."""
    honest = normal((64,), workers=3)
    x = np.concatenate([honest, np.full((1, 2, 64), wrong, np.float32)], axis=1)
    robust = {"median": median(), "trimmed": trimmed(0.4), "clipped": clipped(4.0)}
    combined, _, _ = run(side_by_side(robust), x)
    low, high = honest[0].min(0), honest[0].max(0)
    for name in ("median", "trimmed"):
        assert (low <= combined[name][0, 0]).all()
        assert (combined[name][0, 0] <= high).all()
    norms = np.linalg.norm(honest[0].astype(np.float64), axis=1, keepdims=True)
    expected = (honest[0] * np.minimum(1, 4 / norms)).sum(0) / 5
    pushed = np.abs(combined["clipped"][0, 0] - expected)
    assert np.linalg.norm(pushed) <= 2 / 5 * 4 * (1 + CLOSE)


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
    x = np.full((600, 2, 1), 1, jnp.bfloat16)
    combined, _, [center] = run(clipped(2.0**-9), x)
    assert combined.dtype == jnp.bfloat16 and center.dtype == np.float32
    assert center[-1].ravel() == pytest.approx([1.0, 0.0])  # the second has no part


# Where the pulls on x sum up to 0: of the middle values; and of four workers at 2.5
# each against one that is clipped at 10.
REST = {"median": 1.0, "trimmed": (1 + 1 + 1.1) / 3, "clipped": 1.0 + 2.5}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REST)
def test_training_by_name_survives_a_wrong_worker(name):
    """The fifth worker's data lie far away: the mean would follow them to 200."""
    batches = np.tile(np.float32([0.9, 1.0, 1.1, 1.0, 1e3]), (400, 1))
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(lambda x, batch: jnp.mean((x - batch) ** 2) / 2),
        optax.sgd(0.1),
        syncalgos.sync_sgd(reduce=name),
        workers=5,
        backend="vmap",
    )
    state, _ = trainer.run(trainer.init(np.float32(0.0)), batches)
    assert trainer.center(state).params == pytest.approx(REST[name], rel=1e-4)
