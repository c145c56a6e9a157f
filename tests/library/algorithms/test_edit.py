"""EDiT's penalty where its recurrence has no say: NaN, rounding, all left out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reducer_cases import follow

import syncalgos as sa

MOVES = np.array([[0.3, 0.4], [0.6, 0.8], [3.0, 4.0]])  # norms 0.5, 1 and 5
# exp(-norm), as shares of their sum, and the mean, by NumPy apart.
MEAN = [0.4310263925, 0.5747018567]


def train_rounds(moves: Any, is_wide: bool = True, **settings: float) -> np.ndarray:
    """The replicas (rounds, workers, 2) that start at 0, moved by (rounds, workers, 2).

    One outer step of 1 a round, without momentum unless it is set.
    """
    settings = {"outer_lr": 1, "outer_momentum": 0, **settings}
    with jax.enable_x64(is_wide):
        starts = np.zeros(MOVES.shape)
        moves = np.asarray(moves)
        return follow(sa.edit(1, **settings), optax.sgd(1.0), starts, moves)


def test_a_worker_that_is_not_finite_is_left_out_at_once():
    moves = MOVES.copy()
    moves[2, 0] = np.nan
    mean_of_others = np.average(MOVES[:2], axis=0, weights=np.exp([-0.5, -1]))
    np.testing.assert_allclose(
        train_rounds([moves])[0], [-mean_of_others] * 3, rtol=1e-10
    )


@pytest.mark.parametrize(
    ("factor", "left_out", "is_wide"),
    [(10, 3, True), (10, 3, False), (0.1, 0, False), (1 + 1e-7, 0, False)],
)
def test_norms_that_change_for_good_are_usual_again(factor, left_out, is_wide):
    """In float32 the variance of equal norms was below 0, and its root NaN."""
    moves = np.multiply.outer([1] * 12 + [factor] * 8, MOVES)
    steps = np.diff(train_rounds(moves, leaf_clip=100, is_wide=is_wide)[:, 0], axis=0)
    has_moved = np.abs(steps).max(1) > 0
    assert has_moved[:11].all()
    assert has_moved[11 + left_out :].all()


def test_a_share_far_below_rounding_is_no_share_of_all():
    """1 - (1 - forgetting) is 0 in float32: each norm would have been its own mean."""
    moves = np.multiply.outer([1, 3, 3, 3], MOVES)
    settings = {"forgetting": 1e-9, "trusted": 3, "threshold": 0.1, "leaf_clip": 100}
    steps = np.diff(train_rounds(moves, is_wide=False, **settings)[:, 0], axis=0)
    # Of 1, 3 and 3 the mean is 7/3 and the deviation 0.94: 3 is unusual.
    assert (np.abs(steps).max(1) > 0).tolist() == [True, True, False]


def test_where_all_are_unusual_nothing_moves_and_momentum_waits():
    infinite_moves = np.full_like(MOVES, np.inf)
    replicas = train_rounds(
        [MOVES, infinite_moves, infinite_moves, MOVES], outer_momentum=0.5
    )
    expected = train_rounds([MOVES, MOVES], outer_momentum=0.5)
    np.testing.assert_array_equal(replicas[1], replicas[0])
    np.testing.assert_array_equal(replicas[2], replicas[0])
    np.testing.assert_allclose(replicas[3], expected[1], rtol=1e-12)


def test_norms_that_differ_by_rounding_are_alike():
    """Norms are alike if an inner optimizer's steps all have one length."""
    rounds = [MOVES * (1 + 1e-7 * (i % 3 == 2)) for i in range(12)]
    replicas = train_rounds(rounds, trusted=2)
    expected = -np.array(MEAN) * np.arange(1, 13)[:, None]
    np.testing.assert_allclose(replicas[:, 0], expected, rtol=1e-5)


def test_a_mask_may_leave_nothing_to_screen():
    """A model with fewer leaves than fragments has an empty one."""
    strategy = sa.masked(sa.edit(1), lambda path, shape: False)
    counts = sa.communication(strategy, {"x": jnp.zeros(2)}, workers=3, steps=2)
    assert counts.bytes_per_worker == 0


@pytest.mark.slow
def test_a_rate_has_a_derivative_where_all_workers_are_unusual():
    """The softmax of a column of infinities is NaN, and hid behind a selection."""
    moves = np.array([MOVES, MOVES, 100 * MOVES, MOVES])

    def train_end(lr: float) -> jax.Array:
        strategy = sa.edit(1, outer_lr=lr, trusted=2, axis="w")

        def worker(worker_moves: jax.Array) -> jax.Array:
            replica = sa.Replica(jnp.zeros(2))
            state = strategy.init(jnp.zeros(2))
            for step, move in enumerate(worker_moves):
                replica = sa.Replica(replica.params + move)
                replica, state = strategy.sync(replica, state, step)
            return replica.params.sum()

        return jax.vmap(worker, 1, axis_name="w")(moves).mean()

    with jax.enable_x64(True):
        run = jax.jit(jax.value_and_grad(train_end))
        slope = (run(0.8 + 1e-6)[0] - run(0.8 - 1e-6)[0]) / 2e-6
        assert float(run(0.8)[1]) == pytest.approx(float(slope), rel=1e-6)
