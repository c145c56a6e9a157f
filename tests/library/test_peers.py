"""Peers: strategies whose workers are processes that a transport joins."""

import functools

import numpy as np
import peers as support
import pytest
from tiers import tiers

import syncalgos

# Sums of gradients, an outer step, signs as packed bits, and a graph.
OF_EACH_KIND = "sync_sgd", "diloco", "sign_sgd", "gossip"
# Pushed sums, draws, clocks of workers, chunks, matchings, votes, weights, own steps.
SLOW = (
    "push_sum",
    "sparta",
    "async_diloco",
    "demo",
    "noloco",
    "dynamic_averaging",
    "fedavg",
    "zero_one_adam",
)


@pytest.mark.parametrize("name", tiers(syncalgos.ALGORITHMS, OF_EACH_KIND, SLOW))
def test_algorithm_over_threads_agrees_with_data_parallel(name):
    make = functools.partial(support.make_strategy, name)
    expected = support.train_by_data_parallel(make)
    runs = support.over_threads(functools.partial(support.train_over, make=make))
    assert support.difference(runs, expected) < 1e-5
    sent_bytes = support.most_sent(runs)
    np.testing.assert_allclose(sent_bytes, expected.sent_bytes, rtol=1e-9)
