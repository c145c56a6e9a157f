"""Tiers of tests: the cases that a change must pass are chosen by name."""

import pytest


def tiers(values, default=(), slow=None):
    """The cases of a test, each with its mark.

    Args:
        values: all cases.
        default: those without a mark: every run of the tests has them.
        slow: those of CI; None for all others. The rest is long.
    """
    assert {*default, *(slow or ())} <= {*values}, "no case has this name"

    def case(value):
        if value in default:
            return pytest.param(value)
        is_slow = slow is None or value in slow
        return pytest.param(
            value, marks=pytest.mark.slow if is_slow else pytest.mark.long
        )

    return [case(value) for value in values]
