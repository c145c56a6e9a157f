"""Strategies made of strategies: what the small ones do, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa

WORKERS = 3


def follow(
    strategy: sa.Strategy,
    steps: int,
    opt_state: Any = (),
    start: np.ndarray | None = None,
) -> list:
    """Syncs params of 0, 1 and 2 without training.

    Returns:
        (replica, state, center, grads) after each step; grads are the params at first.
    """

    def worker(params: jax.Array) -> Any:
        def local_step(carry: Any, step: jax.Array) -> tuple[Any, Any]:
            replica, state = carry
            grads, state = strategy.reduce(params, replica, state, step)
            replica, state = strategy.sync(replica, state, step)
            center = strategy.center(replica.params, state)
            return (replica, state), (replica, state, center, grads)

        carry = sa.Replica(params, opt_state), strategy.init(params)
        return jax.lax.scan(local_step, carry, jnp.arange(steps))[1]

    lanes = jax.vmap(worker, axis_name="lanes", out_axes=1)
    start = np.arange(3.0) if start is None else start
    mapped = jax.jit(jax.vmap(lanes, axis_name="devices"))
    records = jax.tree.map(np.asarray, mapped(jnp.asarray(start)[None]))
    return [jax.tree.map(lambda x, i=step: x[0, i], records) for step in range(steps)]


def change_params(change: Callable[[jax.Array], jax.Array]) -> sa.Strategy:
    """A strategy that changes params, and counts its syncs."""

    def sync(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        return replica._replace(params=change(replica.params)), state + 1

    return sa.Strategy(init=lambda params: jnp.int32(0), sync=sync)


PLUS_ONE = change_params(lambda x: x + 1)
DOUBLE = change_params(lambda x: 2 * x)


def test_default_strategy_keeps_everything():
    for strategy in (sa.Strategy(), sa.chain()):
        [(replica, _, center, grads)] = follow(strategy, 1)
        for x in replica.params, grads:
            np.testing.assert_array_equal(x, np.arange(3.0))
        np.testing.assert_array_equal(center, np.ones(3))


def test_every_reduces_at_the_same_steps_as_it_syncs():
    grads = [g for *_, g in follow(sa.every(sa.sync_sgd(), 2), 4)]
    np.testing.assert_array_equal(grads, [[0, 1, 2], [1, 1, 1], [0, 1, 2], [1, 1, 1]])


def test_chain_applies_its_members_in_order():
    for strategy, ends in [
        (sa.chain(PLUS_ONE, DOUBLE), [2, 6, 14]),
        (sa.chain(DOUBLE, PLUS_ONE), [1, 3, 7]),
    ]:
        assert [r.params[0] for r, *_ in follow(strategy, 3)] == ends


def test_until_keeps_the_state_of_a_strategy_without_a_center():
    history = follow(sa.until(PLUS_ONE, 3), 6)
    assert [state[0] for _, state, *_ in history] == [1, 2, 3, 3, 3, 3]


def test_center_does_not_go_stale_outside_a_phase():
    """BMUF before `after` and beyond `until` has the current model as its center."""
    late = sa.chain(PLUS_ONE, sa.after(sa.bmuf(4, block_momentum=0.5), 3))
    centers = [c[0] for _, _, c, _ in follow(late, 8, start=np.zeros(3))]
    # Steps 0-2: the current model. The first block, steps 3 alone: 3 + (4 - 3). The
    # second from 4: velocity 0.5 · 1 + (8 - 4).
    assert centers == [1, 2, 3, 4, 4, 4, 4, 4 + 4.5]
    gated = sa.chain(PLUS_ONE, sa.every(sa.after(sa.bmuf(1, block_momentum=0.5), 3), 4))
    assert [c[0] for _, _, c, _ in follow(gated, 8, start=np.zeros(3))] == centers
    early = sa.chain(sa.until(sa.bmuf(2, block_momentum=0.5), 4), PLUS_ONE)
    history = follow(early, 6, start=np.zeros(3))
    last_records = [(r.params[0] - 1, c[0]) for r, _, c, _ in history][4:]
    assert all(params == center for params, center in last_records)


@pytest.mark.parametrize(
    "strategy",
    [
        sa.every(sa.chain(sa.average(axis="batch"), sa.reset(optax.sgd(0.1))), 16),
        sa.chain(
            sa.reset(optax.sgd(0.1)), sa.average("buffers", axis="batch"), sa.Strategy()
        ),
        sa.Strategy(center=sa.MeanCenter("batch")),
    ],
)
def test_mean_of_a_chain_is_over_the_axis_of_its_members(strategy):
    center = jax.vmap(lambda x: strategy.center(x, ((), ())), axis_name="batch")
    np.testing.assert_array_equal(center(jnp.arange(3.0)), np.ones(3))


@pytest.mark.parametrize("field", ["params", "opt_state", "buffers"])
def test_average_touches_only_its_field(field):
    [(replica, *_)] = follow(sa.average(field), 1, optax.adam(0.1).init(jnp.float32(0)))
    mean = np.ones(3) if field == "params" else np.arange(3.0)
    np.testing.assert_array_equal(replica.params, mean)
    assert replica.opt_state[0].count.dtype == jnp.int32


def test_reducers_may_be_made_or_to_be_made():
    for reducer in (sa.reducers.mean, sa.reducers.mean()):
        [(*_, grads)] = follow(sa.reduce_with(reducer), 1)
        np.testing.assert_array_equal(grads, np.ones(3))


def compute_center(
    strategy: sa.Strategy, batches: jax.Array, dtype: Any = jnp.bfloat16
) -> float:
    """The center after steps of a batch's mean / 256 from 1."""
    loss = sa.stateless(lambda params, batch: params * jnp.mean(batch))
    trainer = sa.DataParallel(
        loss, optax.sgd(1 / 256), strategy, workers=4, backend="vmap"
    )
    state, _ = trainer.run(trainer.init(jnp.ones((), dtype)), batches.astype(dtype))
    return float(trainer.center(state).params)


def test_short_params_keep_small_moves_by_an_outer_step_of_one():
    """One of four moves by 1/256 a step, the mean by a quarter of half a unit at 1."""
    batches = jnp.zeros((128, 4)).at[:, 0].set(1)
    strategies = sa.average(), sa.outer_step(optax.sgd(1.0))
    assert [compute_center(x, batches) for x in strategies] == [1.0, 0.875]


@pytest.mark.slow
def test_short_params_keep_what_palsgd_adds_to_their_steps():
    """Steps of a unit grow to 5/4 units, which would be rounded to one."""
    rates = {"learning_rate": 1 / 256, "outer_lr": 1.0, "outer_momentum": 0.0}
    strategy = sa.palsgd(4, proximal=1e-3, **rates)
    batches = -2 * jnp.ones((48, 4))
    short, exact = (
        compute_center(strategy, batches, x) for x in ("bfloat16", "float32")
    )
    assert exact > 1 + 48 / 128 and abs(short - exact) <= 1 / 256
