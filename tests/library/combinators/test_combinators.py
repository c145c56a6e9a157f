"""Strategies made of strategies: what each combinator adds, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import syncalgos as sa

WORKERS = 3


def marking(name):
    """A strategy that adds 1 to its own entry of params at each sync."""

    def sync(replica, state, step):
        params = {**replica.params, name: replica.params[name] + 1}
        return replica._replace(params=params), state + 1

    return sa.Strategy(init=lambda params: jnp.int32(0), sync=sync)


def follow(strategy, params, steps, opt_state=()):
    """Syncs without training; returns the replicas and states after each step."""
    add_axis = jax.tree.map(lambda x: jnp.asarray(x, float), params)

    def worker(params):
        replica, state = sa.Replica(params, opt_state), strategy.init(params)
        history = []
        for step in range(steps):
            grads, state = strategy.reduce(params, replica, state, jnp.int32(step))
            replica, state = strategy.sync(replica, state, jnp.int32(step))
            history.append(
                (replica, state, strategy.center(replica.params, state), grads)
            )
        return history

    lanes = jax.vmap(worker, axis_name="lanes", in_axes=0)
    return jax.vmap(lanes, axis_name="devices")(
        jax.tree.map(lambda x: x[None], add_axis)
    )


def ones(*names):
    return {name: np.zeros(WORKERS) for name in names}


def history_of(strategy, name="a", steps=8, params=None):
    """The named entry of worker 0 after each step."""
    history = follow(strategy, ones("a", "b") if params is None else params, steps)
    return [float(replica.params[name][0, 0]) for replica, *_ in history]


def test_default_strategy_keeps_everything():
    params = {"a": np.arange(3.0)}
    for strategy in (sa.Strategy(), sa.chain()):
        for replica, _, center, grads in follow(strategy, params, 3):
            np.testing.assert_array_equal(replica.params["a"], [params["a"]])
            np.testing.assert_array_equal(grads["a"], [params["a"]])
            np.testing.assert_array_equal(center["a"], np.ones((1, 3)))


def test_every_acts_after_steps_period_and_its_multiples():
    assert history_of(sa.every(marking("a"), 3)) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert history_of(sa.every(marking("a"), 1)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_when_asks_the_step():
    odd = sa.when(marking("a"), lambda step: step % 2 == 1)
    assert history_of(odd) == [0, 1, 1, 2, 2, 3, 3, 4]


def test_every_reduces_at_the_same_steps_as_it_syncs():
    strategy = sa.every(sa.sync_sgd(), 2)
    params = {"a": np.arange(3.0)}
    grads = [np.asarray(g["a"][0]) for *_, g in follow(strategy, params, 4)]
    np.testing.assert_array_equal(grads, [[0, 1, 2], [1, 1, 1], [0, 1, 2], [1, 1, 1]])


def test_until_and_after_split_the_steps():
    both = sa.chain(sa.until(marking("a"), 3), sa.after(marking("b"), 3))
    assert history_of(both, "a", 6) == [1, 2, 3, 3, 3, 3]
    assert history_of(both, "b", 6) == [0, 0, 0, 1, 2, 3]


def test_after_counts_periods_on_the_absolute_clock():
    assert history_of(sa.after(sa.every(marking("a"), 4), 3)) == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
    ]


def test_chain_applies_its_members_in_order():
    double = sa.Strategy(
        sync=lambda r, s, t: (
            r._replace(params=jax.tree.map(lambda x: 2 * x, r.params)),
            s,
        )
    )
    assert history_of(sa.chain(marking("a"), double), steps=3) == [2, 6, 14]
    assert history_of(sa.chain(double, marking("a")), steps=3) == [1, 3, 7]


def own_center(value):
    return sa.Strategy(
        center=lambda params, state: jax.tree.map(lambda x: 0 * x + value, params)
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (sa.chain(own_center(5), sa.sync_sgd()), 5),  # defaults are skipped
        (sa.chain(sa.sync_sgd(), own_center(5)), 5),
        (sa.chain(own_center(5), own_center(7)), 7),  # the last of its own
        (sa.chain(own_center(7), sa.chain(own_center(5), sa.average())), 5),
        (sa.chain(own_center(7), sa.chain(sa.average(), sa.sync_sgd())), 7),
        (sa.chain(own_center(7), sa.every(sa.average(), 4)), 7),
        (sa.every(own_center(5), 4), 5),
        (sa.chain(sa.average("buffers"), sa.sync_sgd()), 1),  # else the mean
        (sa.every(sa.chain(sa.average("buffers")), 4), 1),
        (sa.chain(), 1),
    ],
)
def test_center_of_a_chain_is_the_last_of_its_own_else_the_mean(strategy, expected):
    [(_, _, center, _)] = follow(strategy, {"a": np.arange(3.0)}, 1)
    np.testing.assert_array_equal(center["a"], np.full((1, 3), expected))


def test_center_does_not_go_stale_outside_a_phase():
    """BMUF before `after` and beyond `until` has the current model as its center."""
    moving = sa.Strategy(
        sync=lambda r, s, t: (r._replace(params={"a": r.params["a"] + 1}), s)
    )
    params = {"a": np.zeros(WORKERS)}
    late = sa.chain(moving, sa.after(sa.bmuf(4, block_momentum=0.5), 3))
    centers = [float(c["a"][0, 0]) for _, _, c, _ in follow(late, params, 8)]
    # Steps 0-2: the current model. The first block, steps 3 alone: 3 + (4 - 3). The
    # second from 4: velocity 0.5 · 1 + (8 - 4).
    assert centers == [1, 2, 3, 4, 4, 4, 4, 4 + 4.5]
    early = sa.chain(sa.until(sa.bmuf(2, block_momentum=0.5), 4), moving)
    centers = [float(c["a"][0, 0]) for _, _, c, _ in follow(early, params, 6)]
    assert (
        centers[4:]
        == [float(r.params["a"][0, 0]) - 1 for r, *_ in follow(early, params, 6)][4:]
    )


def test_until_keeps_the_state_of_a_strategy_without_a_center():
    history = follow(sa.until(marking("a"), 3), ones("a", "b"), 6)
    assert [int(state[0, 0]) for _, state, *_ in history] == [1, 2, 3, 3, 3, 3]


def test_mean_of_a_chain_is_over_the_axis_of_its_members():
    strategies = [
        sa.every(sa.chain(sa.average(axis="batch"), sa.reset(optax.sgd(0.1))), 16),
        sa.chain(
            sa.reset(optax.sgd(0.1)), sa.average("buffers", axis="batch"), sa.Strategy()
        ),
        sa.Strategy(center=sa.MeanCenter("batch")),
    ]
    for strategy in strategies:
        center = jax.vmap(
            lambda x, s=strategy: s.center(x, ((), ())), axis_name="batch"
        )
        np.testing.assert_array_equal(center(jnp.arange(3.0)), np.ones(3))


def test_average_touches_only_its_field():
    params, optimizer = {"a": np.arange(3.0)}, optax.adam(0.1)
    state = optimizer.init({"a": jnp.float32(0)})
    for field in ("params", "opt_state", "buffers"):
        [(replica, *_)] = follow(sa.average(field), params, 1, state)
        mean = np.full((1, 3), 1.0) if field == "params" else [params["a"]]
        np.testing.assert_array_equal(replica.params["a"], mean)
        assert replica.opt_state[0].count.dtype == jnp.int32


ONES = {"a": jnp.ones(3)}


def reset_after(updates, optimizer, **given):
    """The state of an optimizer that was reset after some updates along ones."""
    state = optimizer.init(ONES)
    for _ in range(updates):
        _, state = optimizer.update(ONES, state, ONES, **given)
    return sa.reset(optimizer).sync(sa.Replica(ONES, state), (), 3)[0].opt_state


def test_reset_restarts_momentum_and_keeps_the_schedule():
    optimizer = optax.sgd(optax.cosine_decay_schedule(1.0, 10), momentum=0.9)
    trace, schedule = reset_after(4, optimizer)
    np.testing.assert_array_equal(trace.trace["a"], np.zeros(3))
    assert int(schedule.count) == 4


def test_reset_keeps_what_counts_steps_and_remembers_losses():
    optimizer = optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        optax.adamw(0.1, weight_decay=optax.linear_schedule(1.0, 0.0, 10)),
        contrib.reduce_on_plateau(factor=0.5, patience=2),
    )
    noise, adam, plateau = reset_after(4, optimizer, value=1.0)
    np.testing.assert_array_equal(adam[0].mu["a"], np.zeros(3))
    assert int(noise.count) == int(adam[1].count) == 4
    assert float(plateau.scale) == 0.5


@pytest.mark.parametrize(
    "accumulating",
    [
        optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
        optax.chain(optax.apply_every(3), optax.sgd(0.1 / 3)),
    ],
    ids=["MultiSteps", "apply_every"],
)
def test_reset_keeps_accumulated_gradients(accumulating):
    """Reset every 2 steps, updates of every third would never come."""
    params = jnp.ones(3)
    state = accumulating.init(params)
    for step in range(12):
        updates, state = accumulating.update(jnp.ones(3), state, params)
        params = optax.apply_updates(params, updates)
        if step % 2:
            replica, _ = sa.reset(accumulating).sync(
                sa.Replica(params, state), (), step
            )
            state = replica.opt_state
    np.testing.assert_allclose(params, np.full(3, 1 - 4 * 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    "conditional",
    [optax.transforms.conditionally_transform, optax.transforms.conditionally_mask],
)
def test_reset_keeps_the_step_that_a_condition_goes_by(conditional):
    momentum = optax.sgd(0.1, momentum=0.9)
    state = reset_after(2, conditional(momentum, lambda step: step < 3))
    assert state.step == 2
    np.testing.assert_array_equal(state.inner_state[0].trace["a"], np.zeros(3))


def test_reset_restarts_momentum_inside_of_accumulation():
    optimizer = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    state = reset_after(3, optimizer.gradient_transformation())
    assert state.mini_step == state.gradient_step == 1
    np.testing.assert_array_equal(state.acc_grads["a"], np.ones(3))
    np.testing.assert_array_equal(state.inner_opt_state[0].trace["a"], np.zeros(3))


def test_reset_keeps_injected_hyperparameters():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = optax.inject_hyperparams(optax.sgd)(schedule, momentum=0.9)
    state = reset_after(4, optimizer)
    np.testing.assert_array_equal(state.inner_state[0].trace["a"], np.zeros(3))
    updates, _ = optimizer.update(ONES, state, ONES)
    np.testing.assert_allclose(updates["a"], np.full(3, -0.6), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.chain(sa.bmuf), r"chain: expected a Strategy, .*bmuf\(\)"),
        (lambda: sa.chain(sa.average(), 3), "chain: expected a Strategy, got 3"),
        (
            lambda: sa.every(sa.average(), sa.average()),
            "period must be a whole number of at least 1",
        ),
        (lambda: sa.every(3, 3), "every: expected a Strategy, got 3"),
        (lambda: sa.every(sa.average(), 0), "period must be .* at least 1, got 0"),
        (lambda: sa.every(sa.average(), 2.0), "period must be .* at least 1, got 2.0"),
        (
            lambda: sa.every(sa.average(), np.array([3])),
            r"period must be .*, got array\(",
        ),
        (
            lambda: sa.every(sa.average(), jnp.float32(3)),
            "period must be a whole number",
        ),
        (lambda: sa.when(sa.average(), 3), "active must be a function, got 3"),
        (lambda: sa.until(sa.average(), -1), "until: s must be .* at least 0, got -1"),
        (
            lambda: sa.after(sa.average(), "x"),
            "after: s must be .* at least 0, got 'x'",
        ),
        (
            lambda: sa.average("parms"),
            "unknown field of Replica 'parms'; did you mean 'params'",
        ),
        (lambda: sa.every(sa.average(), 2**40), r"period must be below 2\*\*31"),
        (
            lambda: sa.outer_step(optax.sgd),
            r"outer_step: outer must.*call it: sgd",
        ),
        (lambda: sa.outer_step(0.7), "must be an optax optimizer, got 0.7"),
        (lambda: sa.reset(3), "reset: optimizer must be an optax optimizer, got 3"),
        (
            lambda: sa.reset(optax.MultiSteps(optax.sgd(0.1), 2)),
            r"pass its \.gradient_transformation\(\)",
        ),
        (
            lambda: sa.average(reduce=3),
            "average: expected an optax GradientTransformation",
        ),
        (
            lambda: sa.reduce_with(lambda tree: tree),
            r"factory with a keyword axis, got .*optax.stateless",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_average_refuses_a_reducer_with_state_on_another_field():
    strategy = sa.average("buffers", optax.trace(0.9))
    with pytest.raises(ValueError, match="reducer with state cannot average buffers"):
        strategy.init({"a": jnp.ones(3)})


def test_reducers_may_be_made_or_to_be_made():
    params = {"a": np.arange(3.0)}
    results = [
        follow(sa.reduce_with(reducer), params, 1)[0][-1]["a"]
        for reducer in (sa.reducers.mean, sa.reducers.mean())
    ]
    np.testing.assert_array_equal(results[0], np.ones((1, 3)))
    np.testing.assert_array_equal(*results)


def test_short_params_keep_small_moves_by_an_outer_step_of_one():
    """One of four moves by 1/256 a step, the mean by a quarter of half a unit at 1."""
    found = []
    for strategy in (sa.average(), sa.outer_step(optax.sgd(1.0))):
        trainer = sa.DataParallel(
            sa.stateless(lambda params, batch: params * jnp.mean(batch)),
            optax.sgd(1 / 256),
            strategy,
            workers=4,
            backend="vmap",
        )
        batches = jnp.zeros((128, 4), jnp.bfloat16).at[:, 0].set(1)
        state = trainer.init(jnp.ones((), jnp.bfloat16))
        state, _ = trainer.run(state, batches)
        found.append(float(trainer.center(state).params))
    assert found == [1.0, 0.875]
