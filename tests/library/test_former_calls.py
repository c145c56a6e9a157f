"""Calls in the form of 0.2 work, with one warning that shows the new call."""

import inspect
import pickle
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems.quadratics import assert_same, train

import syncalgos as sa
from experiments.training.config import RunConfig, parse

PARAMS = np.zeros(8, np.float32)


def loss(params, batch):
    return jnp.mean((params - batch) ** 2)


def warned(call):
    """The result of a call that warns once, from this file, and what it warns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = call()
    [warning] = found
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    return made, str(warning.message)


CALLS = {
    "bmuf(4, block_momentum=0.5, nesterov=True)": lambda: sa.bmuf(
        4, 0.5, nesterov=True
    ),
    "fedopt(4, method='yogi', b1=0.5)": lambda: sa.fedopt(4, "yogi", beta1=0.5),
    "post_local_sgd(dense_steps=8, period=4)": lambda: sa.post_local_sgd(8, 4),
    "post_local_sgd(period=4, dense_steps=8)": lambda: sa.post_local_sgd(
        period=4, switch=8
    ),
    "dgc(dense_steps=3)": lambda: sa.dgc(warmup=3),
    "sync_sgd(reduce='int8')": lambda: sa.sync_sgd("int8"),
    "average('buffers', reduce, axis=axis)": lambda: sa.average(
        "buffers", sa.reducers.mean, sa.WORKERS
    ),
    "every(strategy, 4, offset=1)": lambda: sa.every(4, sa.average(), 1),
    "when(strategy, active)": lambda: sa.when(lambda step: step == 3, sa.average()),
    "until(strategy, 4)": lambda: sa.until(4, sa.average()),
    "after(strategy, 4)": lambda: sa.after(4, sa.average()),
    "at_end(strategy, 7)": lambda: sa.at_end(7, sa.bmuf(4)),
    "decided(strategy, vote)": lambda: sa.decided(
        lambda replica, state, step: step == 3, sa.average()
    ),
    "delayed(strategy, 2, alpha=0.5)": lambda: sa.delayed(sa.bmuf(4), 2, 0.5),
    "masked(strategy, True)": lambda: sa.masked(sa.bmuf(4), True, sa.WORKERS),
    "ema(strategy, 0.5)": lambda: sa.ema(sa.bmuf(4), 0.5, axis=sa.WORKERS),
    "paced(strategy, local_steps)": lambda: sa.paced(
        sa.bmuf(4), [2, 2], axis=sa.WORKERS
    ),
    "participating(strategy, schedule, stale=True)": lambda: sa.participating(
        sa.bmuf(4), sa.sampled(1.0), True
    ),
}


@pytest.mark.parametrize("shown", CALLS)
def test_a_former_call_shows_the_new_one(shown):
    made, message = warned(CALLS[shown])
    assert isinstance(made, sa.Strategy)
    assert message.endswith(
        f" is called as in syncalgos 0.2; this stops working in 0.4: write {shown}"
    )


def test_former_and_new_calls_are_the_same():
    pairs = [
        (
            lambda: sa.bmuf(4, 0.5, 0.8, True),
            sa.bmuf(4, block_momentum=0.5, block_lr=0.8, nesterov=True),
        ),
        (lambda: sa.every(4, sa.average(), 1), sa.every(sa.average(), 4, offset=1)),
        (lambda: sa.post_local_sgd(6, 4), sa.post_local_sgd(dense_steps=6, period=4)),
    ]
    for former, new in pairs:
        assert_same(train(warned(former)[0], workers=2), train(new, workers=2))


def test_an_axis_that_a_combinator_was_given_is_declared_by_its_strategy():
    own = sa.Strategy(sync=sa.average(axis="batch").sync)
    made, _ = warned(lambda: sa.masked(own, True, axis="batch"))
    assert made.axis == "batch"


def test_a_trainer_of_former_arguments_is_the_same():
    strategy = sa.bmuf(2)
    former, message = warned(
        lambda: sa.DataParallel(
            sa.stateless(loss), optax.sgd(0.1), strategy, 4, "vmap", [0], lanes=4
        )
    )
    placement = sa.Placement(devices=[0], lanes=4)
    new = sa.DataParallel(
        loss, optax.sgd(0.1), strategy, workers=4, backend="vmap", placement=placement
    )
    assert "workers=4, backend='vmap', placement=Placement(devices=devices, " in message
    batches = np.arange(24, dtype=np.float32).reshape(3, 8)
    seen = [t.run(t.init(jnp.zeros(())), batches)[1]["loss"] for t in (former, new)]
    np.testing.assert_array_equal(*seen)
    sent = new.communication(new.init(PARAMS), 4, workers=2)
    asked = warned(lambda: new.communication(new.init(PARAMS), 4, 2))[0]
    assert asked.bytes_per_worker == sent.bytes_per_worker


def test_former_tables_and_communication():
    made, message = warned(
        lambda: sa.DataParallel(
            loss, optax.sgd(0.1), sa.sync_sgd(), workers=2, sharded=lambda p: False
        )
    )
    assert "tables=tables" in message
    assert made.workers == 2
    sent, message = warned(lambda: sa.communication(sa.bmuf(4), PARAMS, 2, 8))
    assert message.endswith("communication(strategy, replica, workers=2, steps=8)")
    assert sent.syncs == 2
    optimizer, _ = warned(lambda: sa.as_optimizer(sa.bmuf(2), optax.sgd(1.0), "a"))
    assert optimizer.init(jnp.ones(2))


def test_a_mean_is_a_reducer():
    found, _ = warned(lambda: sa.mean)  # pyright: ignore[reportAttributeAccessIssue]
    assert found is sa.reducers.mean


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sa.bmuf(4, block=3), "block"),
        (lambda: sa.bmuf(*range(9)), "positional"),
        (lambda: sa.bmuf(4, 0.5, block_momentum=0.5), "positional"),
        (lambda: sa.every(sa.bmuf(4)), "period"),
        (lambda: sa.slowmo(4), "learning_rate"),
        (
            lambda: sa.DataParallel(
                loss, optax.sgd(1.0), sa.bmuf(), lanes=4, placement=sa.Placement()
            ),
            "lanes",
        ),
    ],
)
def test_wrong_arguments_are_pythons_own_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_all_but_the_period_is_keyword_only(name):
    factory = sa.ALGORITHMS[name]
    assert factory is getattr(sa, name)
    assert pickle.loads(pickle.dumps(factory)) is factory
    for p in inspect.signature(factory).parameters.values():
        assert p.kind is p.KEYWORD_ONLY or p.name == "period"


def test_former_flags_and_arguments_go_on():
    for words, arguments in (
        ("post_local_sgd --switch 7", {"switch": 7}),
        ("dgc --warmup 7", {"warmup": 7}),
        ("dgc --dense-steps 7", {"dense_steps": 7}),
    ):
        config = parse(["--algo", *words.split()])
        assert config.arguments["dense_steps"] == 7
        given = RunConfig(algo=config.algo, arguments=arguments).arguments
        assert given == {"dense_steps": 7}
    assert parse(["--algo", "fedopt", "--beta1", "0.5"]).arguments["beta1"] == 0.5
    assert RunConfig(algo="fedopt", arguments={"b1": 0.5}).arguments == {"beta1": 0.5}
