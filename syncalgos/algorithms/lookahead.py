"""Lookahead: a slow model goes part of the way to the average of the models."""

import optax

from syncalgos import checks
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def lookahead(
    period: int = 16, slow_lr: float = 0.5, *, axis: Axis = WORKERS
) -> Strategy:
    """Lookahead: a slow model goes part of the way to the average of the fast ones.

    After every `period` local steps, for workers' params θ that started from φ:

        φ ← φ + α (mean(θ) - φ);   θ ← φ

    Args:
        period: k, local steps between two slow steps, at least 1; 5 in the paper.
        slow_lr: α, the share of the way that the slow model takes, above 0, at most 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: φ, shaped like params, at least float32, identical on all
        workers. A sync sends params once. The center is φ. opt_state and buffers stay
        local, as in the paper (see `reset`).

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center α times as far as plain averaging. With one worker
    this is `optax.lookahead`, as a strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import as_optimizer, lookahead
        >>> optimizer = as_optimizer(lookahead(2, slow_lr=0.5), optax.sgd(1.0))
        >>> w = jnp.float32(0)
        >>> state = optimizer.init(w)
        >>> for _ in range(4):
        ...     updates, state = optimizer.update(jnp.float32(-1), state, w)
        ...     w = optax.apply_updates(w, updates)
        ...     print(float(w))
        1.0
        1.0
        2.0
        2.0

    Source: Zhang, Lucas, Hinton and Ba, "Lookahead optimizer: k steps forward, 1 step
    back", NeurIPS 2019, algorithm 1, with the workers' average as the fast model.

    Family: Outer momentum.
    """
    share = checks.share("lookahead: slow_lr", slow_lr)
    # Plain SGD with rate α on the pseudo-gradient φ - mean(θ) goes α of the way.
    return every(outer_step(optax.sgd(share), axis=axis), period)
