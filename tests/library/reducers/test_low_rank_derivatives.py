"""Derivatives of low-rank steps with respect to numbers, where a matrix lacks rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import syncalgos as sa

GRADS = np.random.default_rng(0).normal(size=(2, 3, 6, 4))  # (workers, steps, ...)
LATE = GRADS * np.array([0, 1, 1])[:, None, None]
RANK_1 = np.arange(1.0, 4)[:, None, None] * np.outer(GRADS[0, 0, :, 0], GRADS[0, 0, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grads", [0 * GRADS, LATE, [RANK_1, 2 * RANK_1]])
def test_a_momentum_has_a_derivative_at_any_rank(grads):
    def end(momentum):
        strategy = sa.dion(local_momentum=momentum, axis="w")

        def worker(own):
            replica = sa.Replica(jnp.ones((6, 4)))
            state, total = strategy.init(replica.params), 0.0
            for step, g in enumerate(own):
                moves, state = strategy.reduce(g, replica, state, step)
                total = total + jnp.sum(jnp.sin(moves))
            return total

        return jnp.mean(jax.vmap(worker, axis_name="w")(jnp.asarray(grads)))

    slope = (end(0.9 + 1e-6) - end(0.9 - 1e-6)) / 2e-6
    assert jax.grad(end)(0.9) == pytest.approx(float(slope), rel=1e-5, abs=1e-7)
