"""Signum: a majority vote with the signs of each worker's own momentum."""

from syncalgos import checks
from syncalgos.algorithms.distributed_lion import distributed_lion
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def signum(
    local_momentum: float = 0.9, *, seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Signum: signSGD, with each worker's momentum taken before the vote.

    At every local step, for worker i's gradients g and its momentum m, 0 at first,
    where the sign of 0 is drawn:

        m ← β m + (1 - β) g;   g ← sign(Σ sign(m))

    Args:
        local_momentum: β, the decay of the momentum, at least 0 and below 1.
        seed: seeds the random signs of 0 and of ties.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m, shaped like params, at least float32, each worker's own. A
        step sends one bit per entry twice, and one number (see `distributed_lion`).
        Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    This is `distributed_lion` with β₁ = β₂. `sign_sgd(majority=True)` with momentum in
    the inner optimizer is a different algorithm: momentum of votes. Every entry moves
    by the learning rate at every step: this rate must be about a hundred times smaller
    than SGD's. The inner optimizer is SGD without momentum. In the published code, the
    sign of 0, and that of a tie, is +.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, signum
        >>> model = np.ones(8000, np.float32)
        >>> sent = communication(signum(), model, workers=2, steps=1)
        >>> round(model.nbytes / sent.bytes_per_worker)  # times less than its gradients
        32

    Source: Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: compressed
    optimisation for non-convex problems", ICML 2018, algorithm 3; Bernstein, Zhao,
    Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication
    efficient and fault tolerant", ICLR 2019, algorithm 1.

    Family: Compressed gradients.
    """
    beta = checks.real("signum: local_momentum", local_momentum, least=0, below=1)
    # With one β, Lion's direction is its new momentum.
    return distributed_lion(b1=beta, b2=beta, majority=True, seed=seed, axis=axis)
