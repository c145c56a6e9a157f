"""Places at which the syncs of a strategy take effect, as `at_syncs` asks."""

import jax
import jax.numpy as jnp
import numpy as np

import syncalgos as sa
from syncalgos._combinators import introspection

# The strategy, and after which of 16 local steps, counted from 1, its syncs show.
SYNCS = {
    "every": (sa.bmuf(4), [4, 8, 12, 16]),
    "gossip": (sa.gossip(), list(range(1, 17))),
    "easgd": (sa.easgd(4), [4, 8, 12, 16]),
    "scaffold": (sa.scaffold(4, learning_rate=0.1), [4, 8, 12, 16]),
    "palsgd": (sa.palsgd(4, learning_rate=0.1), [4, 8, 12, 16]),
    "palsgd, to its end": (
        sa.at_end(sa.palsgd(4, learning_rate=0.1), 14),
        [4, 8, 12, 14, 16],
    ),
    "palsgd, delayed": (sa.delayed(sa.palsgd(4, learning_rate=0.1), 2), [6, 10, 14]),
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


def test_syncs_land_where_results_take_effect():
    def find_landings(step: jax.Array) -> dict[str, jax.Array]:
        return {name: introspection.lands(x, step) for name, (x, _) in SYNCS.items()}

    lands_by_name = jax.jit(jax.vmap(find_landings))(jnp.arange(16))
    landing_steps = {
        name: (1 + np.flatnonzero(x)).tolist() for name, x in lands_by_name.items()
    }
    assert landing_steps == {name: expected for name, (_, expected) in SYNCS.items()}
