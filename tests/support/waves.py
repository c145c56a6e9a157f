"""Inputs that a test and another code build alike, and training along them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import Replica


def wave(*shape, phase=0.0):
    """Numbers in -1 … 1 of no short period, the same in any library."""
    numbers = np.arange(int(np.prod(shape)))
    return np.sin(0.7 * numbers**2 + phase).reshape(shape).astype(np.float32)


def descend(strategy, optimizer, starts, gradient, inputs):
    """Trains in a loop of its own; returns params after each step.

    Leaves of starts, a worker's params, are (workers, …), of inputs (steps, workers,
    …), of what comes back (steps, workers, …). gradient: (params, inputs) -> grads.
    """

    def worker(params, inputs):
        def one(carry, now):
            (replica, state), (step, own) = carry, now
            grads = gradient(replica.params, own)
            grads, state = strategy.reduce(grads, replica, state, step)
            updates, opt_state = optimizer.update(
                grads, replica.opt_state, replica.params
            )
            params = optax.apply_updates(replica.params, updates)
            replica, state = strategy.sync(Replica(params, opt_state), state, step)
            return (replica, state), replica.params

        carry = Replica(params, optimizer.init(params)), strategy.init(params)
        steps = jnp.arange(len(jax.tree.leaves(inputs)[0]))
        return jax.lax.scan(one, carry, (steps, inputs))[1]

    lanes = jax.vmap(worker, in_axes=(0, 1), out_axes=1, axis_name="lanes")
    lead = jax.tree.map(lambda x: x[None], (starts, inputs))
    return jax.tree.map(
        lambda x: np.asarray(x[0]),
        jax.jit(jax.vmap(lanes, axis_name="devices"))(*lead),
    )


def follow(strategy, optimizer, starts, grads):
    """Params after each step along given gradients, (steps, workers, …)."""
    return descend(strategy, optimizer, starts, lambda _, own: own, grads)
