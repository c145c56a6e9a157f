"""A center that is an average over time."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks, collectives
from syncalgos._combinators import introspection, participation
from syncalgos._dtypes import narrow, widen
from syncalgos.collectives._shares import times_share
from syncalgos.strategy import PyTree, Replica, Strategy, check_strategy, factory


class EmaState(NamedTuple):
    """State of `ema`.

    Attributes:
        strategy: the strategy's state.
        average: c, the average of this worker's params, at least float32.
    """

    strategy: PyTree
    average: PyTree


@factory
def ema(strategy: Strategy, decay: float) -> Strategy:
    """Makes an exponential moving average of the replicas the center of a strategy.

    Each worker keeps an average c of its params θ, starting from its first params.
    After every local step, and after that step's sync:

        c ← c + (1 - d) (θ - c)

    If `participating` weighs the workers, θ is multiplied by its worker's N w / Σw.

    Args:
        strategy: any strategy; its training does not change.
        decay: d, at least 0 and below 1; the average covers about the last 1 / (1 - d)
            steps.

    Returns:
        A Strategy. State: the strategy's, and the worker's own c, shaped like params,
        at least float32. No step sends more than before. The center is the mean of all
        c, which is the moving average of the replicas' mean.

    Raises:
        ValueError: the argument is not a Strategy, or the decay is outside its range.

    The decay counts local steps, also inside `every`, so one decay covers the same
    number of steps for every algorithm and period. The strategy's own center is not
    used. If params drift steadily, c lags d / (1 - d) steps behind.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, ema, sync_sgd
        >>> loss = lambda x, batch: -x * batch.mean()
        >>> strategy = ema(sync_sgd(), 0.5)
        >>> trainer = DataParallel(loss, optax.sgd(1.0), strategy, workers=2)
        >>> state, _ = trainer.run(trainer.init(jnp.float32(0)), jnp.ones((2, 2)))
        >>> float(trainer.center(state).params)  # of 0, 1 and 2
        1.25

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by
    averaging", SIAM J. Control Optim. 1992, with exponential weights.
    """
    check_strategy("ema", strategy)
    decay = checks.real("ema: decay", decay, least=0, below=1)
    axis = introspection.find_axis(strategy)

    def init(params: PyTree) -> EmaState:
        return EmaState(strategy.init(params), widen(params))

    # Averaging is linear: the mean of the workers' averages is the average of their
    # mean, so nothing is sent. The strategy's own center is not averaged, as it may be
    # a mean that must be sent at every step (noloco, eager_diloco). The cost is that
    # sync acts at every step, so the lanes of a CPU no longer run one after the other.
    # So it is with weights, if each θ is multiplied by its worker's share.
    weightings = introspection.find_weightings(strategy)

    def sync(replica: Replica, state: EmaState, step: Any) -> tuple[Replica, EmaState]:
        replica, inner_state = strategy.sync(replica, state.strategy, step)
        relative_weight = None
        if weightings:
            workers = collectives.size(axis)
            worker_index = collectives.index(axis)
            relative_weight = participation.compute_relative_weight(
                weightings, step, workers, worker_index
            )
        params = times_share(widen(replica.params), relative_weight)
        average = jax.tree.map(
            lambda c, x: c + (1 - decay) * (x - c), state.average, params
        )
        return replica, EmaState(inner_state, average)

    def center(params: PyTree, state: EmaState) -> PyTree:
        return narrow(collectives.mean(state.average, axis), params)

    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=introspection.Combination(
            sync,
            (strategy,),
            lambda member: ema(member, decay),
            clock=introspection.Clock(averages=True),
        ),
        center=center,
        acts=None,
    )
