"""Random keys in an optimizer's state: each worker's own unless steps are equal."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa

WORKERS = 16
STEPS = 2
SIZE = 3000
BATCHES = np.ones((STEPS, WORKERS), np.float32)


class Rounding(NamedTuple):
    """State of an optimizer of one's own, with a key of either form."""

    rng_key: jax.Array


def drawing(key):
    """Moves params by noise alone, anew at each step."""

    def update(grads, state, params=None):
        step_key, later = jax.random.split(state.rng_key)
        noise = jax.tree.map(
            lambda g: jax.random.normal(step_key, g.shape, g.dtype), grads
        )
        return noise, Rounding(later)

    return optax.GradientTransformation(lambda params: Rounding(key), update)


NOISY = optax.noisy_sgd(1.0, eta=1.0, gamma=0.0, key=jax.random.key(0))
RAW = drawing(jax.random.PRNGKey(0))
NESTED = optax.MultiSteps(optax.masked(NOISY, True), 1)
RESTARTED = sa.every(sa.chain(sa.average(), sa.reset(RAW)), 1)


def make_trainer(strategy, optimizer, **options):
    def loss(params, batch):
        return 0.0 * (params.sum() + batch.sum())

    return sa.DataParallel(loss, optimizer, strategy, workers=WORKERS, **options)


def trained(trainer, state=None):
    state = trainer.init(jnp.zeros(SIZE)) if state is None else state
    return trainer.run(state, BATCHES)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer", "is_own"),
    [
        (sa.model_averaging(STEPS), NOISY, True),
        (sa.gossip(topology="complete"), NESTED, True),
        (sa.scaffold(STEPS, learning_rate=1.0), drawing(jax.random.key(0)), True),
        (RESTARTED, RAW, True),
        (sa.sync_sgd(), RAW, False),
        (sa.powersgd(), NESTED, False),
    ],
)
def test_noise_of_workers_averages_out_unless_their_steps_are_equal(
    strategy, optimizer, is_own
):
    trainer = make_trainer(strategy, optimizer)
    state = trained(trainer)
    noise = float(np.std(trainer.center(state).params))
    # 4 standard deviations of a deviation that 3,000 draws estimate.
    expected = (STEPS / (WORKERS if is_own else 1)) ** 0.5
    assert noise == pytest.approx(expected, rel=4 / (2 * SIZE) ** 0.5)
    if not is_own:
        assert trainer.divergence(state) == 0


@pytest.mark.slow
def test_keys_are_the_same_in_all_layouts_and_after_a_restart():
    first_trainer, other = (
        make_trainer(sa.model_averaging(3), NOISY, **layout)
        for layout in (
            {"backend": "vmap"},
            {"backend": "shard_map", "placement": sa.Placement(lanes=8)},
        )
    )
    state = trained(first_trainer)
    host_state = first_trainer.to_host(state)
    expected = first_trainer.center(trained(first_trainer, state)).params
    for state in (
        trained(other, trained(other)),
        trained(other, other.from_host(host_state)),
    ):
        params = other.center(state).params
        np.testing.assert_allclose(params, expected, atol=1e-6)  # sums in another order
