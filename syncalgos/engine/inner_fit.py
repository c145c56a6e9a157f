"""Refuses inner optimizers that do not fit what a strategy was told of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.combinators import introspection
from syncalgos.optax_states import CLOCKS, named
from syncalgos.strategy import Strategy


def told(strategy: Strategy) -> list[Strategy]:
    """The strategies inside, itself included, that were told the learning rate."""
    return [x for x in introspection.parts(strategy) if x.learning_rate is not None]


def check_clock(label: str, opt_state: PyTree, strategy: Strategy) -> None:
    """Refuses an optimizer that counts the steps of a rate as the strategy does not.

    Args:
        label: the optimizer's name, for the message.
        opt_state: the optimizer's state.
        strategy: the strategy, which may have been told the learning rate.

    Raises:
        ValueError: one local step is not one update.
    """
    rates = [x.learning_rate for x in told(strategy)]
    names = [*CLOCKS] if any(map(callable, rates)) else [*CLOCKS][:2]
    for name in named(opt_state, names) if rates else ():
        raise ValueError(
            f"{label}: optax.{CLOCKS[name]} does not update params at every local "
            "step, but the strategy's learning_rate is that of each local step: use "
            "larger batches, accumulate of DataParallel, or the optimizer without it"
        )


def check_own_steps(
    label: str,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    params: PyTree,
) -> None:
    """Refuses an optimizer whose part of a step would be lost at the next sync.

    Args:
        label: the optimizer's name, for the message.
        optimizer: the inner optimizer, which is tried on small leaves.
        strategy: the strategy; see `Strategy.own_steps`.
        params: the model, arrays or their shapes.

    Raises:
        ValueError: it is not plain SGD at the strategy's learning rate.
    """
    for each in told(strategy):
        rate = each.learning_rate
        if rate is None or not each.own_steps or checks.is_traced(rate):
            continue
        with jax.ensure_compile_time_eval():
            fits = _is_sgd(optimizer, checks.learning_rate(label, rate), params)
        if not fits:
            raise ValueError(
                f"{label}: weight decay, clipping, momentum or another rate would be "
                "lost, as this strategy (zero_one_adam) moves the model by sums of its "
                "own steps: use optax.sgd at the strategy's learning_rate"
            )


def _is_sgd(
    optimizer: optax.GradientTransformation,
    rate: Callable[[Any], Any],
    params: PyTree,
) -> bool:
    """Whether updates are the gradients times minus the rate, and nothing else."""
    # A warm-up from 0 would hide what the optimizer adds.
    step = next((s for s in (0, 1, 10, 100, 1000, 10**4) if rate(s) > 0), 0)
    small = jax.tree.map(lambda x: jnp.ones([min(n, 2) for n in jnp.shape(x)]), params)

    def at_step(x: Any) -> Any:
        is_count = jnp.issubdtype(jnp.result_type(x), jnp.integer)
        return jnp.full_like(x, step) if is_count else x

    state = jax.tree.map(at_step, optimizer.init(small))
    update = optax.with_extra_args_support(optimizer).update
    # Zeros show decay and noise, large gradients clipping, and zeros again momentum.
    for number, size in enumerate((0.0, 1e6, 0.0)):
        grads = optax.tree.scale(size, small)
        moves, state = update(grads, state, small, value=jnp.float32(0))
        plain = -rate(step + number) * size
        if not all(np.allclose(x, plain, 1e-3, 0) for x in jax.tree.leaves(moves)):
            return False
    return True
