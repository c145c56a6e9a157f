"""The rate that a strategy was told, through combinators, and lawful optimizers.

The refusals are in `test_engine_errors`.
"""

import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos._engine import inner_fit

WITH_LEARNING_RATE = [
    x for x, f in sa.ALGORITHMS.items() if "learning_rate" in f.__annotations__
]
AROUND = {
    "after": lambda x: sa.after(x, 2),
    "at_end": lambda x: sa.at_end(x, 9),
    "at_syncs": lambda x: sa.at_syncs(x, sa.average("opt_state")),
    "chain": lambda x: sa.chain(sa.sync_sgd(), x),
    "decided": lambda x: sa.decided(x, lambda replica, state, step: step > 2),
    "delayed": lambda x: sa.delayed(x, 1),
    "ema": lambda x: sa.ema(x, 0.5),
    "every": lambda x: sa.every(x, 2),
    "masked": lambda x: sa.masked(x, True),
    "paced": lambda x: sa.paced(x, (1, 1)),
    "participating": lambda x: sa.participating(x, sa.sampled(0.5)),
    "until": lambda x: sa.until(x, 2),
    "when": lambda x: sa.when(x, lambda step: step > 2),
}


@pytest.mark.parametrize("name", WITH_LEARNING_RATE)
def test_an_algorithm_declares_the_rate_that_it_takes(name):
    options = {"sign": True} if name == "demo" else {}
    strategy = sa.ALGORITHMS[name](learning_rate=0.25, **options)
    assert {x.learning_rate for x in inner_fit.list_strategies_with_rate(strategy)} == {
        0.25
    }
    assert strategy.own_steps == (name == "zero_one_adam")


@pytest.mark.parametrize("name", AROUND)
def test_a_combinator_passes_the_rate_on(name):
    inside = sa.slowmo(4, learning_rate=0.25)
    assert {
        x.learning_rate
        for x in inner_fit.list_strategies_with_rate(AROUND[name](inside))
    } == {0.25}


@pytest.mark.parametrize("warmup", [0, 5])
def test_sgd_at_the_rate_of_own_steps_is_lawful(warmup):
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup, 20)
    of_rates = optax.inject_hyperparams(optax.sgd)(rate)
    for inner_optimizer in (
        optax.sgd(rate),
        of_rates,
        optax.chain(optax.identity(), optax.sgd(rate)),
    ):
        inner_fit.check_rate(
            "inner",
            inner_optimizer,
            sa.zero_one_adam(learning_rate=rate),
            {"w": np.ones((3, 4))},
        )


def test_a_rate_is_compared_with_that_of_plain_sgd_alone():
    """Anything else that an optimizer does to gradients may be meant."""
    for inner_optimizer in (
        optax.sgd(0.05),
        optax.sgd(0.2, momentum=0.9),
        optax.adam(0.2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2)),
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.2)),
        optax.sgd(0.0),
    ):
        strategy = sa.slowmo(4, learning_rate=0.05)
        inner_fit.check_rate("inner", inner_optimizer, strategy, {"w": np.ones((3, 4))})
