"""Local steps that a strategy changes: what rests, and combinators around it."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error, train
from recurrences import LR, MOMENTUM, START, STEPS, TARGET, X, palsgd

import syncalgos as sa
from syncalgos.combinators import introspection

pytestmark = pytest.mark.usefixtures("float64")

ROUNDING = 1e-12
OPTIMIZER = optax.sgd(LR, momentum=MOMENTUM)


def test_the_optimizers_state_rests_at_pulls():
    settings = {"period": 4, "learning_rate": LR, "chance": 0.4}
    zeros = [np.zeros_like(START) for _ in range(3)]
    *_, (center, theta) = palsgd.recurrence(3, momentum=zeros, **settings)
    resting, going_on = (
        train(
            sa.palsgd(**settings, optimizer=optimizer),
            OPTIMIZER,
            3,
            at=(STEPS,),
            batches=(X, TARGET),
        )
        for optimizer in (OPTIMIZER, None)
    )
    assert relative_error(resting.centers[0], center) <= ROUNDING
    assert relative_error(resting.replicas[0], np.array(theta)) <= ROUNDING
    assert relative_error(going_on.centers[0], center) > 1e-3


def test_the_sync_at_the_end_and_a_delay_belong_to_the_strategy_inside():
    plain = sa.palsgd(4, learning_rate=LR)
    ended, late = sa.at_end(plain, 6), sa.delayed(plain, 2)
    landed = {
        made: [step for step in range(8) if introspection.lands(made, jnp.int32(step))]
        for made in (plain, ended, late)
    }
    assert [*landed.values()] == [[3, 7], [3, 5, 7], [5]]
