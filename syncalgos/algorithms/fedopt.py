"""FedOpt: an adaptive outer optimizer on the mean displacement."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.primitives import outer_step
from syncalgos.combinators.schedule import every
from syncalgos.strategy import Strategy


class MomentsState(NamedTuple):
    """The first moment m and the second moment v of the outer gradients."""

    first: PyTree
    second: PyTree


def fedopt(
    period: int = 16,
    method: Literal["adam", "yogi", "adagrad"] = "adam",
    outer_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    axis: Axis = WORKERS,
) -> Strategy:
    """FedAdam, FedYogi and FedAdagrad: an adaptive outer step on the mean displacement.

    After every `period` local steps, for workers' params θ that started from x, with v
    at first τ²:

        Δ ← mean(θ) - x;   m ← β₁ m + (1 - β₁) Δ;   x, θ ← x + η m / (√v + τ)
        adam: v ← β₂ v + (1 - β₂) Δ²;   adagrad: v ← v + Δ²
        yogi: v ← v - (1 - β₂) Δ² sign(v - Δ²)

    Args:
        period: local steps between two outer steps, at least 1.
        method: adam, yogi or adagrad: how v follows Δ².
        outer_lr: η, about how far an entry goes in a round, above 0; tuned for each
            task in the paper.
        beta1: β₁, at least 0 and below 1; 0 for the paper's FedAdagrad.
        beta2: β₂, of adam and yogi, at least 0 and below 1.
        tau: τ, above 0: displacements far below it are scaled by η / τ.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, m and v, shaped like params, at least float32, equal on
        all workers. A sync sends params once. The center is x. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range.

    Nothing corrects m and v for their start, unlike optax's adam. The step does not
    grow with the inner learning rate: a steady Δ far above τ moves an entry by η a
    round, with adam and yogi. The paper's inner optimizer is SGD.

    Source: Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2, all
    workers.
    """
    checks.one_of("method of fedopt", method, ("adam", "yogi", "adagrad"))
    lr = checks.real("fedopt: outer_lr", outer_lr, above=0)
    beta1 = checks.real("fedopt: beta1", beta1, least=0, below=1)
    beta2 = checks.real("fedopt: beta2", beta2, least=0, below=1)
    tau = checks.real("fedopt: tau", tau, above=0)

    def next_second(v, g):
        square = g * g
        return {
            "adam": beta2 * v + (1 - beta2) * square,
            "yogi": v - (1 - beta2) * square * jnp.sign(v - square),
            "adagrad": v + square,
        }[method]

    def init(params):
        first = jax.tree.map(jnp.zeros_like, params)
        return MomentsState(first, jax.tree.map(lambda x: x + tau**2, first))

    def update(updates, state, params=None):  # g = -Δ
        first = jax.tree.map(
            lambda m, g: beta1 * m - (1 - beta1) * g, state.first, updates
        )
        second = jax.tree.map(next_second, state.second, updates)
        steps = jax.tree.map(lambda m, v: lr * m / (jnp.sqrt(v) + tau), first, second)
        return steps, MomentsState(first, second)

    return every(
        period, outer_step(optax.GradientTransformation(init, update), axis=axis)
    )
