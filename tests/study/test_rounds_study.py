"""The test of the study of rounds, on gaps that are made up."""

import pytest

from benchmarks.harness import rounds


def test_a_slope_is_by_doublings_and_its_p_value_by_all_permutations():
    """Of two seeds with three lengths, one of 36 permutations falls as steeply."""
    gaps = {seed: {40: 0.10, 160: 0.06, 640: 0.02} for seed in range(2)}
    trend = rounds.find_trend(gaps)
    assert trend.slope == pytest.approx(-0.02)
    assert trend.p == pytest.approx(2 / 36)  # and one rises as steeply


def test_gaps_that_do_not_depend_on_the_rounds_are_not_resolved():
    trend = rounds.find_trend({0: {40: 0.1, 160: 0.1}, 1: {40: 0.1, 160: 0.1}})
    assert trend == pytest.approx((0.0, 1.0))
    assert rounds.describe(trend, 1.0) == "not resolved"


def test_a_resolved_slope_says_its_direction():
    assert rounds.describe(rounds.Trend(-0.01, 0.01), 0.03) == "the gap closes"
    assert rounds.describe(rounds.Trend(0.01, 0.01), 0.03) == "the gap grows"
    assert rounds.describe(rounds.Trend(0.01, 0.01), 0.06) == "not resolved"


def test_gaps_are_relative_to_the_same_optimizer_rounds_and_seed():
    def line(label, steps, loss, reported=True):
        fields = {"label": label, "steps": steps, "seed": 0, "test_loss": loss}
        return {**fields, "reported": reported, "diverged": False}

    lines = [
        line("sync_sgd", 640, 2.0),
        line("sync_muon", 640, 1.0),
        line("muloco", 640, 1.1),
        line("muloco", 640, 9.0, reported=False),
        line("muloco", 2560, 1.1),
    ]
    assert rounds.read_gaps(lines, "muloco") == {0: {40: pytest.approx(0.1)}}


def test_the_test_is_wrong_as_seldom_as_its_level_says():
    spread = rounds.Spread(seeds=0.0075, tuning=0.0)
    assert rounds.simulate_power(0.0, spread) < rounds.LEVEL
    assert rounds.simulate_power(-0.013, spread) > 0.95
