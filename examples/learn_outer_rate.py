"""DiLoCo's outer rate learnt by its gradient, beside the best of a grid.

    python examples/learn_outer_rate.py

A strategy's numbers may be traced, and so differentiated: the loss of the model after
a whole training is a function of the outer rate.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos

WORKERS = 8
STEPS = 100
SIZE = 20
rng = np.random.default_rng(0)
curvature = jnp.asarray(np.geomspace(0.1, 10, SIZE))
noise = jnp.asarray(rng.normal(size=(STEPS, WORKERS, SIZE)))


def final_loss(outer_rate):
    """Trains all workers on a noisy quadratic; returns the center's mean loss."""
    strategy = syncalgos.diloco(10, outer_lr=outer_rate, outer_momentum=0.5, axis="w")
    inner_optimizer = optax.sgd(0.02)

    def local_step(carry, inputs):
        replica, state = carry
        step, noise = inputs
        grads = curvature * replica.params + noise
        updates, opt_state = inner_optimizer.update(grads, replica.opt_state)
        params = optax.apply_updates(replica.params, updates)
        replica = syncalgos.Replica(params, opt_state)
        carry = strategy.sync(replica, state, step)
        return carry, strategy.center(*(carry[0].params, carry[1]))

    def one_worker(noise):
        start = jnp.ones(SIZE)
        carry = (
            syncalgos.Replica(start, inner_optimizer.init(start)),
            strategy.init(start),
        )
        _, centers = jax.lax.scan(local_step, carry, (jnp.arange(STEPS), noise))
        return 0.5 * jnp.sum(curvature * centers[-1] ** 2)

    return jax.vmap(one_worker, in_axes=1, axis_name="w")(noise).mean()


grid = jnp.geomspace(0.1, 2, 16)
losses = jax.jit(jax.vmap(final_loss))(grid)
print(f"grid of 16: rate {grid[losses.argmin()]:.3f}, loss {losses.min():.4f}")

optimizer = optax.adam(0.1)  # of the rate's logarithm
log_rate = jnp.log(0.2)
state = optimizer.init(log_rate)
slope = jax.jit(jax.grad(lambda x: final_loss(jnp.exp(x))))
for _ in range(60):
    updates, state = optimizer.update(slope(log_rate), state)
    log_rate = jnp.asarray(optax.apply_updates(log_rate, updates))
print(f"learnt: rate {jnp.exp(log_rate):.3f}, loss {final_loss(jnp.exp(log_rate)):.4f}")
