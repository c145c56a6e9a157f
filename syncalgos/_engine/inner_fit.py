"""Refuses inner optimizers that do not fit what a strategy was told of them."""

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos._combinators import introspection
from syncalgos._optax_states import CLOCKS, REFUSED, find_state_names
from syncalgos.collectives import PyTree
from syncalgos.strategy import Strategy


def list_strategies_with_rate(strategy: Strategy) -> list[Strategy]:
    """The strategies inside, itself included, that were told the learning rate."""
    members = introspection.walk_strategies(strategy)
    return [member for member in members if member.learning_rate is not None]


def check_form(
    label: str, opt_state: PyTree, allowed_names: Set[str] = frozenset()
) -> None:
    """Raises a ValueError for the state of an optimizer that no sync can follow.

    Args:
        label: the optimizer's name, for the message.
        opt_state: the optimizer's state.
        allowed_names: names of states that are allowed here.
    """
    for name in find_state_names(opt_state, REFUSED.keys() - allowed_names):
        raise ValueError(f"{label}: {REFUSED[name]}")


def check_clock(label: str, opt_state: PyTree, strategy: Strategy) -> None:
    """Refuses an optimizer that counts the steps of a rate as the strategy does not.

    Args:
        label: the optimizer's name, for the message.
        opt_state: the optimizer's state.
        strategy: the strategy, which may have been told the learning rate.

    Raises:
        ValueError: one local step is not one update.
    """
    rates = [member.learning_rate for member in list_strategies_with_rate(strategy)]
    if not rates:
        return
    names = list(CLOCKS)
    if not any(map(callable, rates)):
        names = names[:2]
    for name in find_state_names(opt_state, names):
        raise ValueError(
            f"{label}: optax.{CLOCKS[name]} does not update params at every local "
            "step, but the strategy's learning_rate is that of each local step: use "
            "larger batches, accumulate of DataParallel, or the optimizer without it"
        )


def check_rate(
    label: str,
    optimizer: optax.GradientTransformation,
    strategy: Strategy,
    params: PyTree,
) -> None:
    """Refuses an optimizer whose steps are not those that a strategy was told of.

    Args:
        label: the optimizer's name, for the message.
        optimizer: the inner optimizer, which is tried on small leaves.
        strategy: the strategy; see `Strategy.learning_rate` and `Strategy.own_steps`.
        params: the model, arrays or their shapes.

    Raises:
        ValueError: it is plain SGD at another rate; or it is anything but plain SGD,
            and what it adds would be lost at the next sync.
    """
    for member in list_strategies_with_rate(strategy):
        if member.learning_rate is None or checks.is_traced(member.learning_rate):
            continue
        rate = checks.learning_rate(label, member.learning_rate)
        with jax.ensure_compile_time_eval():
            # A warm-up from 0 would hide what the optimizer adds.
            step = next((s for s in (0, 1, 10, 100, 1000, 10**4) if rate(s) > 0), 0)
            sgd_rate = _find_sgd_rate(optimizer, step, params)
            strategy_rate = float(rate(step))
        if sgd_rate is not None and np.isclose(sgd_rate, strategy_rate, 1e-3, 0):
            continue
        if member.own_steps:
            raise ValueError(
                f"{label}: weight decay, clipping, momentum or another rate would be "
                "lost, as this strategy (zero_one_adam) moves the model by sums of its "
                "own steps: use optax.sgd at the strategy's learning_rate"
            )
        if sgd_rate is not None:
            raise ValueError(
                f"{label}: it steps by a learning rate of {sgd_rate:.6g} at local step "
                f"{step}, but the strategy's learning_rate is {strategy_rate:.6g}: "
                "give both the same"
            )


def _find_sgd_rate(
    optimizer: optax.GradientTransformation, step: int, params: PyTree
) -> float | None:
    """The rate of a local step if updates are gradients times minus it, else None."""

    def make_small(x: Any) -> jax.Array:
        return jnp.ones([min(size, 2) for size in jnp.shape(x)])

    small_params = jax.tree.map(make_small, params)

    def set_count(x: Any) -> Any:
        is_count = jnp.issubdtype(jnp.result_type(x), jnp.integer)
        return jnp.full_like(x, step) if is_count else x

    update = optax.with_extra_args_support(optimizer).update

    def take_step(gradient: float, state: PyTree) -> tuple[np.ndarray, PyTree]:
        grads = optax.tree.scale(gradient, small_params)
        updates, state = update(grads, state, small_params, value=jnp.float32(0))
        return np.concatenate([[], *map(np.ravel, jax.tree.leaves(updates))]), state

    # Zeros show decay and noise, large gradients clipping, and zeros again momentum.
    state = jax.tree.map(set_count, optimizer.init(small_params))
    unit_updates, _ = take_step(1.0, state)
    large_updates, next_state = take_step(1e6, state)
    first_still_updates, _ = take_step(0.0, state)
    later_still_updates, _ = take_step(0.0, next_state)
    rates = -unit_updates
    is_sgd = rates.any() and np.allclose(rates, rates[0], 1e-3, 0)
    is_sgd = is_sgd and np.allclose(large_updates, -1e6 * rates, 1e-3, 0)
    is_still = not first_still_updates.any() and not later_still_updates.any()
    return float(rates[0]) if is_sgd and is_still else None
