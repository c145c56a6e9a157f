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

FIRST_NUMBERS = {"lr": 0.1, "mu": 0.5}
SECOND_NUMBERS = {"lr": 0.03, "mu": 0.8}


def sgd(numbers):
    return optax.sgd(numbers["lr"], momentum=0.9)


def bmuf(numbers):
    return sa.bmuf(2, block_momentum=numbers["mu"])


def make_trainer(
    optimizer=sgd, strategy=bmuf, numbers=FIRST_NUMBERS, loss=plain_loss, **options
):
    return sa.DataParallel(
        loss, optimizer, strategy, workers=4, hyperparams=numbers, **options
    )


def constant(numbers, **options):
    return sa.DataParallel(
        plain_loss, sgd(numbers), bmuf(numbers), workers=4, **options
    )


def results(trainer, state):
    """The center, and the metrics of training and evaluation."""
    state, metrics = trainer.run(state, BATCHES)
    center_and_metrics = (
        trainer.center(state).params,
        metrics,
        trainer.evaluate(state, BATCHES),
    )
    return jax.tree.map(np.asarray, center_and_metrics)


# Constants are folded in double precision, data is not.
assert_close = partial(trees.assert_close, rtol=1e-5, atol=1e-6)


def test_another_record_compiles_nothing_and_trains_as_a_constant_does():
    trainer = make_trainer()
    constant_trainer = constant(SECOND_NUMBERS)
    results(trainer, trainer.init(make_params(), hyperparams=FIRST_NUMBERS))
    seconds = trainer.compile_seconds
    traced_results = results(
        trainer, trainer.init(make_params(), hyperparams=SECOND_NUMBERS)
    )
    assert trainer.compile_seconds == seconds
    assert_close(
        traced_results, results(constant_trainer, constant_trainer.init(make_params()))
    )


@pytest.mark.parametrize("form", tiers(["sequential", "merged"], slow=["sequential"]))
def test_every_lane_form_takes_them(form):
    strategy = bmuf if form == "sequential" else lambda numbers: sa.sync_sgd()
    where = sa.Placement(devices=[0], lane_form=form)
    trainer = make_trainer(strategy=strategy, placement=where)
    traced_results = results(
        trainer, trainer.init(make_params(), hyperparams=SECOND_NUMBERS)
    )
    constant_trainer = sa.DataParallel(
        plain_loss,
        sgd(SECOND_NUMBERS),
        strategy(SECOND_NUMBERS),
        workers=4,
        placement=where,
    )
    assert (
        trainer.lane_form == constant_trainer.lane_form
        or constant_trainer.lane_form is None
    )
    assert_close(
        traced_results, results(constant_trainer, constant_trainer.init(make_params()))
    )


def test_a_state_from_the_host_has_its_own_and_compiles_nothing():
    trainer = make_trainer()
    state, _ = trainer.run(
        trainer.init(make_params(), hyperparams=SECOND_NUMBERS), BATCHES
    )
    host_state = trainer.to_host(state)
    assert host_state.hyperparams["lr"] == np.float32(0.03)
    state, _ = trainer.run(state, BATCHES)
    seconds = trainer.compile_seconds
    again, _ = trainer.run(trainer.from_host(host_state), BATCHES)
    assert trainer.compile_seconds == seconds
    trees.assert_equal(trainer.to_host(again).replica, trainer.to_host(state).replica)


@pytest.mark.slow
def test_others_may_take_their_place_in_the_middle():
    trainer = make_trainer()
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    seconds = trainer.compile_seconds
    _, metrics = trainer.run(state._replace(hyperparams=SECOND_NUMBERS), BATCHES)
    assert trainer.compile_seconds == seconds
    first_trainer = constant(FIRST_NUMBERS)
    second = constant(SECOND_NUMBERS)
    half, _ = first_trainer.run(first_trainer.init(make_params()), BATCHES)
    expected = second.run(second.from_host(first_trainer.to_host(half)), BATCHES)[1]
    assert_close(metrics["loss"], expected["loss"])


@pytest.mark.slow
def test_what_is_common_at_one_number_may_not_be_at_another():
    """`delayed` mixes nothing in if alpha is 0, which then leaves all lanes alike."""
    ends = []
    for alpha in (0.0, 0.5):
        trainer = make_trainer(
            strategy=lambda numbers: sa.delayed(sa.average(), 0, alpha=numbers["a"]),
            **{"optimizer": optax.sgd(0.1), "numbers": {"a": alpha}},
        )
        state = trainer.init(make_params(), hyperparams={"a": 0.5})
        state, _ = trainer.run(state, BATCHES)
        ends.append(trainer.center(trainer.run(state, BATCHES)[0]).params)
    assert_close(*ends)


def test_bfloat16_params_keep_their_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
    trainer = make_trainer(optimizer=lambda numbers: optax.adam(numbers["lr"]))
    state, _ = trainer.run(trainer.init(params, hyperparams=FIRST_NUMBERS), BATCHES)
    assert {x.dtype for x in jax.tree.leaves(state.replica.params)} == {
        params["w"].dtype
    }


@pytest.mark.slow
def test_rounds_that_follow_the_learning_rate_are_counted_at_each():
    def qsr(numbers):
        return sa.qsr(2, growth=0.2, learning_rate=numbers["lr"])

    trainer = make_trainer(strategy=qsr, numbers={"lr": 0.1})
    for lr in (0.1, 0.05):
        state = trainer.init(make_params(), hyperparams={"lr": lr})
        traffic = trainer.communication(state, 32)
        alone = sa.communication(qsr({"lr": lr}), make_params(), workers=4, steps=32)
        assert traffic.syncs == 32 * lr**2 / 0.2**2
        np.testing.assert_array_equal(traffic.per_step, alone.per_step)


@pytest.mark.slow
def test_workers_that_are_meshes_take_them():
    trainer = make_trainer(placement=sa.Placement(mesh={"fsdp": 2}, lanes=4))
    traced_results = results(
        trainer, trainer.init(make_params(), hyperparams=SECOND_NUMBERS)
    )
    constant_trainer = constant(SECOND_NUMBERS)
    assert_close(
        traced_results, results(constant_trainer, constant_trainer.init(make_params()))
    )
