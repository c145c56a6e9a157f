"""Keeps a strategy's state outside the devices' memory between syncs.

Anchors and outer momenta are read only at syncs. Keeping them in the host's memory
leaves the device's memory to the model. A sync fetches them and puts them back.
"""

from typing import Any

import jax

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.combinators import introspection
from syncalgos.engine.placement.layout import Layout
from syncalgos.strategy import Replica, Strategy, apply_sync

DEVICE = jax.memory.Space.Device


def chosen(memory: str | None, layout: Layout, strategy: Strategy) -> Layout:
    """Returns the layout with the state in this memory; None is the device's memory.

    Raises:
        ValueError: the backend is pmap or vmap, the devices do not have this kind of
            memory, or the strategy may read its state at every step.
    """
    if memory is None:
        return layout
    if layout.backend != "shard_map":
        raise ValueError(
            f"sync_memory needs backend 'shard_map', got {layout.backend!r}"
        )
    kinds = [each.kind for each in layout.devices[0].addressable_memories()]
    checks.one_of("sync_memory", memory, kinds)
    if introspection.reduces(strategy) or not introspection.rests(strategy):
        raise ValueError(
            "sync_memory needs a strategy that reads its state only at some steps: "
            "this one reduces gradients, or does not declare when it acts"
        )
    return layout._replace(sync_memory=memory)


def fetched_at_syncs(strategy: Strategy) -> Strategy:
    """Returns the strategy with a sync and a center that fetch the state they read."""

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Any, PyTree]:
        def act(replica, state):
            replica, new = apply_sync(strategy, replica, _fetched(state), step)
            return replica, jax.tree.map(_back, new, state)

        acts = introspection.acts(strategy, step)
        return jax.lax.cond(acts, act, lambda *same: same, replica, state)

    def center(params: PyTree, state: PyTree) -> PyTree:
        return strategy.center(params, _fetched(state))

    described = introspection.combination(strategy)._replace(call=sync)
    return strategy._replace(sync=described, center=center)


def _fetched(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE), state)


def _back(new: jax.Array, old: jax.Array) -> jax.Array:
    return jax.device_put(new, jax.typeof(old).memory_space)
