"""Every algorithm in a loop of one's own, over an axis of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from owed import PERIOD, make, owed
from problems.linear import make_params, plain_loss

import syncalgos
from syncalgos import Replica

WORKERS, STEPS = 3, 2 * PERIOD
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, WORKERS * 4, 6)).astype(np.float32)
BATCHES = {"x": X, "y": np.sin(X.sum(-1, keepdims=True))}


def of_workers():
    """Each worker's batches, (workers, steps, batch, …)."""
    return jax.tree.map(
        lambda x: x.reshape(STEPS, WORKERS, 4, -1).swapaxes(0, 1), BATCHES
    )


def own_loop(strategy, optimizer):
    """One worker's training from its batches, (steps, batch, …), to the center."""

    def train(batches):
        replica = Replica(make_params(), optimizer.init(make_params()))
        replica, state = jax.tree.map(
            jnp.asarray, (replica, strategy.init(replica.params))
        )

        def local_step(carry, batch):
            replica, state, step = carry
            grads = jax.grad(plain_loss)(replica.params, batch)
            grads, state = strategy.reduce(grads, replica, state, step)
            updates, opt_state = optimizer.update(
                grads, replica.opt_state, replica.params
            )
            params = optax.apply_updates(replica.params, updates)
            stepped = Replica(params, opt_state)
            replica, state = strategy.sync(stepped, state, step)
            return (replica, state, step + 1), None

        carry = (replica, state, jnp.int32(0))
        (replica, state, _), _ = jax.lax.scan(local_step, carry, batches)
        return strategy.center(replica.params, state)

    return train


def shard_mapped(loop, axis_name, check_vma=False):
    """`loop` over the devices, as jax.vmap maps it."""
    mesh = jax.make_mesh((WORKERS,), (axis_name,), axis_types=(AxisType.Auto,))

    def on_one(batches):
        center = loop(jax.tree.map(lambda x: x[0], batches))
        return jax.tree.map(lambda x: x[None], center)

    spec = PartitionSpec(axis_name)
    mapped = jax.shard_map(
        on_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped)


@pytest.mark.sample(5, slow=45)
@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap, shard_mapped])
@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_own_loop_trains_as_the_engine_does(name, mapped):
    optimizer = owed(name).optimizer
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(plain_loss), optimizer, make(name), WORKERS, devices=[0]
    )
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    expected = trainer.center(state).params

    loop = own_loop(make(name, axis="batch"), optimizer)
    center = mapped(loop, axis_name="batch")(of_workers())
    mean = jax.tree.map(lambda x: np.mean(x, axis=0), center)
    for ours, theirs in zip(*map(jax.tree.leaves, (mean, expected)), strict=True):
        # Float32 after 8 steps, summed in another order.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(6, slow=40)
@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_a_checked_shard_map_is_refused_in_one_line(name):
    """With it on, gradients of what all devices share are summed over them."""
    loop = own_loop(make(name, axis="batch"), owed(name).optimizer)
    with pytest.raises(ValueError, match=r"^give jax\.shard_map check_vma=False: "):
        shard_mapped(loop, "batch", check_vma=True)(of_workers())


@pytest.mark.sample(6, slow=40)
@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_a_strategy_of_another_axis_is_told_to_name_it(name):
    loop = own_loop(make(name), owed(name).optimizer)
    with pytest.raises(NameError, match="make the strategy with axis='NAME'"):
        jax.vmap(loop, axis_name="batch")(of_workers())
