"""Chunks of leaves, packed indices, bins, components: what SparseLoCo and DeMo send."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.reducer_cases import CLOSE, assert_close, normal, run

from syncalgos import Strategy, communication, demo, sparseloco
from syncalgos.reducers import _chunks, _dct, _hops, chunked_top_k

encode = jax.jit(_chunks.encode_bins, static_argnums=0)
decode = jax.jit(_chunks.decode, static_argnums=(0, 2))


def test_indices_of_12_bits_are_packed_as_the_authors_pack_them():
    packed = _hops.pack_12(jnp.array([1, 2, 4095, 0, 300, 4000]))
    assert packed.dtype == jnp.uint8
    # i & 255, (i >> 8) | ((j & 15) << 4), j >> 4 of each pair
    assert packed.tolist() == [1, 32, 0, 255, 15, 0, 44, 1, 250]


@pytest.mark.parametrize("count", [5, 64])
def test_packed_indices_are_read_as_they_were(count):
    indices = np.random.default_rng(count).permutation(4096)[:count]
    packed = _hops.pack_12(jnp.asarray(indices))
    assert packed.size == -(-count * 3 // 2)
    np.testing.assert_array_equal(_hops.unpack_12(packed, count), indices)


def test_bins_are_those_of_the_authors():
    """Codes 1 1 2 2 2 2 3 3 over six standard deviations; the means are the table."""
    values = jnp.array([-3.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 5.0])
    code = encode(2, values)
    assert _hops.unpack(code[0], 2).tolist() == [1, 1, 2, 2, 2, 2, 3, 3]
    np.testing.assert_allclose(code[1][1:], [-2.0, 0.75, 4.5], rtol=CLOSE)
    expected = [-2.0, -2.0, 0.75, 0.75, 0.75, 0.75, 4.5, 4.5]
    np.testing.assert_allclose(decode(2, code, values.shape), expected, rtol=CLOSE)


@pytest.mark.parametrize("bits", [8, 4])
def test_bins_keep_the_sum_of_their_values(bits):
    values = np.float64(normal((600,), workers=1)[0, 0] + 3)
    code = encode(bits, jnp.float32(values))
    assert code[0].size == 600 * bits // 8
    decoded = np.float64(decode(bits, code, values.shape))
    assert decoded.sum() == pytest.approx(values.sum(), rel=1e-5)
    width = 6 * np.std(values, ddof=1) / 2**bits
    inside = np.abs(values - values.mean()) < 2.5 * np.std(values)  # else in the last
    assert np.abs(decoded - values)[inside].max() <= width


def test_equal_values_have_a_bin_of_their_own():
    values = jnp.full(9, 0.25)
    decoded = decode(2, encode(2, values), values.shape)
    np.testing.assert_allclose(decoded, values, rtol=CLOSE)


def test_no_more_values_than_bins_are_sent_as_they_are():
    values = jnp.array([1e-3, 7.0, -2.0, 4.0])
    assert _chunks.encode_bins(2, values)[0] is values
    assert len(_chunks.encode_bins(2, jnp.ones(5))) == 2


def test_values_that_are_not_finite_show_behind_bins():
    x = normal((40,), steps=3, workers=2)
    x[:, 1, 7] = np.nan, np.inf, -np.inf
    combined, _, _ = run(chunked_top_k(0.5, bits=2, chunk=16), x)
    assert np.isnan(combined).any((1, 2)).all()


def test_largest_entries_of_each_chunk_are_sent():
    """20 entries in three parts of 7: the last is not full."""
    x = normal((4, 5), steps=2)
    combined, sent_updates, _ = run(chunked_top_k(0.4, bits=None, chunk=8), x)
    flat = np.pad(x.reshape(2, 3, 20), [(0, 0), (0, 0), (0, 1)]).reshape(2, 3, 3, 7)
    expected = np.where(np.abs(flat) >= np.sort(np.abs(flat), -1)[..., [-3]], flat, 0)
    expected = expected.reshape(2, 3, 21)[..., :20].reshape(x.shape)
    np.testing.assert_array_equal(sent_updates, expected)
    assert_close(combined, np.broadcast_to(expected.mean(1, keepdims=True), x.shape))


def count_bytes(strategy: Strategy, *shape: int) -> float:
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    return communication(strategy, params, workers=2, steps=1).bytes_per_worker


@pytest.mark.parametrize(
    ("size", "settings", "bits"),
    [
        (2**20, {}, 12 + 2),
        (2**20, {"bits": None}, 12 + 32),
        (2**18, {"bits": None, "chunk": 8192}, 16 + 32),
        (2**18, {"bits": None, "chunk": 2**17}, 32 + 32),
    ],
)
def test_sparseloco_sends_so_many_bits_an_entry(size, settings, bits):
    table = 0 if settings else 4 * 4
    assert count_bytes(sparseloco(1, **settings), size) == size / 64 * bits / 8 + table


# The authors' sides for a target of 64; theirs are 13, 1 and 1 for the last three.
SIDES = {1: 1, 3: 3, 7: 7, 10: 10, 64: 64, 96: 48, 100: 50, 128: 64, 150: 50, 256: 64}
SIDES |= {784: 56, 1000: 50, 50257: 29, 65: 33, 67: 34, 127: 64}


def test_sides_of_demo_are_the_authors_but_for_lengths_of_few_divisors():
    assert {length: _dct.side(length, 64) for length in SIDES} == SIDES


@pytest.mark.parametrize("shape", [(), (67,), (3, 3, 5, 16)])
def test_components_are_orthonormal_and_lead_back(shape):
    x = normal(shape, workers=1)[0, 0]

    @jax.jit
    def transform_and_invert(x: jax.Array) -> tuple[Any, Any]:
        parts, invert = _dct.components(x, 64)
        return parts, invert(parts)

    parts, restored = transform_and_invert(x)
    np.testing.assert_allclose(restored, x, atol=1e-5)
    assert float(jnp.sum(parts**2)) == pytest.approx(float(jnp.sum(x**2)), rel=1e-4)


CHUNK_BYTES = 32 * (4 + 2)  # values and indices of 16 bits


@pytest.mark.parametrize(
    ("shape", "layered", "chunks"),
    [
        ((768, 768), 0, 144),
        ((12, 768, 768), 1, 12 * 144),
        ((3, 3, 64, 64), 0, 9),
        ((2, 3, 3, 64, 64), 1, 18),
        ((127, 127), 0, 4),
    ],
    ids=["matrix", "stack", "kernel", "stack of kernels", "prime"],
)
def test_demo_sends_32_components_of_each_64_by_64(shape, layered, chunks):
    assert count_bytes(demo(layered=layered), *shape) == chunks * CHUNK_BYTES


def test_demo_never_sends_indices_of_all_components():
    for length in (1, 5, 31, 32):
        assert count_bytes(demo(), length) == 4 * length  # by a ring of two
