"""The largest entries against NumPy, and how many of them are sent."""

import numpy as np
import pytest
from reducing import (
    ZEROS,
    assert_close,
    assert_neighbours,
    each_leaf,
    mean_over_workers,
    normal,
    outcome,
    run,
    side_by_side,
)

from syncalgos.reducers import random_k, top_k


def largest(x, share):
    """Which entries along the last axis are a share of largest magnitude, and how many.

    No two are equal but in a step of zeros, which is left out.
    """
    count = int(np.ceil(share * x.shape[-1]))
    return np.abs(x) >= np.sort(np.abs(x), axis=-1)[..., [-count]], count


def test_top_k_matches_numpy():
    for leaf in each_leaf(*outcome("top_k")):
        x, combined, sent = (v[:ZEROS] for v in leaf)
        chosen, count = largest(x, 0.3)
        assert (chosen.sum(-1) == count).all()
        np.testing.assert_array_equal(sent, np.where(chosen, x, 0))
        assert_close(combined, mean_over_workers(np.where(chosen, x, 0)))


def test_top_k_rounds_what_it_sends_to_a_neighbouring_level():
    for leaf in each_leaf(*outcome("top_k-int4")):
        x, _, sent = (v[:ZEROS] for v in leaf)
        chosen, count = largest(x, 0.3)  # 154 at most: they share one scale
        assert (sent[~chosen] == 0).all()
        exact, rounded = (v[chosen].reshape(ZEROS, 3, count) for v in (x, sent))
        assert_neighbours(rounded, exact, 7)


def test_top_k_sends_as_many_of_equal_entries():
    combined, sent, _ = run(top_k(0.3), np.ones((1, 2, 10), np.float32))
    assert (np.count_nonzero(sent, axis=-1) == 3).all()
    assert_close(combined, mean_over_workers(sent))


# In float64 0.07 · 100 is 7.000000000000001.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("density", "counts"),
    [(0.3, {1: 1, 7: 3, 10: 3}), (0.07, {100: 7}), (0.001, {7: 1})],
)
def test_share_of_the_entries_is_rounded_up(density, counts):
    both = side_by_side({"top_k": top_k(density), "random_k": random_k(density)})
    _, sent, _ = run(both, [normal((size,), workers=2) for size in counts])
    for leaves in sent.values():
        seen = [np.unique(np.count_nonzero(x, axis=-1)).tolist() for x in leaves]
        assert seen == [[count] for count in counts.values()]
