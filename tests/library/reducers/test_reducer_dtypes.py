"""Dtypes in which reducers round, sum and return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.reducer_cases import (
    assert_close,
    mean_over_workers,
    normal,
    run,
    side_by_side,
)

from syncalgos import reducers


def test_mean_is_taken_in_the_dtype_it_is_told():
    x = normal((50,))
    combined, _, _ = run(reducers.mean(jnp.bfloat16), x)
    exact = mean_over_workers(x.astype(jnp.bfloat16))
    # A sum and a division each round by 2^-8; XLA may leave roundings out.
    assert_close(combined, exact, 3 * 2**-8)


def test_fp16_overflows_and_underflows_where_it_says():
    x = np.array([65504, 7e4, -7e4, 1e-8, 1e-6], np.float32)
    combined, _, _ = run(reducers.fp16(), np.broadcast_to(x, (1, 2, 5)))
    np.testing.assert_array_equal(combined[0, 0, :4], [65504, np.inf, -np.inf, 0])
    # A subnormal: steps of 6e-8, halved by rounding to nearest.
    np.testing.assert_allclose(combined[0, 0, 4], 1e-6, atol=3e-8)


SUMMED = {
    "mean-float32": reducers.mean(jnp.float32),
    "bf16": reducers.bf16(),
    "sign": reducers.sign(),
    "top_k": reducers.top_k(1),
    "row_sparse": reducers.row_sparse(3, tables=True),
    "power_sgd": reducers.power_sgd(1, min_rate=0),
    "error_feedback(mean)": reducers.error_feedback("mean"),
}


def test_bfloat16_is_summed_in_float32():
    values = np.array([256, 1, 1, 1, 1], jnp.bfloat16)
    # Added up in bfloat16 they are 256, not 260: else this test could not fail.
    assert functools.reduce(lambda x, y: x + y, values) == 256
    x = np.broadcast_to(values[:, None, None], (1, 5, 3, 2))
    combined, sent_updates, _ = run(side_by_side(SUMMED), x)
    for name, mean in combined.items():
        assert mean.dtype == sent_updates[name].dtype == jnp.bfloat16, name
        exact = np.full(x.shape, 52, jnp.bfloat16)
        np.testing.assert_array_equal(mean, exact, err_msg=name)


def test_float64_is_rounded_to_levels_in_float64():
    with jax.enable_x64(True):
        x = np.float64(normal((12,)))
        combined, sent_updates, _ = run(reducers.quantized(8), x)
    assert combined.dtype == sent_updates.dtype == np.float64
    level = sent_updates.reshape(1, 3, 3, 4) * 127  # in parts of 4
    level /= np.max(np.abs(x.reshape(1, 3, 3, 4)), axis=-1, keepdims=True)
    np.testing.assert_allclose(level, np.round(level), rtol=0, atol=1e-13)
