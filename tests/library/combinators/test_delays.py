"""Results that arrive late, against NumPy that keeps them in a dictionary by then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error
from problems.quadratics import (
    LR,
    ROUNDING,
    SIZE,
    START,
    STEPS,
    ByHand,
    assert_replicas,
    assert_same,
    flatten,
    train,
    unflatten,
)

import syncalgos
from experiments.training.measurements.effective_lr import effective_lr
from syncalgos import (
    average,
    bmuf,
    chain,
    communication,
    delayed,
    diloco,
    every,
    masked,
    model_averaging,
    post_local_sgd,
    reset,
    streaming_diloco,
    sync_sgd,
)

pytestmark = pytest.mark.usefixtures("float64")

MOMENTUM = optax.sgd(LR, momentum=0.9)


def test_delay_of_zero_is_the_strategy_itself():
    strategy = bmuf(4)
    assert delayed(strategy, 0) is strategy


def test_without_a_delay_a_share_of_the_local_value_stays():
    """As in torchft, which mixes on arrival whatever the delay is."""
    trained = train(
        delayed(chain(model_averaging(4), reset(optax.sgd(LR))), 0, alpha=0.25)
    )
    assert_replicas(trained, averaged_late(4, 0, 0.25))


def averaged_late(period, delay, alpha, steps=STEPS):
    """The replicas after each step; a result arrives before the next one is sent."""
    under_way, own = {}, ByHand(steps=steps)
    for step, theta, _ in own:
        if (step + 1) % period == 0 and not delay:
            under_way[step] = theta.mean(0)
        if step in under_way:
            theta[:] = (1 - alpha) * under_way[step] + alpha * theta
        if (step + 1) % period == 0:
            under_way[step + delay] = theta.mean(0)
    return own.replicas


def averaged_late_by_addition(period, delay, alpha, steps=STEPS):
    """A mean's difference from a worker is added to the worker's params, late."""
    under_way, own = {}, ByHand(steps=steps)
    for step, theta, _ in own:
        theta += (1 - alpha) * under_way.get(step, 0)
        if (step + 1) % period == 0:
            under_way[step + delay] = theta.mean(0) - theta
    return own.replicas


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_what_is_sent_at_a_step_arrives_delay_steps_later(delay, alpha):
    trained = train(delayed(model_averaging(4), delay, alpha=alpha), steps=16)
    assert_replicas(trained, averaged_late(4, delay, alpha, steps=16))


@pytest.mark.sample(4)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(
    "period, delay", [(4, 1), (4, 3), (4, 4), (4, 6), (1, 3), (2, 5), (3, 9)]
)
def test_what_arrives_is_added_while_several_results_are_under_way(
    period, delay, alpha
):
    strategy = delayed(model_averaging(period), delay, alpha=alpha, arrival="add")
    trained = train(strategy, steps=20)
    expected = averaged_late_by_addition(period, delay, alpha, steps=20)
    assert_replicas(trained, expected)


@pytest.mark.slow
def test_schedules_and_conditions_are_delayed_as_periods_are():
    """No period tells how many of these results can be under way."""
    for strategy in (
        every(average(), lambda step: 4),
        syncalgos.when(average(), lambda step: step % 4 == 3),
        every(every(average(), 4), 2),
    ):
        trained = train(delayed(strategy, 3, alpha=0.5), steps=16)
        assert_replicas(trained, averaged_late(4, 3, 0.5, steps=16))
        trained = train(delayed(strategy, 6, alpha=0.5, arrival="add"), steps=16)
        expected = averaged_late_by_addition(4, 6, 0.5, steps=16)
        assert_replicas(trained, expected)


@pytest.mark.parametrize(
    "strategy",
    [
        delayed(model_averaging(4), 4),
        delayed(diloco(4), 8, alpha=0.5),
        delayed(every(average(), lambda step: 4), 6),
        delayed(syncalgos.when(average(), lambda step: step % 4 == 3), 4),
        every(delayed(average(), 5), 4),
        delayed(chain(model_averaging(8), average()), 1),
    ],
)
def test_results_that_would_replace_all_local_steps_are_refused(strategy):
    """A steady drift would end where it started: no step is ever kept."""
    with pytest.raises(ValueError, match="so no local step would be kept"):
        train(strategy)


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [4, 8, 9])
@pytest.mark.parametrize(
    "strategy, times",
    [(model_averaging(4), 1), (diloco(4), 7), (bmuf(4, block_momentum=0.5), 2)],
)
def test_added_results_keep_all_of_a_steady_drift(strategy, times, delay):
    late = delayed(strategy, delay, arrival="add")
    made = late, optax.sgd(LR)
    found = effective_lr(lambda numbers: made, unflatten(START), 4)((), LR)
    assert found == pytest.approx(times * LR, rel=1e-3)


@pytest.mark.parametrize(
    ("delay", "alpha", "agree"),
    [
        (4, 0.0, True),
        (8, 0.0, False),
        (8, 0.05, True),
        (12, 0.36, False),
        (12, 0.41, True),
    ],
)
def test_replicas_agree_below_the_bound_on_added_results(delay, alpha, agree):
    """They part in the first round, in which gradients differ; 0 is all that follow."""
    strategy = delayed(model_averaging(4), delay, alpha=alpha, arrival="add")
    loss = syncalgos.stateless(lambda params, batch: jnp.sum(params * batch))
    trainer = syncalgos.DataParallel(
        loss, optax.sgd(LR), strategy, workers=4, backend="vmap"
    )
    apart = np.arange(4.0) * (np.arange(2000) < 4)[:, None]
    state, _ = trainer.run(trainer.init(jnp.zeros(())), apart)
    assert (trainer.divergence(state) < 1e-3) == agree


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("delay", [1, 3])
def test_replacing_takes_the_local_steps_under_way_off_the_effective_rate(delay, alpha):
    late = delayed(model_averaging(8), delay, alpha=alpha)
    made = late, optax.sgd(LR)
    found = effective_lr(lambda numbers: made, unflatten(START), 4)((), LR)
    assert found == pytest.approx(LR * (1 - (1 - alpha) * delay / 8), rel=1e-3)


@pytest.mark.parametrize("delay", [1, 3])
def test_delayed_reduction_gives_gradients_of_that_many_steps_ago(delay):
    sent = []

    def late(grads, step):
        sent.append(grads.mean(0))
        return sent[-1 - delay] if step >= delay else np.zeros(SIZE)

    expected = ByHand(combine=late).replicas
    assert_replicas(train(delayed(sync_sgd(), delay)), expected)


class NumPyBMUF:
    """Its center w, and what one block makes of the mean of the models."""

    def __init__(self):
        self.center, self.velocity = START, np.zeros(SIZE)

    def __call__(self, mean):
        self.velocity = 0.8 * self.velocity + 0.7 * (mean - self.center)
        self.center = self.center + self.velocity
        return self.center


class NumPyDiLoCo(NumPyBMUF):
    def __call__(self, mean):
        outer_grad = self.center - mean
        self.velocity = 0.8 * self.velocity + outer_grad
        self.center = self.center - 0.7 * (outer_grad + 0.8 * self.velocity)
        return self.center


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "by_hand"),
    [
        (bmuf(4, block_momentum=0.8, block_lr=0.7), NumPyBMUF),
        (diloco(4, outer_lr=0.7, outer_momentum=0.8), NumPyDiLoCo),
    ],
    ids=["bmuf", "diloco"],
)
def test_center_of_a_delayed_strategy_is_that_of_the_last_arrival(
    strategy, by_hand, delay
):
    block, under_way, center = by_hand(), {}, START
    own, centers = ByHand(steps=16), []
    for step, theta, _ in own:
        if step in under_way:
            theta[:] = center = under_way[step]
        if (step + 1) % 4 == 0:
            under_way[step + delay] = block(theta.mean(0))
        centers.append(center)

    trained = train(delayed(strategy, delay), steps=16)
    assert_replicas(trained, own.replicas)
    assert relative_error(trained.centers, np.array(centers)) <= ROUNDING


def test_center_of_a_delayed_average_is_the_mean():
    trained = train(delayed(model_averaging(4), 2))
    mean = trained.replicas.mean(1)
    assert relative_error(trained.centers, mean) <= ROUNDING


# What each leaves of momentum when it sends, and how: in one gate or in gates apart.
AT_ONCE = {
    "reset": (reset(MOMENTUM), lambda m: 0 * m),
    "average": (average("opt_state"), lambda m: m.mean(0)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("together", [True, False], ids=["one gate", "gates apart"])
@pytest.mark.parametrize("kind", AT_ONCE)
def test_what_happens_to_the_optimizer_takes_effect_at_once(kind, together):
    """Neither are params rewound to when it was sent, nor gradients held back."""
    member, effect = AT_ONCE[kind]
    under_way, own = {}, ByHand(momentum=0.9)
    for step, theta, momentum in own:
        if step in under_way:
            theta[:] = under_way[step]
        if (step + 1) % 4 == 0:
            under_way[step + 2] = theta.mean(0)
            momentum[:] = effect(momentum)

    apart = chain(model_averaging(4), every(member, 4))
    strategy = every(chain(average(), member), 4) if together else apart
    assert_replicas(train(delayed(strategy, 2), MOMENTUM), own.replicas)


def test_a_delayed_reset_leaves_params_alone():
    own = ByHand(momentum=0.9)
    for _, _, momentum in own.ends():
        momentum[:] = 0
    trained = train(delayed(every(reset(MOMENTUM), 4), 2), MOMENTUM)
    assert_replicas(trained, own.replicas)


def test_leaves_that_a_delayed_strategy_does_not_touch_train_on():
    """In one gate with another, the part of one arrives, and the rest stays."""
    body = np.arange(SIZE) < 16
    under_way, own = {}, ByHand()
    for step, theta, _ in own:
        if step in under_way:
            theta[:, body] = under_way[step]
        if (step + 1) % 4 == 0:
            under_way[step + 2] = theta[:, body].mean(0)

    part = masked(average(), {"body": True, "head": False})
    for strategy in (every(chain(part, average("buffers")), 4), every(part, 4)):
        assert_replicas(train(delayed(strategy, 2)), own.replicas)


def averaged_late_after(first, **settings):
    """The replicas where averages begin at a step, and arrive two steps later."""
    under_way, own = {}, ByHand(**settings)
    for step, theta, _ in own:
        if step in under_way:
            theta[:] = under_way[step]
        if step >= first and (step + 1) % 4 == 0:
            under_way[step + 2] = theta.mean(0)
    return own.replicas


def test_a_delayed_phase_gives_nothing_before_something_was_sent_in_it():
    """Step 3 ends a period before the phase: nothing arrives from it at step 5."""
    strategy = delayed(syncalgos.after(model_averaging(4), 4), 2)
    assert_replicas(train(strategy), averaged_late_after(4))


def test_delayed_post_local_sgd_delays_gradients_first_and_models_later():
    sent = []

    def late(grads, step):
        sent.append(grads.mean(0))
        late = sent[-3] if step >= 2 else np.zeros(SIZE)
        return late if step < 4 else grads

    expected = averaged_late_after(4, combine=late)
    assert_replicas(
        train(delayed(post_local_sgd(dense_steps=4, period=4), 2)), expected
    )


def test_gate_around_a_delayed_strategy_says_when_it_sends():
    trained = train(every(delayed(average(), 2, alpha=0.5), 4), steps=16)
    assert_replicas(trained, averaged_late(4, 2, 0.5, steps=16))


def test_streaming_diloco_of_one_fragment_with_a_delay_is_delayed_diloco():
    """It is sent so many steps before the end of its period, to arrive there."""
    sent = every(diloco(1), 4, offset=2)
    streamed = train(streaming_diloco(4, fragments=1, delay=2, alpha=0.25))
    assert_same(streamed, train(delayed(sent, 2, alpha=0.25)))


@pytest.mark.parametrize(
    "strategy", [sync_sgd(), model_averaging(4), bmuf(4), chain(diloco(3), sync_sgd())]
)
def test_bytes_are_counted_at_the_step_that_sends(strategy):
    params = unflatten(START)
    at_once = communication(strategy, params, workers=4, steps=12)
    late = communication(delayed(strategy, 2), params, workers=4, steps=12)
    assert at_once.bytes_per_worker > 0
    assert late.calls == at_once.calls
    np.testing.assert_array_equal(late.per_step, at_once.per_step)


def test_a_result_replaces_a_model_that_is_not_finite():
    strategy = delayed(every(average(reduce="median", axis="workers"), 2), 1)

    def follow(x):
        replica = syncalgos.Replica({"w": x})
        state = strategy.init(replica.params)
        for step in range(3):
            replica, state = strategy.sync(replica, state, jnp.int32(step))
        return replica.params["w"]

    ends = jax.vmap(follow, axis_name="workers")(jnp.array([np.nan, 1.0, 1.0]))
    np.testing.assert_array_equal(ends, 1.0)


def test_delayed_bfloat16_keeps_its_dtype_and_mixes_in_float32():
    """Half of the mean of the models after step 2 arrives at step 4."""
    # A program that differs more than in alpha may round local steps differently.
    trained, plain = (
        train(delayed(model_averaging(3), 2, alpha=alpha), dtype=jnp.bfloat16, steps=5)
        for alpha in (0.5, 1.0)
    )
    leaves = jax.tree.leaves(trained.replica.params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    after = flatten(plain.replica.params, lead=2)  # (steps, workers, SIZE)
    mean = jnp.mean(jnp.asarray(after[2]), axis=0)  # sums in float32, then rounds
    mixed = 0.5 * np.float32(mean) + 0.5 * np.float32(after[4])
    actual = flatten(trained.replica.params, lead=2)[4]
    # A mean summed in another order may round the other way, half of the last bit.
    np.testing.assert_allclose(np.float32(actual), mixed, rtol=2**-7, atol=2**-9)
    assert relative_error(np.float32(after[4]), mixed) > 0.1  # it has moved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: delayed(bmuf, 1), r"delayed: expected a Strategy.*bmuf\(\)"),
        (lambda: delayed(bmuf(), -1), "delayed: delay must be .* at least 0, got -1"),
        (lambda: delayed(bmuf(), 1.5), "delayed: delay must be a whole number"),
        (
            lambda: delayed(bmuf(), 1, alpha=1.5),
            "delayed: alpha must be at most 1, got 1.5",
        ),
        (
            lambda: delayed(bmuf(), 1, alpha=-0.1),
            "delayed: alpha must be .* at least 0",
        ),
        (
            lambda: delayed(bmuf(), 0, alpha=2.0),
            "delayed: alpha must be at most 1, got 2.0",
        ),
        (
            lambda: delayed(bmuf(), 1, arrival="ad"),
            "unknown arrival of delayed 'ad'",
        ),
        (lambda: delayed(delayed(bmuf(), 1), 2), "delayed already: add up the"),
        (lambda: delayed(streaming_diloco(delay=1), 2), "delayed already"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
