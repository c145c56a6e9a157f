"""Dtypes in which reducers round, sum and return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reducing import (
    CLOSE,
    assert_close,
    each_leaf,
    mean_over_workers,
    normal,
    outcome,
    run,
)

from syncalgos import reducers
from syncalgos.reducers import (
    error_feedback,
    power_sgd,
    quantized,
    row_sparse,
    sign,
    top_k,
)


def test_cast_rounds_the_mean_of_what_was_sent_once_more():
    for x, combined, sent in each_leaf(*outcome("bf16")):
        np.testing.assert_array_equal(sent, x.astype(jnp.bfloat16))
        np.testing.assert_array_equal(combined, combined.astype(jnp.bfloat16))
        mean = mean_over_workers(sent)
        # To nearest, of 8 bits, and a float32 sum before it.
        assert (np.abs(combined - mean) <= (2**-8 + CLOSE) * np.abs(mean)).all()


def test_mean_is_taken_in_the_dtype_it_is_told():
    x = normal((50,))
    combined, _, _ = run(reducers.mean(jnp.bfloat16), x)
    exact = mean_over_workers(x.astype(jnp.bfloat16))
    # A sum and a division each round by 2^-8; XLA may leave roundings out.
    assert_close(combined, exact, 3 * 2**-8)


def test_fp16_overflows_and_underflows_where_it_says():
    x = np.array([65504, 7e4, -7e4, 1e-8, 1e-6], np.float32)
    combined, _, _ = run(reducers.fp16(), np.broadcast_to(x, (1, 2, 5)))
    kept = [65504, np.inf, -np.inf, 0]
    np.testing.assert_array_equal(combined[0, 0, :4], kept)
    # A subnormal: steps of 6e-8, halved by rounding to nearest.
    np.testing.assert_allclose(combined[0, 0, 4], 1e-6, atol=3e-8)


@pytest.mark.parametrize(
    "make", [quantized, functools.partial(top_k, 1)], ids=["quantized", "top_k"]
)
def test_rounding_takes_large_entries_of_float16(make):
    x = np.full((1, 2, 3), 1000, np.float16)  # 127 times that is above 65504
    combined, sent, _ = run(make(bits=8), x)
    np.testing.assert_array_equal(combined, x)
    np.testing.assert_array_equal(sent, x)


SUMMED = {
    "mean-float32": reducers.mean(jnp.float32),
    "bf16": reducers.bf16(),
    "int4": quantized(4),
    "sign": sign(),
    "top_k": top_k(1),
    "row_sparse": row_sparse(3, True),
    "power_sgd": power_sgd(1, min_rate=0),
    "error_feedback(mean)": error_feedback("mean"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SUMMED)
def test_bfloat16_is_summed_in_float32(name):
    values = np.array([256, 1, 1, 1, 1], jnp.bfloat16)
    # Added up in bfloat16 they are 256, not 260: else this test could not fail.
    assert functools.reduce(lambda x, y: x + y, values) == 256
    x = np.broadcast_to(values[:, None, None], (1, 5, 3, 2))
    combined, sent, _ = run(SUMMED[name], x)
    assert combined.dtype == sent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(combined, np.full(x.shape, 52, jnp.bfloat16))


def test_float64_is_rounded_to_levels_in_float64():
    with jax.enable_x64(True):
        x = np.float64(normal((12,)))
        combined, sent, _ = run(quantized(8), x)
    assert combined.dtype == sent.dtype == np.float64
    level = sent.reshape(1, 3, 3, 4) * 127  # in parts of 4
    level /= np.max(np.abs(x.reshape(1, 3, 3, 4)), axis=-1, keepdims=True)
    np.testing.assert_allclose(level, np.round(level), rtol=0, atol=1e-13)
