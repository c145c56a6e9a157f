"""Error feedback: a reducer's losses are kept, and sent later."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import (
    EXACT,
    REDUCERS,
    UNFED,
    VOTES,
    assert_close,
    each_leaf,
    mean_over_workers,
    normal,
    normal_tree,
    run,
    side_by_side,
)

from syncalgos.reducers import ef21, error_feedback, power_sgd, random_k, top_k

# Each half of the one left out is there alone.
FED = [n for n in REDUCERS if n not in ("top_k-int4", *UNFED)]


@functools.cache
def with_feedback(name):
    """Returns updates, combined, sent and the residual, under error feedback."""
    updates = normal_tree(5, matrix=(5, 4))
    combined, sent, state = run(error_feedback(REDUCERS[name]), updates)
    return updates, combined, sent, state.residual


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [n for n in FED if n in EXACT])
def test_error_feedback_conserves_the_sum_of_the_gradients(name):
    updates, combined, _, residual = with_feedback(name)
    for x, given, kept in each_leaf(updates, combined, residual):
        owed = np.cumsum(mean_over_workers(x), axis=0)
        # Float32 residuals that were added up, against their sum.
        assert_close(np.cumsum(given, axis=0) + mean_over_workers(kept), owed, 1e-5)


@pytest.mark.parametrize(("name", "unit"), [("bf16", 2**-8), ("int4", 1 / 7)])
def test_error_feedback_misses_the_second_rounding_alone(name, unit):
    updates, combined, _, residual = with_feedback(name)
    for x, given, kept in each_leaf(updates, combined, residual):
        owed = np.cumsum(mean_over_workers(x), axis=0)
        missed = np.cumsum(given, axis=0) + mean_over_workers(kept) - owed
        # Each is off by a unit at most, of the largest mean, which keeps its size.
        most = np.cumsum(unit * np.max(np.abs(given), axis=(1, 2)))
        assert (np.max(np.abs(missed), axis=(1, 2)) <= most * 1.01).all()


@pytest.mark.parametrize("name", FED)
def test_error_feedback_keeps_what_each_worker_did_not_send(name):
    updates, _, sent, residual = with_feedback(name)
    for x, parts, kept in each_leaf(updates, sent, residual):
        assert_close(np.cumsum(parts, axis=0) + kept, np.cumsum(x, axis=0), 1e-5)


def test_error_feedback_decays_its_residual():
    x = normal((9,), steps=6)
    combined, _, state = run(error_feedback(top_k(0.3), decay=0.75), x)
    residual, expected = np.zeros((3, 9)), []
    for grads in x.astype(np.float64):
        owed = grads + 0.75 * residual
        third = np.sort(np.abs(owed), axis=1)[:, [-3]]  # 3 of 9 entries are sent
        sent = np.where(np.abs(owed) >= third, owed, 0)
        residual = owed - sent
        expected.append(sent)
    assert_close(combined, mean_over_workers(np.array(expected)))
    assert_close(state.residual[-1], residual)


def test_error_feedback_takes_what_any_transformation_returns_for_sent():
    x = normal((4,), steps=3)
    rounding = optax.stateless(lambda updates, params: jnp.round(updates))
    combined, _, state = run(error_feedback(rounding), x)
    assert_close(combined.sum(0) + state.residual[-1], np.float64(x).sum(0))
    np.testing.assert_array_equal(combined, np.round(combined))


def test_error_feedback_of_bfloat16_adds_up_its_residual_in_float32():
    # In bfloat16 the sum of 2^-9 would stay at 0.5, of which that is half an ulp.
    x = np.full((512, 2, 1), 2.0**-9, jnp.bfloat16)
    nothing = optax.stateless(lambda grads, params: jax.tree.map(jnp.zeros_like, grads))
    combined, _, state = run(error_feedback(nothing), x)
    assert combined.dtype == jnp.bfloat16
    assert state.residual.dtype == np.float32
    np.testing.assert_array_equal(state.residual[-1], np.ones((2, 1)))


@pytest.mark.parametrize("name", ["mean", "top_k"])
def test_error_feedback_keeps_integers(name):
    updates = {"count": np.arange(6, dtype=np.int32).reshape(2, 3), "x": normal((4,))}
    updates["x"] = np.repeat(updates["x"], 2, axis=0)
    combined, sent, _ = run(error_feedback(REDUCERS[name]), updates)
    for tree in (combined, sent):
        np.testing.assert_array_equal(tree["count"], updates["count"])
        assert tree["count"].dtype == np.int32


TELLING = [name for name in FED if name not in VOTES]  # a vote has no third answer


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(bad):
    """It shows in the result on all workers, and in no later step."""
    reducer = side_by_side({n: error_feedback(REDUCERS[n]) for n in TELLING})
    updates = normal_tree(6, matrix=(5, 4), vector=(3,))
    others = [0, 1, 3, 4, 5]  # as many steps, so that it is the same program
    clean = jax.tree.map(lambda x: x[others], updates)
    expected, _, state = run(reducer, clean, steps=others)
    updates["matrix"][2, 1] = bad
    combined, _, spoiled = run(reducer, jax.tree.map(lambda x: x[:5], updates))
    for name in TELLING:
        found = combined[name]["matrix"][2]
        assert not np.isfinite(found).all(), name
        assert not (np.isinf(found) & (found == -bad)).any(), name
    for x, y in zip(*map(jax.tree.leaves, (combined, expected)), strict=True):
        np.testing.assert_array_equal(x[3:], y[2:4])
    for x, y in zip(*map(jax.tree.leaves, (spoiled, state)), strict=True):
        np.testing.assert_array_equal(x[4], y[3])


def test_an_entry_that_is_not_finite_and_not_sent_is_not_kept():
    x = normal((64,), steps=6)
    x[2, 1, :48] = np.nan
    combined, _, state = run(error_feedback(random_k(0.05)), x)
    assert np.isfinite(state.residual).all()
    assert np.isfinite(combined[3:]).all()


@pytest.mark.parametrize(
    "reducer", [top_k(0.3), random_k(0.3), power_sgd(2, min_rate=0), top_k(0.3, bits=4)]
)
def test_ef21_of_steady_gradients_comes_to_their_mean(reducer):
    """Messages shrink, and with them what is lost, but for float32's rounding."""
    x = np.broadcast_to(normal((6, 5)), (60, 3, 6, 5))
    combined, known, _ = run(ef21(reducer, local_momentum=0.0), x)
    assert_close(combined[-1], mean_over_workers(x[-1:])[0], 1e-5)
    assert_close(known[-1], x[-1], 1e-5)
    assert relative(combined[0], mean_over_workers(x[:1])[0]) > 0.1


def relative(x, y):
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def test_ef21_keeps_integers():
    updates = {"count": np.arange(6, dtype=np.int32).reshape(2, 3), "x": normal((4,))}
    updates["x"] = np.repeat(updates["x"], 2, axis=0)
    combined, known, _ = run(ef21(top_k(0.3)), updates)
    for tree in (combined, known):
        np.testing.assert_array_equal(tree["count"], updates["count"])
        assert tree["count"].dtype == np.int32


def test_a_momentum_of_ef21_that_is_not_finite_and_not_sent_is_not_kept():
    x = normal((64,), steps=6)
    x[2, 1, :48] = np.nan
    combined, _, state = run(ef21(random_k(0.05)), x)
    assert np.isfinite(state.momentum).all()
    assert np.isfinite(combined[3:]).all()
