"""Workers that skip rounds or local steps: what their weights reach, and what not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import relative_error
from support.problems.quadratics import ROUNDING, START, flatten, train, unflatten
from support.tiers import tiers

import syncalgos as sa
from syncalgos import model_averaging, paced, participating, reducers, sampled
from syncalgos.reducers._dense import LowBitState

pytestmark = pytest.mark.usefixtures("float64")


WEIGHTS = np.array([3.0, 1, 0, 0])
OF_WORKERS = np.array([1.0, 2, 30, 40])  # what each worker's data hold


def weigh_three_to_one(step: jax.Array, workers: int) -> jax.Array:
    return jnp.asarray(WEIGHTS)


def compute_loss(
    params: Any, buffers: Any, batch: Any, key: jax.Array
) -> tuple[jax.Array, tuple[Any, Any]]:
    """Pulls params to the data, whose running mean is a buffer beside a key."""
    total = buffers["mean"] + 0.1 * (jnp.mean(batch) - buffers["mean"])
    loss = jnp.mean((params - batch) ** 2) / 2
    return loss, ({**buffers, "mean": total}, {"seen": jnp.mean(batch)})


def make_trainer(
    strategy: sa.Strategy,
    loss: Callable = compute_loss,
    optimizer: optax.GradientTransformation | None = None,
) -> sa.DataParallel:
    return sa.DataParallel(
        loss, optimizer or optax.sgd(0.1), strategy, workers=4, backend="vmap"
    )


AVERAGE_THE_REST = sa.chain(sa.average("opt_state"), sa.average("buffers"))
ONE_GATE = sa.every(sa.chain(sa.average(), AVERAGE_THE_REST), 2)
WEIGHED = {
    "one gate": participating(ONE_GATE, weigh_three_to_one),
    "stale, one gate": participating(ONE_GATE, weigh_three_to_one, stale=True),
    "gradients": participating(sa.sync_sgd(), weigh_three_to_one),
    "stale": participating(model_averaging(2), weigh_three_to_one, stale=True),
    "at syncs": sa.at_syncs(
        participating(model_averaging(2), weigh_three_to_one), AVERAGE_THE_REST
    ),
    "stale, at syncs": sa.at_syncs(
        participating(model_averaging(2), weigh_three_to_one, stale=True),
        AVERAGE_THE_REST,
    ),
}


@pytest.mark.parametrize("name", tiers(WEIGHED, ["gradients"]))
def test_weights_reach_all_that_is_made_of_the_workers(name):
    """Means by 3 : 1, and none of 30 and 40, whose gradients would be ten times."""
    trainer = make_trainer(WEIGHED[name], optimizer=optax.sgd(0.1, momentum=0.5))
    buffers = {"mean": jnp.zeros(()), "key": jax.random.key(0)}
    state = trainer.init(jnp.zeros(()), buffers)
    theta = np.zeros(4)
    momentum = np.zeros(4)
    mean = np.zeros(4)
    for step in range(5):
        state, metrics = trainer.run(state, OF_WORKERS[None])
        losses = (theta - OF_WORKERS) ** 2 / 2
        assert relative_error(metrics["loss"][0], WEIGHTS @ losses / 4) <= ROUNDING
        assert relative_error(metrics["seen"][0], 1.25) <= ROUNDING
        grads = theta - OF_WORKERS
        grads = np.full(4, WEIGHTS @ grads / 4) if name == "gradients" else grads
        momentum = 0.5 * momentum + grads
        theta = theta - 0.1 * momentum
        mean = mean + 0.1 * (OF_WORKERS - mean)
        if step % 2 and name != "gradients":
            stays = (WEIGHTS == 0) & name.startswith("stale")
            theta = np.where(stays, theta, WEIGHTS @ theta / 4)
            if name != "stale":  # BESIDE
                momentum = np.where(stays, momentum, WEIGHTS @ momentum / 4)
                mean = np.where(stays, mean, WEIGHTS @ mean / 4)
        center = trainer.center(state)
        expected = WEIGHTS @ mean / 4
        assert relative_error(center.buffers["mean"], expected) <= ROUNDING
        assert relative_error(center.params, WEIGHTS @ theta / 4) <= ROUNDING


@pytest.mark.parametrize("order", tiers([1, -1], [1]))
def test_a_round_ends_when_any_member_of_a_chain_syncs(order):
    members = sa.every(sa.average(), 2), sa.every(sa.average("buffers"), 4)

    def first_alone_at_fourth(step: jax.Array, workers: int) -> jax.Array:
        return jnp.arange(workers) < jnp.where(step == 3, 1, workers)

    strategy = participating(sa.chain(*members[::order]), first_alone_at_fourth)
    trainer = make_trainer(strategy, lambda params, batch: -params * batch.mean())
    state, _ = trainer.run(trainer.init(jnp.zeros(())), OF_WORKERS[None])
    mean = 0.1 * OF_WORKERS.mean()
    assert relative_error(trainer.center(state).params, mean) <= ROUNDING


def weigh_one_worker_a_round(step: jax.Array, workers: int) -> jax.Array:
    """Rounds are two steps long; worker 0 alone counts in the first."""
    return jnp.arange(workers) == step // 2


def test_buffers_are_weighed_by_the_round_that_has_ended():
    trainer = make_trainer(participating(model_averaging(2), weigh_one_worker_a_round))
    buffers = {"mean": jnp.zeros(()), "key": jax.random.key(0)}
    state = trainer.init(jnp.zeros(()), buffers)
    state, _ = trainer.run(state, np.tile(OF_WORKERS, (2, 1)))
    mean = trainer.center(state).buffers["mean"]
    assert relative_error(mean, OF_WORKERS[0] * (1 - 0.9**2)) <= ROUNDING


def test_an_average_behind_a_late_sync_has_the_weights_of_when_it_was_sent():
    """Sent after two steps by worker 0, it arrives after three."""
    late = sa.delayed(participating(model_averaging(2), weigh_one_worker_a_round), 1)
    trainer = make_trainer(
        sa.at_syncs(late, sa.average("opt_state")),
        lambda params, batch: -params * batch.mean(),
        optax.sgd(0.1, momentum=0.5),
    )
    state, _ = trainer.run(trainer.init(jnp.zeros(())), np.tile(OF_WORKERS, (3, 1)))
    [momenta] = jax.tree.leaves(state.replica.opt_state)
    of_worker_0 = -OF_WORKERS[0] * (1 + 0.5 + 0.25)
    assert relative_error(np.ravel(momenta), np.full(4, of_worker_0)) <= ROUNDING


def test_a_reset_leaves_no_residual_to_a_worker_that_skips_it():
    def first_skips_the_reset(step: jax.Array, workers: int) -> jax.Array:
        return (jnp.arange(workers) > 0) | (step % 2 == 0)

    reducer = reducers.low_bit(4, reset_period=2)
    trainer = make_trainer(
        participating(sa.reduce_with(reducer), first_skips_the_reset),
        lambda params, batch: -(params @ jnp.array([1.0, 0.37, 0.19])) * batch.mean(),
    )
    state = trainer.init(jnp.zeros(3))
    residuals = []
    for _ in range(2):
        state, _ = trainer.run(state, OF_WORKERS[None])
        [reducer_state] = jax.tree.leaves(
            state.sync, is_leaf=lambda x: isinstance(x, LowBitState)
        )
        residuals.append(np.reshape(reducer_state.residual, (4, 3)))
    assert np.any(residuals[0][0] != 0)
    np.testing.assert_array_equal(residuals[1], 0)


def test_a_paced_worker_without_steps_is_in_no_buffers_and_no_metrics():
    trainer = make_trainer(paced(model_averaging(2), [2, 2, 0, 0]))
    buffers = {"mean": jnp.zeros(()), "key": jax.random.key(0)}
    state = trainer.init(jnp.zeros(()), buffers)
    state, metrics = trainer.run(state, np.tile(OF_WORKERS, (2, 1)))
    assert relative_error(metrics["seen"], np.full(2, 1.5)) <= ROUNDING
    mean = trainer.center(state).buffers["mean"]
    assert relative_error(mean, 1.5 * (1 - 0.9**2)) <= ROUNDING
    state, _ = trainer.run(state, OF_WORKERS[None])
    mean = np.mean(state.replica.params)  # there its model counts
    assert relative_error(trainer.center(state).params, mean) <= ROUNDING


def test_metrics_are_not_weighed_where_every_worker_makes_steps():
    """Those in bfloat16 are averaged as without a pace, and stay so."""

    def loss(
        params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        batch_mean = jnp.bfloat16(jnp.mean(batch))
        return params * jnp.mean(batch), (buffers, {"seen": batch_mean})

    trainer = make_trainer(paced(model_averaging(2), [2, 1, 1, 1]), loss)
    _, metrics = trainer.run(trainer.init(jnp.zeros(()), ()), OF_WORKERS[None])
    assert metrics["seen"].dtype == jnp.bfloat16
    assert metrics["seen"][0] == jnp.bfloat16(OF_WORKERS.mean())


def test_metrics_of_a_round_are_weighed_by_its_end():
    def last_one_counts_at_odd_steps(step: Any, workers: int) -> jax.Array:
        is_last = jnp.arange(workers) == workers - 1
        return jnp.where(step % 2 == 1, is_last, ~is_last)

    def loss(
        params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        return params * 0 + jnp.mean(batch), (buffers, {})

    strategy = participating(model_averaging(2), last_one_counts_at_odd_steps)
    trainer = make_trainer(strategy, loss)
    batches = np.tile(OF_WORKERS, (2, 1))
    _, metrics = trainer.run(trainer.init(jnp.zeros(()), ()), batches)
    np.testing.assert_array_equal(metrics["loss"], [OF_WORKERS[-1]] * 2)


def test_evaluate_takes_the_weighted_buffers():
    def loss(
        params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        return buffers + 0 * params * batch.mean(), (batch.mean(), {})

    trainer = make_trainer(participating(model_averaging(2), weigh_three_to_one), loss)
    state = trainer.init(jnp.zeros(()), jnp.zeros(()))
    state, _ = trainer.run(state, OF_WORKERS[None])
    assert trainer.evaluate(state, OF_WORKERS[None])["loss"][0] == 1.25


FEEDBACK = {
    "error_feedback": lambda axis: reducers.error_feedback(
        reducers.top_k(0.5), axis=axis
    ),
    "low_bit": lambda axis: reducers.low_bit(2, beta=0, axis=axis),
}


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_worker_that_skips_keeps_its_residual(name):
    """It sends nothing: the result is as if its residual were 0."""

    def second_skips(step: jax.Array, workers: int) -> jax.Array:
        return jnp.where((step == 1) & (jnp.arange(workers) == 1), 0.0, 1.0)

    reduced = sa.reduce_with(FEEDBACK[name]("workers"), axis="workers")
    strategy = participating(reduced, second_skips)

    def step(grads: Any, state: Any, number: int) -> tuple[Any, Any]:
        return strategy.reduce(grads, sa.Replica(grads), state, number)

    mapped = jax.jit(jax.vmap(step, axis_name="workers", in_axes=(0, 0, None)))
    grads = jnp.array([[4.0, 1, 4, 1]] * 2)
    _, state = mapped(grads, jax.vmap(strategy.init, axis_name="workers")(grads), 0)
    residuals, form = jax.tree.flatten(state)
    np.testing.assert_array_equal(residuals[0], [[0, 1, 0, 1]] * 2)
    combined, new_state = mapped(grads, state, 1)
    np.testing.assert_array_equal(jax.tree.leaves(new_state)[0][1], [0, 1, 0, 1])
    residuals[0] = residuals[0].at[1].set(0)
    without, _ = mapped(grads, form.unflatten(residuals), 1)
    np.testing.assert_array_equal(combined, without)
    np.testing.assert_array_equal(combined[:, ::2], np.full((2, 2), 4))


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [(sa.bmuf(4), [3, 11]), (sa.sync_sgd(), [0, 1, 2, 3, 8, 9, 10, 11])],
    ids=["bmuf", "sync_sgd"],
)
def test_nothing_is_sent_in_a_round_in_which_nobody_takes_part(strategy, steps):
    in_vain = participating(
        strategy, lambda step, workers: jnp.ones(workers) * (step // 4 != 1)
    )
    byte_totals = sa.communication(
        in_vain, unflatten(START), workers=2, steps=12
    ).per_step
    assert np.flatnonzero(np.diff(byte_totals, prepend=0)).tolist() == steps


def test_sampled_draws_its_share_anew_at_each_step_and_for_each_seed():
    shares = [(0.1, 1), (0.25, 2), (0.3, 2), (0.5, 4), (0.9, 7), (0.95, 8), (1, 8)]

    @jax.jit
    @jax.vmap
    def drawn(step: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        of_shares = [jnp.sum(sampled(fraction)(step, 8)) for fraction, _ in shares]
        return of_shares, [sampled(0.5, seed=seed)(step, 8) for seed in (0, 1)]

    counts, draws = drawn(jnp.arange(100))
    for count, (_, share) in zip(counts, shares, strict=True):
        np.testing.assert_array_equal(count, np.full(100, share))
    draws = np.array(draws)  # (seeds, steps, workers)
    # 70 sets of 4 of 8 workers: as good as never the same twice in a row.
    assert (draws[:, 1:] != draws[:, :-1]).any(2).mean() > 0.9
    assert (draws[0] != draws[1]).any(1).mean() > 0.9
    # Each worker is drawn at half of the steps, give or take 5 standard deviations.
    assert abs(draws.mean((0, 1)) - 0.5).max() < 5 * 0.5 / np.sqrt(200)
    assert sampled(0.1, least=2)(0, 1).tolist() == [True]


@pytest.mark.slow
def test_weighted_means_of_float16_do_not_overflow():
    def loss(params: Any, buffers: Any, *_: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        return 0 * params, (buffers, {"seen": buffers})

    alone = participating(model_averaging(1), lambda step, n: jnp.arange(n) == 3)
    trainer = make_trainer(alone, loss)
    state = trainer.init(jnp.float16(20000), jnp.float16(30000))
    state, metrics = trainer.run(state, np.zeros((1, 4)))
    center = trainer.center(state)
    assert (center.params, center.buffers) == (20000, 30000)
    evaluation = trainer.evaluate(state, np.zeros((1, 5)))
    assert (metrics["seen"][0], evaluation["seen"][0]) == (30000, 30000)


def test_bfloat16_keeps_its_dtype():
    weighted = participating(model_averaging(2), weigh_three_to_one, stale=True)
    trained = train(paced(weighted, [2, 1, 1, 0]), steps=4, dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(trained.replica.params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert np.isfinite(np.float32(flatten(trained.replica.params, lead=2))).all()
