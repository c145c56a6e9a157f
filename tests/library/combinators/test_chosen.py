"""Messages as long as the data ask for: what arrives, what is sent, what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems.linear import BATCHES, make_params, plain_loss

import syncalgos as sa
from syncalgos.combinators.chosen import mean_of_chosen, undecided
from syncalgos.engine.placement.make_layout import BACKENDS
from syncalgos.jaxprs import equations

WORKERS, SIZE, UNIT = 3, 3000, 3  # three entries are a 1024th, rounded up
STEPS = len(BATCHES["x"])


def exchange(x, chosen):
    """One worker's mean, and whether each decision was to act."""
    mean, decisions = mean_of_chosen(x, chosen, undecided(SIZE), 0, "ring")
    return mean, jnp.stack([decision.at == 0 for decision in decisions])


EXCHANGE = jax.vmap(exchange, axis_name="ring")


@pytest.mark.parametrize(
    ("counts", "units"),
    [
        ((0, 0, 0), 0),
        ((0, 1, 0), 1),
        ((3, 2, 3), 1),
        ((3, 4, 0), 2),
        ((100, 200, 300), 100),
        ((1000, 0, 0), 334),  # 1,002 values and indices are sent
        ((0, 0, 1332), 444),  # 2 · 1,332 · 6 bytes are less than 4/3 · 3,000 · 4,
        ((0, 0, 1333), None),  # 2 · 1,335 · 6 bytes are more
        ((3000, 3000, 0), None),
    ],
)
def test_messages_are_as_long_as_the_fullest_and_carry_all_that_is_chosen(
    counts, units
):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(WORKERS, SIZE)).astype(np.float32)
    chosen = np.zeros((WORKERS, SIZE), bool)
    for row, count in zip(chosen, counts, strict=True):
        row[rng.choice(SIZE, count, replace=False)] = True
    means, decided = jax.jit(EXCHANGE)(x, chosen)
    expected = np.where(chosen, x, 0).mean(0)
    np.testing.assert_allclose(means, np.tile(expected, (WORKERS, 1)), atol=1e-6)
    whole, *digits = np.asarray(decided)[0]
    assert (np.asarray(decided) == decided[0]).all()
    assert whole == (units is None)
    assert sum(2**i for i, digit in enumerate(digits) if digit) == (units or 0)


def test_a_message_that_is_not_asked_for_stays_a_branch_in_lanes():
    """Under vmap a branch on what differs between lanes would compute both arms."""
    args = jnp.zeros((WORKERS, SIZE)), jnp.zeros((WORKERS, SIZE), bool)
    jaxpr = jax.make_jaxpr(EXCHANGE)(*args)
    branches = [x for x in equations(jaxpr.jaxpr) if x.primitive.name == "cond"]
    assert len(branches) == len(undecided(SIZE))


@pytest.mark.slow
def test_all_backends_send_the_same_and_it_is_counted():
    """A unit is one of seven entries, and a value has an index of 16 bits."""
    # So slow that bfloat16 shows few of the moves.
    strategy, optimizer, told = sa.pulseloco(2), optax.sgd(1e-4), []
    for backend in BACKENDS:
        trainer = sa.DataParallel(
            plain_loss, optimizer, strategy, workers=4, backend=backend
        )
        _, metrics = trainer.run(trainer.init(make_params()), BATCHES)
        told.append(np.asarray(metrics["decided"]))
        np.testing.assert_array_equal(told[-1], told[0])
    sent = sa.communication(
        strategy, make_params(), workers=4, steps=STEPS, taken=told[0]
    )
    whole, units = told[0][:, 0], told[0][:, 1:] @ [1, 2, 4]
    assert 0 < whole.sum() < STEPS / 2 and units.any()  # the data have a say
    counts = np.arange(STEPS) % 2 == 1
    expected = 3 * (4 * counts + 6 * units) + 2 * 3 / 4 * 28 * whole
    np.testing.assert_allclose(np.diff(sent.per_step, prepend=0), expected)
