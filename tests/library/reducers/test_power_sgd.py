"""Low-rank products against NumPy, their derivatives, and matrices worth one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.reducer_cases import assert_close, normal_tree, param_shapes, run

from models import gpt
from syncalgos import Replica, communication, dion, powersgd
from syncalgos.reducers import power_sgd

STACKED = {"bias": 1, "kernel": 0, "stack": 1}
MATRICES = {"kernel": (12, 6), "stack": (5, 8)}  # of each layer: rows, columns


def test_power_sgd_is_one_power_iteration_a_step_of_each_layer():
    """From the first Q on, in NumPy; vectors are averaged, stacked or not."""
    updates = normal_tree(2, bias=(2, 6), kernel=(3, 4, 6), stack=(2, 5, 8))
    reducer = power_sgd(2, min_rate=0, layered=STACKED)
    first_state: Any = reducer.init(jax.tree.map(lambda x: x[0, 0], updates))
    combined, sent_updates, _ = run(reducer, updates)
    for (name, sides), q in zip(MATRICES.items(), first_state[1:], strict=True):
        layers = [
            np.float64(tree[name]).reshape(2, 3, -1, *sides)
            for tree in (updates, combined, sent_updates)
        ]
        q = np.float64(q).reshape(-1, sides[1], 2)
        for step, layer in np.ndindex(2, len(q)):
            worker_matrices, combined_matrices, sent_matrices = (
                x[step, :, layer] for x in layers
            )
            p = np.linalg.qr(np.mean(worker_matrices @ q[layer], 0)).Q
            shares = [matrix.T @ p for matrix in worker_matrices]
            q[layer] = np.mean(shares, 0)
            assert_close(combined_matrices[0], p @ q[layer].T, 1e-5)
            assert_close(sent_matrices[1], p @ shares[1].T, 1e-5)
    mean = updates["bias"].mean(1, keepdims=True)
    assert_close(combined["bias"], np.broadcast_to(mean, updates["bias"].shape))


def test_power_sgd_recovers_from_a_zero_gradient():
    # As behind a readout that starts from zeros, of inputs whose first are never lit.
    x = np.zeros((12, 2, 8, 6), np.float32)
    rng = np.random.default_rng(0)
    x[1:, :, 4:] = np.outer(rng.normal(size=4), rng.normal(size=6))
    combined, _, _ = run(power_sgd(2, min_rate=0), x)
    assert_close(combined[-1, 0], x[-1, 0], 1e-5)


# Gradients (workers, steps, 6, 4): of zeros, zeros at first, of rank 1.
GRADS = np.random.default_rng(0).normal(size=(2, 3, 6, 4))
LATE_GRADS = GRADS * np.array([0, 1, 1])[:, None, None]
RANK_1_GRADS = np.arange(1.0, 4)[:, None, None] * np.outer(
    GRADS[0, 0, :, 0], GRADS[0, 0, 0]
)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_momentum_has_a_derivative_at_any_rank():
    @jax.jit
    @jax.value_and_grad
    def sum_moves(momentum: float, grads: Any) -> jax.Array:
        strategy = dion(local_momentum=momentum, axis="w")

        def worker(worker_grads: jax.Array) -> Any:
            replica = Replica(jnp.ones((6, 4)))
            state = strategy.init(replica.params)
            total = 0.0
            for step, g in enumerate(worker_grads):
                moves, state = strategy.reduce(g, replica, state, step)
                total = total + jnp.sum(jnp.sin(moves))
            return total

        return jnp.mean(jax.vmap(worker, axis_name="w")(grads))

    for grads in 0 * GRADS, LATE_GRADS, np.stack([RANK_1_GRADS, 2 * RANK_1_GRADS]):
        higher, _ = sum_moves(0.9 + 1e-6, grads)
        lower, _ = sum_moves(0.9 - 1e-6, grads)
        slope = float(higher - lower) / 2e-6
        _, derivative = sum_moves(0.9, grads)
        assert derivative == pytest.approx(slope, rel=1e-5, abs=1e-7)


def count_bytes(params: Any, **settings: Any) -> float:
    """Bytes of a step of two workers: a ring of two sends all once."""
    strategy = powersgd(rank=2, **settings)
    return communication(strategy, params, workers=2, steps=1).bytes_per_worker


def test_powersgd_of_rank_2_sends_so_little_of_gpt2_whose_layers_are_stacked():
    params = param_shapes(lambda key: gpt.init(key, 50257, 1024, 768, 12))
    dense = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    sent_bytes = count_bytes(params, layered=gpt.LAYERED)
    assert sent_bytes == pytest.approx(0.00397 * dense, rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "settings", "numbers"),
    [
        ((8, 8), {}, 64),  # 2 (8 + 8) is the half
        ((8, 9), {}, 2 * (8 + 9)),
        ((8, 8), {"min_rate": 1}, 2 * (8 + 8)),
        ((2, 3), {"min_rate": 0}, 2 * (2 + 3)),
    ],
)
def test_powersgd_sends_a_matrix_whole_that_its_rank_halves_at_best(
    shape, settings, numbers
):
    assert count_bytes(jax.ShapeDtypeStruct(shape, "f"), **settings) == 4 * numbers
