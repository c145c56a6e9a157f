"""Hyperparameters as data: one program for all values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.problems.linear import BATCHES, make_params, plain_loss
from support.tiers import tiers

import syncalgos as sa

FIRST = {"lr": 0.1, "mu": 0.5}
SECOND = {"lr": 0.03, "mu": 0.8}


def sgd(numbers):
    return optax.sgd(numbers["lr"], momentum=0.9)


def bmuf(numbers):
    return sa.bmuf(2, block_momentum=numbers["mu"])


def trainer_of(optimizer=sgd, strategy=bmuf, numbers=FIRST, loss=plain_loss, **rest):
    return sa.DataParallel(
        loss, optimizer, strategy, workers=4, hyperparams=numbers, **rest
    )


def constant(numbers, **rest):
    return sa.DataParallel(plain_loss, sgd(numbers), bmuf(numbers), workers=4, **rest)


def results(trainer, state):
    """The center, and the metrics of training and evaluation."""
    state, metrics = trainer.run(state, BATCHES)
    found = trainer.center(state).params, metrics, trainer.evaluate(state, BATCHES)
    return jax.tree.map(np.asarray, found)


# Constants are folded in double precision, data is not.
assert_close = partial(trees.assert_close, rtol=1e-5, atol=1e-6)


def test_another_record_compiles_nothing_and_trains_as_a_constant_does():
    trainer = trainer_of()
    own = constant(SECOND)
    results(trainer, trainer.init(make_params(), hyperparams=FIRST))
    before = trainer.compile_seconds
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    assert trainer.compile_seconds == before
    assert_close(found, results(own, own.init(make_params())))


@pytest.mark.parametrize("form", tiers(["sequential", "merged"], slow=["sequential"]))
def test_every_lane_form_takes_them(form):
    strategy = bmuf if form == "sequential" else lambda numbers: sa.sync_sgd()
    where = sa.Placement(devices=[0], lane_form=form)
    trainer = trainer_of(strategy=strategy, placement=where)
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    own = sa.DataParallel(
        plain_loss, sgd(SECOND), strategy(SECOND), workers=4, placement=where
    )
    assert trainer.lane_form == own.lane_form or own.lane_form is None
    assert_close(found, results(own, own.init(make_params())))


def test_a_state_from_the_host_has_its_own_and_compiles_nothing():
    trainer = trainer_of()
    state, _ = trainer.run(trainer.init(make_params(), hyperparams=SECOND), BATCHES)
    held = trainer.to_host(state)
    assert held.hyperparams["lr"] == np.float32(0.03)
    state, _ = trainer.run(state, BATCHES)
    before = trainer.compile_seconds
    again, _ = trainer.run(trainer.from_host(held), BATCHES)
    assert trainer.compile_seconds == before
    trees.assert_equal(trainer.to_host(again).replica, trainer.to_host(state).replica)


@pytest.mark.slow
def test_others_may_take_their_place_in_the_middle():
    trainer = trainer_of()
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    before = trainer.compile_seconds
    _, metrics = trainer.run(state._replace(hyperparams=SECOND), BATCHES)
    assert trainer.compile_seconds == before
    first = constant(FIRST)
    second = constant(SECOND)
    half, _ = first.run(first.init(make_params()), BATCHES)
    expected = second.run(second.from_host(first.to_host(half)), BATCHES)[1]
    assert_close(metrics["loss"], expected["loss"])


@pytest.mark.slow
def test_what_is_common_at_one_number_may_not_be_at_another():
    """`delayed` mixes nothing in if alpha is 0, which then leaves all lanes alike."""
    ends = []
    for own in (0.0, 0.5):
        trainer = trainer_of(
            strategy=lambda numbers: sa.delayed(sa.average(), 0, alpha=numbers["a"]),
            **{"optimizer": optax.sgd(0.1), "numbers": {"a": own}},
        )
        state = trainer.init(make_params(), hyperparams={"a": 0.5})
        state, _ = trainer.run(state, BATCHES)
        ends.append(trainer.center(trainer.run(state, BATCHES)[0]).params)
    assert_close(*ends)


def test_bfloat16_params_keep_their_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
    trainer = trainer_of(optimizer=lambda numbers: optax.adam(numbers["lr"]))
    state, _ = trainer.run(trainer.init(params, hyperparams=FIRST), BATCHES)
    assert {x.dtype for x in jax.tree.leaves(state.replica.params)} == {
        params["w"].dtype
    }


@pytest.mark.slow
def test_rounds_that_follow_the_learning_rate_are_counted_at_each():
    def qsr(numbers):
        return sa.qsr(2, growth=0.2, learning_rate=numbers["lr"])

    trainer = trainer_of(strategy=qsr, numbers={"lr": 0.1})
    for lr in (0.1, 0.05):
        state = trainer.init(make_params(), hyperparams={"lr": lr})
        sent = trainer.communication(state, 32)
        alone = sa.communication(qsr({"lr": lr}), make_params(), workers=4, steps=32)
        assert sent.syncs == 32 * lr**2 / 0.2**2
        np.testing.assert_array_equal(sent.per_step, alone.per_step)


@pytest.mark.slow
def test_workers_that_are_meshes_take_them():
    trainer = trainer_of(placement=sa.Placement(mesh={"fsdp": 2}, lanes=4))
    found = results(trainer, trainer.init(make_params(), hyperparams=SECOND))
    own = constant(SECOND)
    assert_close(found, results(own, own.init(make_params())))
