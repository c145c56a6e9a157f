"""EF21-SGDM: each worker sends the largest changes of its momentum."""

from syncalgos import reducers
from syncalgos._combinators.primitives import reduce_with
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory(static=["density"])
def ef21(
    density: float = 0.05,
    local_momentum: float = 0.9,
    *,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """EF21-SGDM: momentum stays on the worker; its largest changes are sent.

    At every local step, for worker i's gradients g, its momentum M, and G, the others'
    copy of M, both 0 at first:

        M ← β M + (1 - β) g;   d ← TopK(M - G);   G ← G + d;   g ← mean(G)

    Args:
        density: the share of each leaf's entries that is sent, rounded up; above 0, at
            most 1.
        local_momentum: β, the decay of M, at least 0 and below 1; 0 is EF21.
        layered: which leaves hold several layers, each with this share of entries sent
            (see `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: M and G, each worker's own, and the mean of all G, identical
        on all, shaped like params, at least float32. A step gathers the chosen values
        and their indices, as `topk_sgd` does. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    Unsent parts are not summed: they appear in the next M - G. In the papers, M and G
    begin as the gradients of the first params, sent whole. Here they begin as zeros,
    and most entries move only after about 1 / density steps. M takes the place of the
    inner optimizer's momentum, at the learning rate of plain SGD; around Muon this is
    EF21-Muon. Another compressor: `reduce_with(reducers.ef21(reducers.power_sgd(4)))`.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, ef21
        >>> model = np.ones(1000, np.float32)
        >>> for density in (0.01, 0.1):
        ...     strategy = ef21(density=density)
        ...     sent = communication(strategy, model, workers=2, steps=1)
        ...     print(sent.bytes_per_worker / model.nbytes)
        0.015
        0.15

    Source: Richtárik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically
    better, and practically faster error feedback", NeurIPS 2021; Fatkhullin, Tyurin and
    Richtárik, "Momentum provably improves error feedback!", NeurIPS 2023, algorithm 1.

    Family: Compressed gradients.
    """
    largest = reducers.top_k(density, layered=layered)
    changes = reducers.ef21(largest, local_momentum=local_momentum)
    return reduce_with(changes, axis=axis)._replace(own_momentum=True)
