"""One worker's training in a loop without the engine, to be mapped by the caller."""

import jax
import jax.numpy as jnp
import optax


def local_steps(strategy, optimizer, gradient, start, inputs):
    """Takes a local step and a sync with each of some inputs.

    Args:
        strategy: made for the axis over which the caller maps.
        optimizer: the inner one.
        gradient: (params, inputs of a step) -> grads.
        start: the replica, and the strategy's state.
        inputs: the worker's own, leaves (steps, …).

    Returns:
        (replica, center) after each step, leaves (steps, …).
    """

    def local_step(carry, step_inputs):
        replica, state = carry
        step, batch = step_inputs
        grads = gradient(replica.params, batch)
        grads, state = strategy.reduce(grads, replica, state, step)
        updates, opt_state = optimizer.update(grads, replica.opt_state, replica.params)
        params = optax.apply_updates(replica.params, updates)
        stepped = replica._replace(params=params, opt_state=opt_state)
        replica, state = strategy.sync(stepped, state, step)
        return (replica, state), (replica, strategy.center(replica.params, state))

    steps = jnp.arange(len(jax.tree.leaves(inputs)[0]), dtype=jnp.int32)
    return jax.lax.scan(local_step, start, (steps, inputs))[1]
