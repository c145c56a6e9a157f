"""Fragments of a model: which bytes are in each, and masks that are slices."""

from typing import Any

import jax
import numpy as np
import pytest
from support.reducer_cases import param_shapes

from models import gpt
from syncalgos import communication, masked, model_averaging, streaming_diloco
from syncalgos.algorithms import _fragments as fragments

GPT2 = param_shapes(lambda key: gpt.init(key, 50257, 1024, 768, 12))


def cut_by_kind(params: Any) -> dict[str, int]:
    return {"tokens": 3, "positions": 2, "blocks": 0, "norm": 1}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("leaves", [23, 6, 40, 32]),
        ("bytes", [25, 24, 26, 25]),
        ("layers", [48, 18, 17, 17]),
        (cut_by_kind, [68, 0, 1, 31]),
    ],
)
def test_fragments_of_gpt2_have_so_many_per_cent(cut, expected):
    """Counts the bytes that are sent by each of four steps."""
    strategy = streaming_diloco(4, fragments=4, cut=cut, layered=gpt.LAYERED)
    counts = communication(strategy, GPT2, workers=2, steps=4)
    dense = 4 * sum(np.prod(x.shape) for x in jax.tree.leaves(GPT2))
    assert counts.bytes_per_worker == dense
    shares = np.diff(counts.per_step, prepend=0) / dense
    assert [round(100 * x) for x in shares] == expected


def make_mask(number: int, count: int, cut: str, params: Any, layered: Any = 0) -> Any:
    return fragments.mask(number, count, cut, layered, params)


def test_layers_of_a_fragment_are_strided():
    params = {"blocks": np.zeros((5, 2)), "head": np.zeros(9), "scale": np.zeros(())}
    layered = {"blocks": 1, "head": 0, "scale": 0}
    masks = [make_mask(f, 3, "layers", params, layered) for f in range(3)]
    strides = [slice(0, 4, 3), slice(1, 5, 3), slice(2, 3, 1)]
    assert [m["blocks"] for m in masks] == strides
    assert [m["head"] for m in masks] == [False, False, True]  # it had the least
    assert [m["scale"] for m in masks] == [True, False, False]


@pytest.mark.parametrize("cut", fragments.CUTS)
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_every_row_is_in_one_fragment(cut, count):
    params = {"a": np.zeros((5, 3)), "b": np.zeros(()), "c": np.zeros((0, 2))}
    params |= {"d": np.zeros(4), "e": np.zeros((2, 3, 4))}
    layered = {"a": 1, "b": 0, "c": 1, "d": 0, "e": 1}
    mask_counts = jax.tree.map(np.zeros_like, params)
    for number in range(count):
        fragment_mask = make_mask(number, count, cut, params, layered)
        for name, rows in fragment_mask.items():
            if rows is not False:
                mask_counts[name][... if rows is True else rows] += 1
    assert all((x == 1).all() for x in mask_counts.values())


def test_rows_that_are_not_masked_are_not_sent():
    params = {"bias": np.zeros(4, np.float32), "kernel": np.zeros((3, 4), np.float32)}
    rows = {"bias": slice(1, 3), "kernel": slice(0, None, 2)}
    counts = communication(masked(model_averaging(4), rows), params, workers=2, steps=8)
    assert counts.bytes_per_worker == 2 * 4 * (2 + 2 * 4)  # two syncs, a ring of two
