"""The quadratic synchronization rule: rounds lengthen as the learning rate falls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._combinators.primitives import average
from syncalgos._combinators.schedule import when
from syncalgos.steps import TABLED, Lengths, while_tracing
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def qsr(
    period: int = 16,
    growth: float = 0.2,
    *,
    learning_rate: checks.LearningRate,
    axis: Axis = WORKERS,
) -> Strategy:
    """Local SGD by the quadratic synchronization rule: longer rounds at a lower rate.

    A round from local step s, at learning rate η(s) (before the first peak, the rate of
    the peak), takes H local steps and ends with an average of the workers' params θ:

        H = max(H₀, ⌊(α / η(s))²⌋);   after H steps: θ ← mean(θ)

    Args:
        period: H₀, the fewest local steps in a round, at least 1.
        growth: α, in units of the learning rate, above 0; in the paper near 0.2 for
            SGD, 0.0175 for AdamW.
        learning_rate: η, the inner optimizer's at each local step: a number above 0
            or a schedule.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A sync sends params once. The center is the mean of the
        replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    With the low rates of a warmup, the first round would last too long. Until the peak,
    its rate is therefore used, as in the paper.

    Example:
        >>> import numpy as np
        >>> import optax
        >>> from syncalgos import communication, qsr
        >>> rate = optax.piecewise_constant_schedule(0.1, {16: 0.5, 32: 0.5})
        >>> strategy = qsr(4, growth=0.2, learning_rate=rate)
        >>> sent = communication(strategy, np.ones(1000), workers=8, steps=64)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 12, 16, 32])

    Source: Gu et al., "A quadratic synchronization rule for distributed deep learning",
    ICLR 2024, equation 2.

    Family: Averages of models.
    """
    period = checks.whole("period", period, least=1)
    growth = checks.real("qsr: growth", growth, above=0)
    rate = checks.learning_rate("qsr", learning_rate)

    # A schedule may be any function of the step: the rates of its first steps are
    # computed once.
    @functools.cache
    def find_peak() -> jax.Array:
        # With a warm-up rate near 0 the first round would never end.
        with while_tracing():
            rates = jax.vmap(rate)(jnp.arange(TABLED))
            falls = jnp.diff(rates) < 0
            return jnp.where(falls.any(), jnp.argmax(falls), jnp.argmax(rates))

    def round_length(start: Any) -> jax.Array:
        eta = rate(jnp.maximum(start, find_peak()))
        # In float32 (0.01 / 0.001)² is below 100: the factor makes up for rounding.
        return (growth / eta) ** 2 * (1 + 1e-6)

    mean = average(axis=axis)._replace(learning_rate=learning_rate)
    return when(mean, Lengths(round_length, min_gap=period))
