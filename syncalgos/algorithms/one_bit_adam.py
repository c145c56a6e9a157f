"""1-bit Adam: once its variance is frozen, momentum is sent as signs."""

from typing import Any

import jax

from syncalgos import checks, collectives
from syncalgos._dtypes import if_finite, narrow, widen
from syncalgos.algorithms._one_bit import (
    OneBitAdamState,
    check_adam,
    in_signs,
    init_state,
)
from syncalgos.collectives._axes import same_on_all
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory
def one_bit_adam(
    dense_steps: int = 100,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    axis: Axis = WORKERS,
) -> Strategy:
    """1-bit Adam: Adam of mean gradients, then of momentum that is sent as signs.

    For worker i's gradients g and residual e, and ē of the part of each leaf that it
    averages, with C(x) = mean|x| sign(x) part by part; m, v, e and ē are 0 at first:

        step < dense_steps: m ← β₁ m + (1 - β₁) mean(g);   v ← β₂ v + (1 - β₂) mean(g)²
        later: x ← β₁ m + (1 - β₁) g + e;   d ← C(x);   e ← x - d
            y ← mean(d) + ē;   m ← C(y);   ē ← y - m
        g ← clip(m / (√v + ε))

    Args:
        dense_steps: the first local step, from 0, at which v is frozen and signs are
            sent; at least 1.
        b1: β₁, the decay of the momentum, at least 0 and below 1.
        b2: β₂, the decay of the variance, at least 0 and below 1.
        eps: ε, added to the variance's root, above 0.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m and v, identical on all workers, e and ē, each worker's
        own, at least float32. A step sends gradients, in float32 at least; from
        `dense_steps` on, it sends a bit per entry twice, and a scale per part of a
        leaf. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    The inner optimizer is plain SGD, at Adam's learning rate. Bias is not corrected, as
    in the paper. Signs would move entries with a small v far, so `clip` keeps a step
    within ±(1 - β₁) / √((1 - β₂) (1 - β₁² / β₂)), Adam's longest (if β₁² < β₂), and is
    0 where v is 0. An entry whose first gradient comes after `dense_steps` waits in e
    for one step, and gets the mean v of its leaf; if all v of the leaf are 0, it gets
    (a / (1 - β₁))², for a the size of the first momenta as it is sent. A step that is
    not finite is NaN, and changes no state.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, one_bit_adam
        >>> model = np.ones(8000, np.float32)
        >>> sent = communication(one_bit_adam(dense_steps=1), model, workers=2, steps=2)
        >>> np.diff(sent.per_step, prepend=0)
        array([32000.,  1008.])

    Source: Tang et al., "1-bit Adam", ICML 2021, algorithm 1.

    Family: Compressed gradients.
    """
    dense_steps = checks.whole("one_bit_adam: dense_steps", dense_steps, least=1)
    adam = check_adam("one_bit_adam", b1, b2, eps)

    def init(params: PyTree) -> OneBitAdamState:
        return init_state(params, axis)

    def average_exactly(grads: PyTree, state: OneBitAdamState) -> OneBitAdamState:
        mean = collectives.mean(grads, axis)
        first_moment = adam.step_first_moment(state.first, mean)
        second_moment = adam.step_second_moment(state.second, mean)
        return state._replace(first=first_moment, second=second_moment)

    def average_signs(grads: PyTree, state: OneBitAdamState) -> OneBitAdamState:
        first_moment = adam.step_first_moment(state.first, grads)
        return in_signs(first_moment, 1, adam.b1, state, axis)

    def reduce(
        grads: PyTree, replica: Replica, state: OneBitAdamState, step: Any
    ) -> tuple[PyTree, OneBitAdamState]:
        step = same_on_all(step, axis)
        new_state = jax.lax.cond(
            step < dense_steps, average_exactly, average_signs, widen(grads), state
        )
        moments = new_state.first, new_state.second
        updates = narrow(adam.steps(*moments), grads)
        return updates, if_finite(moments, new_state, state)

    return Strategy(init, reduce, center=MeanCenter(axis), unit_steps=True)
