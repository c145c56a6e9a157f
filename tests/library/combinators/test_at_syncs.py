"""Where the syncs of a strategy take effect, and `at_syncs` applies another."""

import jax.numpy as jnp
import numpy as np
import pytest
from problems.quadratics import LR, train

import syncalgos as sa
from syncalgos.combinators import introspection

# The strategy, and after which of 16 local steps, counted from 1, its syncs show.
SYNCS = {
    "every": (sa.bmuf(4), [4, 8, 12, 16]),
    "gossip": (sa.gossip(), list(range(1, 17))),
    "easgd": (sa.easgd(4), [4, 8, 12, 16]),
    "scaffold": (sa.scaffold(4, learning_rate=LR), [4, 8, 12, 16]),
    "palsgd": (sa.palsgd(4, learning_rate=LR), [4, 8, 12, 16]),
    "palsgd, to its end": (
        sa.at_end(sa.palsgd(4, learning_rate=LR), 14),
        [4, 8, 12, 14, 16],
    ),
    "palsgd, delayed": (sa.delayed(sa.palsgd(4, learning_rate=LR), 2), [6, 10, 14]),
    "fedavg": (sa.fedavg(4, fraction=0.5), [4, 8, 12, 16]),
    "paced": (sa.paced(sa.model_averaging(4), [4, 1]), [4, 8, 12, 16]),
    "schedule": (sa.every(sa.average(), lambda step: 2 + step), [2, 6, 14]),
    "until": (sa.until(sa.bmuf(4), 9), [4, 8]),
    "after": (sa.after(sa.bmuf(4), 9), [12, 16]),
    "post_local_sgd": (sa.post_local_sgd(dense_steps=6, period=4), [8, 12, 16]),
    "hierarchical": (sa.hierarchical(6, inner_period=4, groups=1), [4, 6, 8, 12, 16]),
    "streaming_diloco": (sa.streaming_diloco(8, fragments=2), [4, 8, 12, 16]),
    "with a delay": (sa.streaming_diloco(8, fragments=2, delay=1), [4, 8, 12, 16]),
    "delayed": (sa.delayed(sa.model_averaging(4), 2), [6, 10, 14]),
    "delayed chain": (
        sa.delayed(sa.chain(sa.model_averaging(4), sa.model_averaging(6)), 1),
        [5, 7, 9, 13],
    ),
    "gradients too": (sa.chain(sa.sync_sgd(), sa.model_averaging(6)), [6, 12]),
}


@pytest.mark.parametrize("name", SYNCS)
def test_syncs_land_where_results_take_effect(name):
    strategy, expected = SYNCS[name]
    landed = [step + 1 for step in range(16) if introspection.lands(strategy, step)]
    assert landed == expected


def test_at_syncs_acts_where_syncs_land():
    mark = sa.Strategy(
        sync=lambda replica, state, step: (
            replica._replace(buffers=replica.buffers + 1),
            state,
        )
    )
    strategy, expected = SYNCS["delayed chain"]
    marked = train(sa.at_syncs(strategy, mark), workers=2, steps=16, dtype=jnp.float32)
    counts = marked.replica.buffers[:, 0]
    assert (1 + np.flatnonzero(np.diff(counts, prepend=0))).tolist() == expected
