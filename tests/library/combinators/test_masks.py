"""Strategies for a part of the params, and the centers of parts in a chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems.quadratics import (
    SIZE,
    START,
    assert_same,
    flatten,
    train,
    unflatten,
)
from support.problems.sync_oracles import BODY

import syncalgos as sa
from syncalgos import chain, masked

PARTS = {
    "tree": {"body": {"bias": True, "kernel": True}, "head": {"scale": False}},
    "prefix": {"body": True, "head": False},
    "path": lambda path, shape: path.startswith("body/"),
    "params": lambda params: PARTS["prefix"],
}
IN_BODY = PARTS["prefix"]
IN_HEAD = {"body": False, "head": True}
KERNEL = {"body": {"bias": False, "kernel": True}, "head": False}


@pytest.mark.parametrize("mask", PARTS.values(), ids=PARTS)
def test_masks_of_all_forms_choose_the_same_leaves(mask):
    """By the anchor, which is of the part alone."""
    part = masked(sa.outer_step(optax.sgd(1.0)), mask)
    anchor = part.init(unflatten(np.arange(float(SIZE)))).anchor
    np.testing.assert_array_equal(flatten(anchor), np.flatnonzero(BODY))


class Called(NamedTuple):
    """A model that can be called, as modules can: its masks can be, too."""

    body: Any
    head: Any

    def __call__(self, x: Any) -> None:
        raise AssertionError("called")


def test_a_mask_of_a_class_that_can_be_called_is_a_tree():
    part = masked(sa.outer_step(optax.sgd(1.0)), Called(True, False))
    [anchor] = jax.tree.leaves(part.init(Called(jnp.ones(2), jnp.ones(3))).anchor)
    assert anchor.shape == (2,)


def make_strategy_with_center(value: int) -> sa.Strategy:
    """A strategy with a center of this value."""

    def center(params: Any, state: Any) -> Any:
        return jax.tree.map(lambda x: 0 * x + value, params)

    return sa.Strategy(center=center)


def is_kernel(path: str, shape: tuple[int, ...]) -> bool:
    return path.endswith("/kernel")


# The last member that knows a center for a leaf gives it, else it is the mean, 1. The
# digits are the centers of bias, kernel and scale.
FIVE = make_strategy_with_center(5)
SEVEN = make_strategy_with_center(7)
GRADIENTS = sa.sync_sgd()
AVERAGE = sa.average()
CENTERS = {
    "nothing": (chain(), "111"),
    "defaults are skipped": (chain(FIVE, GRADIENTS), "555"),
    "defaults before it": (chain(GRADIENTS, FIVE), "555"),
    "last of its own": (chain(FIVE, SEVEN), "777"),
    "nested": (chain(SEVEN, chain(FIVE, AVERAGE)), "555"),
    "nested, without any": (chain(SEVEN, chain(AVERAGE, GRADIENTS)), "777"),
    "behind a period": (chain(SEVEN, sa.every(AVERAGE, 4)), "777"),
    "in a period": (sa.every(FIVE, 4), "555"),
    "no params": (sa.every(chain(sa.average("buffers")), 4), "111"),
    "part over the whole": (chain(SEVEN, masked(FIVE, IN_BODY)), "557"),
    "whole over a part": (chain(masked(FIVE, IN_BODY), SEVEN), "777"),
    "two parts": (chain(masked(FIVE, KERNEL), masked(SEVEN, IN_HEAD)), "157"),
    "part over part": (chain(masked(SEVEN, IN_BODY), masked(FIVE, KERNEL)), "751"),
    "part of a part": (masked(masked(FIVE, is_kernel), IN_BODY), "151"),
    "part of a chain of parts": (
        masked(chain(SEVEN, masked(FIVE, is_kernel)), IN_BODY),
        "751",
    ),
    "parts, nested": (
        chain(SEVEN, chain(sa.average("buffers"), masked(FIVE, IN_HEAD))),
        "775",
    ),
}


@pytest.mark.parametrize("name", CENTERS)
def test_center_of_each_leaf_is_that_of_the_last_member_with_its_own(name):
    strategy, digits = CENTERS[name]

    def center(params: Any) -> Any:
        return strategy.center(params, strategy.init(params))

    params = jax.tree.map(jnp.asarray, unflatten(np.ones((3, SIZE))))
    lane_params = jax.tree.map(lambda x: jnp.cumsum(x, 0) - 1, params)  # 0, 1 and 2
    mapped = jax.vmap(center, axis_name="lanes")
    device_params = jax.tree.map(lambda x: x[None], lane_params)
    centers = flatten(jax.vmap(mapped, axis_name="devices")(device_params), lead=2)
    expected = np.repeat([int(x) for x in digits], [4, 12, 1])
    np.testing.assert_array_equal(centers, np.tile(expected, (1, 3, 1)))


def test_personal_layers_are_not_sent():
    """Neither gradients nor models, in a mask or around one."""
    for strategy, part in [
        (sa.sync_sgd(), masked(sa.sync_sgd(), IN_BODY)),
        (
            sa.delayed(sa.diloco(4), 2),
            sa.delayed(sa.every(masked(sa.diloco(1), IN_BODY), 4), 2),
        ),
    ]:
        counts = sa.communication(strategy, unflatten(START), workers=2, steps=8)
        part_counts = sa.communication(part, unflatten(START), workers=2, steps=8)
        assert part_counts.bytes_per_worker == counts.bytes_per_worker * 16 / SIZE
        assert part_counts.syncs == counts.syncs > 0


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_combinators_work_in_a_loop_of_ones_own_over_a_single_axis():
    def make_strategy(**axis: str) -> sa.Strategy:
        weighted_bmuf = sa.participating(
            sa.bmuf(4, **axis), lambda step, workers: jnp.arange(workers), stale=True
        )
        paced_body = sa.paced(masked(weighted_bmuf, IN_BODY), [4, 3, 2, 1])
        return chain(paced_body, masked(sa.sync_sgd(**axis), IN_HEAD))

    assert_same(
        train(make_strategy(axis="batch"), axis="batch"), train(make_strategy())
    )
