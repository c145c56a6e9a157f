"""A center that averages over time."""

from typing import NamedTuple

import jax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.introspection import Combination, inner_reduce
from syncalgos.dtypes import narrow, widen
from syncalgos.strategy import Strategy, check_strategy


class EmaState(NamedTuple):
    """The strategy's own state, and the average of this worker's params."""

    strategy: PyTree
    average: PyTree


def ema(strategy: Strategy, decay: float, axis: Axis = WORKERS) -> Strategy:
    """Makes an exponential moving average of the replicas the center of a strategy.

    After every local step, the strategy's sync included, for a worker's params θ, and
    its average c, which starts at its first params:

        c ← c + (1 - d) (θ - c)

    Args:
        strategy: any. What it trains stays the same.
        decay: d, at least 0 and below 1: 1 / (1 - d) is how many steps it looks back.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, and c, shaped like params, at least float32,
        the worker's own. Nothing more is sent at any step: the center is the mean of
        all c, which is the moving average of the replicas' mean.

    Raises:
        ValueError: no Strategy, or a decay outside its range.

    The clock is the local step, also inside `every`. What the strategy itself has for a
    center is not looked at. Where params drift steadily, c is d / (1 - d) steps behind.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by
    averaging", SIAM J. Control Optim. 1992, with exponential weights.
    """
    check_strategy("ema", strategy)
    decay = checks.real("ema: decay", decay, least=0, below=1)

    def init(params):
        return EmaState(strategy.init(params), widen(params))

    def sync(replica, state, step):
        replica, inner = strategy.sync(replica, state.strategy, step)
        average = jax.tree.map(
            lambda c, x: c + (1 - decay) * (x - c),
            state.average,
            widen(replica.params),
        )
        return replica, EmaState(inner, average)

    def center(params, state):
        return narrow(collectives.mean(state.average, axis), params)

    return Strategy(
        init,
        inner_reduce(strategy),
        Combination(
            sync,
            (strategy,),
            lambda change: ema(change(strategy), decay, axis),
            clocked=True,
        ),
        center,
    )
