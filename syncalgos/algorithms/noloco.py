"""NoLoCo: an outer step with one random partner instead of all workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import outer_rates, restart, shipped, start
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.collectives import _topology
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class NoLoCoState(NamedTuple):
    """This worker's slow params φ and their momentum δ."""

    slow: PyTree
    velocity: PyTree


@factory(static=["seed"])
def noloco(
    period: int = 16,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    *,
    consensus: float = 0.7,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """NoLoCo: outer momentum on the displacement of random pairs; no all-reduce.

    After every `period` local steps, for worker i's params θ that began at its slow
    params φ, and δ, 0 at first, and `pair` the mean over the worker and its partner in
    one of 16 random matchings:

        δ ← α δ + β pair(θ - φ) + γ (pair(φ) - φ);   φ, θ ← φ + δ

    Args:
        period: local steps between two outer steps, at least 1; 50 in the paper.
        outer_lr: β, the outer learning rate, above 0.
        outer_momentum: α, the outer momentum, at least 0 and below 1.
        consensus: γ, the pull of a pair's slow params to their mean, at least 0; equal
            to β in the authors' code.
        seed: seeds the pairs, identical on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: φ and δ, shaped like params, at least float32, each worker's
        own. A sync sends θ - φ and φ, each once, to the partner. The center is the mean
        of φ. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree. With an odd number of workers, one worker has no partner at
    each sync. A steady drift moves the center β / (1 - α) times as far as plain
    averaging.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, noloco
        >>> params = jnp.ones(1000)
        >>> for workers in (4, 16):
        ...     sent = communication(noloco(), params, workers=workers, steps=16)
        ...     print(workers, *sent.by_collective, sent.bytes_per_worker)
        4 permute 8000.0
        16 permute 8000.0

    Source: Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method
    for large models", 2025, equation 2, signs and γ as in the authors' code.

    Family: Peers instead of all.
    """
    beta, alpha = outer_rates("noloco", outer_lr, outer_momentum)
    gamma = checks.real("noloco: consensus", consensus, least=0)
    seed = checks.whole("seed", seed, least=0)

    def init(params: PyTree) -> NoLoCoState:
        return NoLoCoState(widen(params), zeros(params))

    def slow_step(
        slow: jax.Array, d: jax.Array, pair_moves: jax.Array, pair_slow: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # The signs are those of the authors' code.
        d = alpha * d + beta * pair_moves + gamma * (pair_slow - slow)
        return slow + d, d

    def sync(
        replica: Replica, state: NoLoCoState, step: Any
    ) -> tuple[Replica, NoLoCoState]:
        round_start = start(state.slow, replica.params)
        moves = jax.tree.map(jnp.subtract, widen(replica.params), round_start)
        message = moves, state.slow
        partner_message = _topology.of_random_pair(message, step, seed, axis)
        pair_moves, pair_slow = jax.tree.map(
            lambda x, y: (x + y) / 2, message, partner_message
        )
        new_state = NoLoCoState(
            *over_leaves(slow_step, 2, *state, pair_moves, pair_slow)
        )
        return restart(replica, new_state.slow), new_state

    strategy = Strategy(init, sync=sync, center=shipped("slow", axis), axis=axis)
    return every(strategy, period)
