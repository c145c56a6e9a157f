"""Federated averaging: a few workers take part in each round."""

from syncalgos import checks
from syncalgos._combinators.participation import participating, sampled
from syncalgos.algorithms.model_averaging import model_averaging
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def fedavg(
    period: int = 16, fraction: float = 1.0, *, seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Federated averaging: each round averages the models of a few workers, drawn anew.

    After every `period` local steps, for params θ and a random set S of workers:

        θ ← mean over S (θ), on all workers

    Args:
        period: local steps of a round, at least 1.
        fraction: C, the share of workers in a round, above 0 and at most 1; at least
            two workers take part, if there are two.
        seed: seeds the draws, identical on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the model of the last round. A sync sends params once, even
        from workers that are not drawn. The center is the mean over the workers drawn
        for the round. opt_state stays local.

    Raises:
        ValueError: a parameter outside its range.

    All workers train, and the work of those not drawn is dropped: this simulates the
    algorithm, not its savings. The paper's C of 0.1 is a share of 100 clients, with at
    least one. Here it is at least two, because one model is not an average.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, fedavg
        >>> strategy = fedavg(16, fraction=0.25)
        >>> sent = communication(strategy, jnp.ones(1000), workers=8, steps=16)
        >>> sent.syncs, sent.bytes_per_worker
        (1, 7000.0)

    Source: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, algorithm 1.

    Family: Averages of models.
    """
    fraction = checks.share("fedavg: fraction", fraction)
    # With one worker drawn, its model would be copied to all.
    schedule = sampled(fraction, seed=seed, least=2)
    return participating(model_averaging(period, axis=axis), schedule)
