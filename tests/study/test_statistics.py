"""Statements about several seeds: spreads, paired differences and bands."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_rel

from experiments.study.analysis import compare
from experiments.study.statistics import (
    ACCURACY,
    Difference,
    Spread,
    band,
    correct_p_values,
    find_difference,
    spread,
)

FIGURES = st.floats(-1e3, 1e3, allow_subnormal=False)
COMPARED = settings(deadline=None, max_examples=100)


def by_seed(values):
    return dict(enumerate(values))


compared: Any = find_difference


def interval(difference: Any) -> Any:
    return difference.low, difference.high


def test_one_value_has_no_deviation_and_equal_ones_exactly_none():
    assert spread([0.5]) == Spread(0.5, None, 1)
    assert spread([0.1, 0.1, 0.1]) == Spread(0.1, 0.0, 3)


@given(st.lists(FIGURES, min_size=2, max_size=8), st.randoms())
def test_a_spread_is_numpys_in_any_order(values, shuffle):
    shuffled = shuffle.sample(values, len(values))
    numbers = spread(values)
    assert spread(shuffled) == numbers
    assert numbers.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert numbers.deviation == pytest.approx(np.std(values, ddof=1), abs=1e-9)


EIGHTHS = {seed: seed / 8 for seed in range(6)}
HIGHER = {seed: value + 0.25 for seed, value in EIGHTHS.items()}
LOWER = {seed: value - 0.25 for seed, value in EIGHTHS.items()}


@pytest.mark.parametrize(
    ("values", "baseline", "expected"),
    [
        # Only seeds that both have. 5 - 4 and 7 - 4: squares from the mean 1 + 1.
        (
            {0: 5.0, 1: 7.0, 3: 100.0},
            {1: 4.0, 0: 4.0, 2: -100.0},
            (2.0, None, None, pytest.approx(math.sqrt(2)), 2, True),
        ),
        # Five times one test example more: nothing is known of chance.
        (HIGHER, EIGHTHS, (0.25, None, None, 0.0, 6, True)),
        (LOWER, EIGHTHS, (-0.25, None, None, 0.0, 6, True)),
        # Identical figures are certain to be equal.
        (EIGHTHS, EIGHTHS, (0.0, 0.0, 0.0, 0.0, 6, True, 1.0)),
        ({}, {}, None),
        ({0: 1.0}, {}, None),
        ({0: 1.0}, {1: 1.0}, None),
    ],
)
def test_seeds_are_paired_and_equal_differences_have_no_interval(
    values, baseline, expected
):
    assert find_difference(values, baseline) == (expected and Difference(*expected))


def test_four_pairs_have_no_interval():
    difference = compared(by_seed([0.9, 0.8, 0.7, 0.95]), by_seed([0.0] * 4))
    assert (*interval(difference), difference.p) == (None, None, None)


@pytest.mark.parametrize("pairs", [5, 20])
def test_interval_and_p_value_are_those_of_scipys_paired_t_test(pairs):
    values, baseline = np.random.default_rng(pairs).exponential(size=(2, pairs))
    expected = ttest_rel(values, baseline)
    difference: Any = find_difference(by_seed(values), by_seed(baseline))
    assert difference.p == pytest.approx(expected.pvalue)
    assert interval(difference) == pytest.approx(
        tuple(expected.confidence_interval(0.95))
    )


def test_differences_that_are_equal_but_for_rounding_have_no_interval():
    baseline = {seed: 0.1 * seed for seed in range(6)}
    difference = compared({seed: x + 0.1 for seed, x in baseline.items()}, baseline)
    assert difference.deviation > 0 and difference.mean == pytest.approx(0.1)
    assert interval(difference) == (None, None) and difference.p is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [1, -1])
def test_a_bound_that_is_0_but_for_rounding_decides_nothing(dtype, side):
    # In examples of 360, shifted so that one end of the interval is at 0.
    baseline = {seed: float(dtype(341 / 360)) for seed in range(5)}
    gains = np.array([-1.0, 1, 2, 3, 5])
    gains -= ttest_1samp(gains, 0).confidence_interval().low
    values = by_seed(float(dtype((341 + side * gain) / 360)) for gain in gains)
    difference = compared(values, baseline)
    assert 0 in interval(difference)
    assert compare(difference, ACCURACY).clause.startswith("no difference seen")


def test_differences_have_one_sign_or_not():
    for values, have_one_sign in {
        (-1, -2): True,
        (1, -2): False,
        (0, 2): False,
    }.items():
        assert compared(by_seed(values), by_seed([0, 0])).same_sign == have_one_sign


@COMPARED
@given(
    st.lists(FIGURES, min_size=5, max_size=9),
    st.floats(-50, 50),
    st.sampled_from([1e-150, 1e-3, 1.0, 1e6]),
)
def test_an_interval_is_scipys_at_every_scale(values, shift, scale):
    values = [scale * (x + shift) for x in values]
    room = 2e-6 * max(map(abs, values))  # what counts as rounding: an end may be 0
    assume(np.ptp(values) > room > 1e-300 and room > 1e-100 * scale)  # squares
    difference = compared(by_seed(values), by_seed([0.0] * len(values)))
    low, high = ttest_1samp(np.array(values) / scale, 0).confidence_interval()
    assert difference.low == pytest.approx(scale * low, rel=1e-6, abs=room)
    assert difference.high == pytest.approx(scale * high, rel=1e-6, abs=room)


def with_p(*values):
    difference = Difference(0.1, 0.05, 0.15, 0.01, 5, True)
    return [None if p is None else difference._replace(p=p) for p in values]


@pytest.mark.parametrize(
    ("ps", "expected"),
    [
        # Holm's own rule: the least times 4, the next times 3, …, never falling.
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([None, 0.02, None, 0.01], [None, 0.02, None, 0.02]),
        ([], []),
    ],
)
def test_p_values_are_corrected_as_holm_does(ps, expected):
    assert correct_p_values(with_p(*ps)) == pytest.approx(expected)


def test_a_band_goes_on_with_the_seeds_that_have_a_figure():
    mean, low, high = band([[1.0, None, 5.0, math.inf], [3.0, 4.0], [2.0, None]])
    assert (mean[0], low[0], high[0]) == (2.0, 1.0, 3.0)
    assert (mean[1], low[1], high[1]) == (4.0, 4.0, 4.0)
    assert (mean[2], low[2], high[2]) == (5.0, 5.0, 5.0)
    assert all(math.isnan(x[3]) for x in (mean, low, high))
    assert band([]) == ([], [], [])
