"""Error feedback: a reducer's losses are kept, and sent later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reducer_cases import (
    EXACT,
    REDUCERS,
    assert_close,
    mean_over_workers,
    normal,
    normal_tree,
    run,
    side_by_side,
)

from syncalgos import reducers
from syncalgos.reducers import error_feedback


def feed_back(*names: str) -> reducers.Reducer:
    return side_by_side({name: error_feedback(REDUCERS[name]) for name in names})


def test_error_feedback_keeps_what_each_worker_did_not_send():
    """Takes a reducer of each kind: what each has sent is tested with all."""
    x = normal((5, 4), steps=5)
    counts = np.arange(15, dtype=np.int32).reshape(5, 3)
    names = "top_k", "power_sgd", "int4"
    combined, sent_updates, states = run(feed_back(*names), {"count": counts, "x": x})
    for name in names:
        means = combined[name]
        messages = sent_updates[name]
        owed = np.float64(x).cumsum(0)
        residual = np.float64(states[name].residual["x"])
        # Float32 residuals that were added up, against their sum.
        assert_close(np.float64(messages["x"]).cumsum(0) + residual, owed, 1e-5)
        if name in EXACT:
            assert_close(means["x"], mean_over_workers(messages["x"]))
        for tree in (means, messages):
            np.testing.assert_array_equal(tree["count"], counts)
            assert tree["count"].dtype == np.int32


def test_error_feedback_decays_its_residual():
    x = normal((9,), steps=6)
    combined, _, state = run(error_feedback(reducers.top_k(0.3), decay=0.75), x)
    residual = np.zeros((3, 9))
    expected = []
    for grads in x.astype(np.float64):
        owed = grads + 0.75 * residual
        third = np.sort(np.abs(owed), axis=1)[:, [-3]]  # 3 of 9 entries are sent
        message = np.where(np.abs(owed) >= third, owed, 0)
        residual = owed - message
        expected.append(message)
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
    send_nothing = optax.stateless(
        lambda grads, params: jax.tree.map(jnp.zeros_like, grads)
    )
    combined, _, state = run(error_feedback(send_nothing), x)
    assert combined.dtype == jnp.bfloat16
    assert state.residual.dtype == np.float32
    np.testing.assert_array_equal(state.residual[-1], np.ones((2, 1)))


def test_steps_that_are_not_finite_leave_no_trace():
    """They show in the result on all workers, and in no later step."""
    reducer = feed_back("int4", "power_sgd")
    updates = normal_tree(8, matrix=(5, 4), vector=(3,))
    values_by_step = {1: np.nan, 4: np.inf, 6: -np.inf}
    clean_steps = [step for step in range(8) if step not in values_by_step]
    # As many steps, so that it is the same program.
    repeated_steps = [*clean_steps, *clean_steps[:3]]
    clean_updates = jax.tree.map(lambda x: x[repeated_steps], updates)
    expected, _, expected_states = run(reducer, clean_updates, repeated_steps)
    for step, value in values_by_step.items():
        updates["matrix"][step, 1, 2, 3] = value
    combined, _, states = run(reducer, updates)
    for name, tree in combined.items():
        for step, value in values_by_step.items():
            assert not np.isfinite(tree["matrix"][step]).all(), name
            assert (tree["matrix"][step, :, 2, 3] != -value).all(), name
    for x, y in zip(
        jax.tree.leaves((combined, states)),
        jax.tree.leaves((expected, expected_states)),
        strict=True,
    ):
        np.testing.assert_array_equal(x[clean_steps], y[: len(clean_steps)])


def test_an_entry_that_is_not_finite_and_not_sent_is_not_kept():
    random_k = reducers.random_k(0.05)
    reducer_pair = side_by_side(
        {"fed": error_feedback(random_k), "ef21": reducers.ef21(random_k)}
    )
    x = normal((64,), steps=4)
    x[1, 1, 0] = np.nan
    combined, _, states = run(reducer_pair, x)
    for leaf in jax.tree.leaves((combined, states)):  # at step 1 it was not sent
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_ef21_of_steady_gradients_comes_to_their_mean():
    """Messages shrink, and with them what is lost, but for float32's rounding."""
    x = np.broadcast_to(normal((6, 5)), (60, 3, 6, 5))
    ef21 = {
        name: reducers.ef21(REDUCERS[name], local_momentum=0.0)
        for name in ("top_k-int4", "power_sgd")
    }
    combined, estimates, _ = run(side_by_side(ef21), x)
    mean = mean_over_workers(x[-1:])[0]
    for name in ef21:
        assert_close(combined[name][-1], mean, 1e-5)
        assert_close(estimates[name][-1], x[-1], 1e-5)
        first_error = np.linalg.norm(combined[name][0] - mean) / np.linalg.norm(mean)
        assert first_error > 0.1, name
