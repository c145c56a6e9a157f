"""Comparisons of trees of one form, leaf by leaf."""

import jax
import numpy as np


def assert_close(actual, expected, rtol=1e-12, atol=None):
    """Asserts that all leaves are close; atol is rtol by default."""

    def leaf(x, y):
        x = np.asarray(x)
        y = np.asarray(y)
        np.testing.assert_allclose(x, y, rtol, rtol if atol is None else atol)

    jax.tree.map(leaf, actual, expected)


def assert_equal(actual, expected):
    """Asserts that all leaves are equal."""
    assert_close(actual, expected, 0)


def largest(tree, other):
    """The largest difference."""
    differences = jax.tree.map(lambda x, y: np.abs(x * 1.0 - y).max(), tree, other)
    return float(max(jax.tree.leaves(differences)))
