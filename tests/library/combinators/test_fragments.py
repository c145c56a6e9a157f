"""Fragments of a model: which bytes are in each, and masks that are slices."""

import jax
import numpy as np
import pytest
from problems.quadratics import ROUNDING, START, ByHand, flatten, train, unflatten
from reducing import shapes_of

from models import gpt
from syncalgos import bmuf, communication, masked, model_averaging
from syncalgos import streaming_diloco as streaming
from syncalgos.combinators import fragments

GPT2 = shapes_of(lambda key: gpt.init(key, 50257, 1024, 768, 12))


def shares(cut):
    """Per cent of GPT-2's bytes that are sent by each of four steps."""
    strategy = streaming(4, fragments=4, cut=cut, stacked=gpt.STACKED)
    sent = communication(strategy, GPT2, workers=2, steps=4)
    dense = 4 * sum(np.prod(x.shape) for x in jax.tree.leaves(GPT2))
    assert sent.bytes_per_worker == dense
    return [round(100 * x / dense) for x in np.diff(sent.per_step, prepend=0)]


def by_kind(params):
    return {"tokens": 3, "positions": 2, "blocks": 0, "norm": 1}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("leaves", [23, 6, 40, 32]),
        ("bytes", [25, 24, 26, 25]),
        ("layers", [48, 18, 17, 17]),
        (by_kind, [68, 0, 1, 31]),
    ],
)
def test_fragments_of_gpt2_have_so_many_per_cent(cut, expected):
    assert shares(cut) == expected


def mask(number, count, cut, params, stacked=0):
    return fragments.mask(number, count, cut, stacked, params)


def test_layers_of_a_fragment_are_strided():
    params = {"blocks": np.zeros((5, 2)), "head": np.zeros(9), "scale": np.zeros(())}
    stacked = {"blocks": 1, "head": 0, "scale": 0}
    masks = [mask(f, 3, "layers", params, stacked) for f in range(3)]
    strides = [slice(0, 4, 3), slice(1, 5, 3), slice(2, 3, 1)]
    assert [m["blocks"] for m in masks] == strides
    assert [m["head"] for m in masks] == [False, False, True]  # it had the least
    assert [m["scale"] for m in masks] == [True, False, False]


@pytest.mark.parametrize("cut", fragments.CUTS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_every_row_is_in_one_fragment(cut, count):
    params = {"a": np.zeros((5, 3)), "b": np.zeros(()), "c": np.zeros((0, 2))}
    params |= {"d": np.zeros(4), "e": np.zeros((2, 3, 4))}
    stacked = {"a": 1, "b": 0, "c": 1, "d": 0, "e": 1}
    seen = jax.tree.map(np.zeros_like, params)
    for number in range(count):
        mine = mask(number, count, cut, params, stacked)
        for name, rows in mine.items():
            if rows is not False:
                seen[name][... if rows is True else rows] += 1
    assert all((x == 1).all() for x in seen.values())


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("rows", r"unknown cut 'rows' \(one of: leaves, bytes, layers\)"),
        (lambda params: 4, "cut: a fragment must be below fragments = 4, got 4"),
        (lambda params: True, "cut: a fragment must be a whole number .* got True"),
        (lambda params: {"body": 0}, "cut must be a tree like params"),
    ],
)
def test_wrong_cuts_are_refused(cut, message):
    with pytest.raises(ValueError, match=message):
        streaming(cut=cut).init(unflatten(START))


ROWS = {"body": {"bias": slice(1, 3), "kernel": slice(0, None, 2)}, "head": False}


def in_rows():
    """Marks the entries in ROWS."""
    tree = jax.tree.map(np.zeros_like, unflatten(START))
    for name, rows in ROWS["body"].items():
        tree["body"][name][rows] = 1
    return flatten(tree) > 0


def test_mask_of_slices_averages_those_rows_alone():
    with jax.enable_x64(True):
        own = ByHand()
        for _, theta, _ in own.ends():
            theta[:, in_rows()] = theta[:, in_rows()].mean(0)
        trained = train(masked(model_averaging(4), ROWS))
    np.testing.assert_allclose(trained.replicas, own.replicas, atol=ROUNDING)
    means = own.replicas.mean(1)
    np.testing.assert_allclose(trained.centers, means, atol=ROUNDING)


def test_rows_that_are_masked_have_the_center_of_their_strategy():
    with jax.enable_x64(True):
        part, whole = (
            train(masked(bmuf(4, block_momentum=0.8), ROWS)),
            train(bmuf(4, block_momentum=0.8)),
        )
    rows, rest = in_rows(), ~in_rows()
    # After the first block: so far they had the same local steps.
    np.testing.assert_allclose(part.centers[3][rows], whole.centers[3][rows], ROUNDING)
    mean = part.replicas[3].mean(0)
    np.testing.assert_allclose(part.centers[3][rest], mean[rest], ROUNDING)


def test_rows_of_a_leaf_without_axes_are_refused():
    strategy = masked(model_averaging(4), {"scale": slice(0, 1)})
    with pytest.raises(ValueError, match="mask of a leaf without axes must be"):
        strategy.init({"scale": np.float32(1)})


def test_rows_that_are_not_masked_are_not_sent():
    params = jax.tree.map(np.float32, unflatten(START))
    sent = communication(masked(model_averaging(4), ROWS), params, workers=2, steps=8)
    assert sent.bytes_per_worker == 2 * 4 * in_rows().sum()  # two syncs, a ring of two
