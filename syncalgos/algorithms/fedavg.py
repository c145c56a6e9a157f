"""Federated averaging: a few workers take part in each round."""

from syncalgos import checks
from syncalgos.algorithms.model_averaging import model_averaging
from syncalgos.collectives import WORKERS, Axis
from syncalgos.combinators.participation import participating, sampled
from syncalgos.strategy import Strategy


def fedavg(
    period: int = 16, fraction: float = 0.1, seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Federated averaging: each round averages the models of a few workers drawn anew.

    After every `period` local steps, for the params θ of the workers S that are drawn,
    each of equal weight:

        θ ← mean over S (θ), on all workers

    Args:
        period: local steps of a round, at least 1.
        fraction: C, the share of workers that take part in a round, above 0 and at most
            1; of two or more workers at least two take part.
        seed: of the draws, the same on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the model of the last round. A sync sends params once; that
        of a worker that is not drawn is a simulation's. The center is the mean of the
        replicas. opt_state stays local.

    Raises:
        ValueError: a parameter outside its range.

    All workers train, and what those do that are not drawn is dropped: it is a
    simulation of the algorithm, not of its savings. The paper's C of 0.1 is of 100
    clients, and rounds to at least one, whose model would be no average.

    Source: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, algorithm 1.
    """
    fraction = checks.share("fedavg: fraction", fraction)
    schedule = sampled(fraction, seed, least=2)
    return participating(model_averaging(period, axis), schedule, axis=axis)
