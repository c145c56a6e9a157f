"""Results that arrive late: what they keep of training, and when they are counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import relative_error
from support.problems.quadratics import (
    LR,
    START,
    assert_same,
    flatten,
    train,
    unflatten,
)

import syncalgos as sa
from syncalgos import delayed, model_averaging

pytestmark = pytest.mark.usefixtures("float64")


# On both sides of the bound, 0.38.
@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "agree"), [(0.36, False), (0.41, True)])
def test_replicas_agree_below_the_bound_on_added_results(alpha, agree):
    """They part in the first round, in which gradients differ; 0 is all that follow."""
    strategy = delayed(model_averaging(4), 12, alpha=alpha, arrival="add")
    loss = sa.stateless(lambda params, batch: jnp.sum(params * batch))
    trainer = sa.DataParallel(loss, optax.sgd(LR), strategy, workers=4, backend="vmap")
    batches = np.arange(4.0) * (np.arange(2000) < 4)[:, None]
    state, _ = trainer.run(trainer.init(jnp.zeros(())), batches)
    assert (trainer.divergence(state) < 1e-3) == agree


def test_bytes_are_counted_at_the_step_that_sends():
    """Counts those of gradients, and of models."""
    strategy = sa.chain(sa.diloco(3), sa.sync_sgd())
    counts = sa.communication(strategy, unflatten(START), workers=4, steps=12)
    late_counts = sa.communication(
        delayed(strategy, 2), unflatten(START), workers=4, steps=12
    )
    assert len(set(np.diff(counts.per_step, prepend=0))) == 2
    assert late_counts.calls == counts.calls
    np.testing.assert_array_equal(late_counts.per_step, counts.per_step)


def test_a_delay_of_a_whole_long_round_is_refused():
    """However long the round is: each result would replace all local steps."""
    long_rounds = delayed(model_averaging(100_000), 100_000)
    with pytest.raises(ValueError, match="delayed"):
        long_rounds.init(unflatten(START))


def test_a_result_replaces_a_model_that_is_not_finite():
    strategy = delayed(sa.every(sa.average(reduce="median", axis="workers"), 2), 1)

    def follow(x: jax.Array) -> jax.Array:
        replica = sa.Replica({"w": x})
        state = strategy.init(replica.params)
        for step in range(3):
            replica, state = strategy.sync(replica, state, jnp.int32(step))
        return replica.params["w"]

    mapped = jax.jit(jax.vmap(follow, axis_name="workers"))
    np.testing.assert_array_equal(mapped(jnp.array([np.nan, 1.0, 1.0])), 1.0)


@pytest.mark.slow
def test_delayed_bfloat16_keeps_its_dtype_and_mixes_in_float32():
    """Half of the mean of the models after step 2 arrives at step 4."""
    # A program that differs more than in alpha may round local steps differently.
    trained, plain = (
        train(delayed(model_averaging(3), 2, alpha=alpha), dtype=jnp.bfloat16, steps=5)
        for alpha in (0.5, 1.0)
    )
    leaves = jax.tree.leaves(trained.replica.params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    plain_models = flatten(plain.replica.params, lead=2)  # (steps, workers, SIZE)
    mean = jnp.mean(
        jnp.asarray(plain_models[2]), axis=0
    )  # sums in float32, then rounds
    mixed = 0.5 * np.float32(mean) + 0.5 * np.float32(plain_models[4])
    actual = flatten(trained.replica.params, lead=2)[4]
    # A mean summed in another order may round the other way, half of the last bit.
    np.testing.assert_allclose(np.float32(actual), mixed, rtol=2**-7, atol=2**-9)
    assert relative_error(np.float32(plain_models[4]), mixed) > 0.1  # it has moved


def mix(replica: sa.Replica, state: Any, step: jax.Array) -> tuple[sa.Replica, Any]:
    """Keeps half of the worker's own params."""
    mean = sa.collectives.mean(replica.params)
    params = jax.tree.map(lambda x, m: (x + m) / 2, replica.params, mean)
    return replica._replace(params=params), state


EQUAL_STRATEGIES = {
    "mixed when it is sent": (
        delayed(delayed(model_averaging(4), 0, alpha=0.5), 2),
        delayed(sa.every(sa.Strategy(sync=mix), 4), 2),
    ),
    "a graph that takes turns": (
        sa.every(delayed(sa.gossip(), 0, alpha=0.5), 2),
        delayed(sa.every(sa.gossip(), 2), 0, alpha=0.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL_STRATEGIES)
def test_a_share_is_kept_at_once_inside_other_combinators(name):
    strategy, equal_strategy = EQUAL_STRATEGIES[name]
    assert_same(train(strategy), train(equal_strategy))
