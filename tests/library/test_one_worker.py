"""Tests of a strategy of one worker as an optimizer of optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import joint_strategies
from support.requirements import PERIOD, make, owed

import syncalgos

STEPS = 3 * PERIOD
PARAMS = {
    "matrix": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    "scalar": np.float32(0.5),
    "empty": np.zeros((0, 3), np.float32),
}


def loss(params, batch):
    """Least squares, of the batch's rows."""
    squares = (batch @ params["matrix"] - batch[:, :3] + params["scalar"]) ** 2
    return jnp.mean(squares) + jnp.sum(params["empty"])


def data(seed=0, steps=STEPS):
    return np.random.default_rng(seed).normal(size=(steps, 8, 4)).astype(np.float32)


def trained(optimizer, params, batches, loss=loss, mean=lambda grads: grads):
    """The params and the state after a loop of one's own."""

    def step(carry, batch):
        params, state = carry
        grads = mean(jax.grad(loss)(params, batch))
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0]

    return run(jax.tree.map(jnp.asarray, params))


# Rounds, a peer that is oneself, anchors, a server, votes.
FEW = "fedavg", "gossip", "zero_one_adam"
MORE = (
    "diloco",
    "async_diloco",
    "dynamic_averaging",
    "powersgd",
    "scaffold",
    "gpa",
    "easgd",
)


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.slow)])
def test_it_trains_as_the_engine_does_with_one_worker(names):
    inner = joint_strategies.optimizers({name: owed(name).optimizer for name in names})
    strategy = joint_strategies.strategies({name: make(name) for name in names})
    of_all = joint_strategies.loss_of_all(loss)
    start = dict.fromkeys(names, PARAMS)
    optimizer = optax.chain(optax.identity(), syncalgos.as_optimizer(strategy, inner))
    own, state = trained(optimizer, start, data(), of_all)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(of_all), inner, strategy, workers=1
    )
    theirs, _ = trainer.run(trainer.init(start), data())
    params = jax.tree.map(lambda x: np.asarray(x)[0, 0], theirs.replica.params)
    center = syncalgos.center_of(strategy, state, own)
    for name in names:
        mine = (own, center)
        others = (params, trainer.center(theirs).params)
        pairs = [jax.tree.leaves([x[name] for x in both]) for both in (mine, others)]
        for x, y in zip(*pairs, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)
    with pytest.raises(ValueError, match="exactly one as_optimizer, got 0"):
        syncalgos.center_of(strategy, inner.init(start), start)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_params_keep_their_dtypes(dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    optimizer = syncalgos.as_optimizer(syncalgos.bmuf(2), optax.adam(0.01))
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    for before, now in ((params, updates), (state, after)):
        kinds = [
            jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
            for tree in (before, now)
        ]
        assert kinds[0] == kinds[1]


def test_it_fits_into_chains_and_passes_the_loss_on():
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        syncalgos.as_optimizer(syncalgos.lookahead(3), inner),
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(4):
        _, state = update(params, state, params, value=jnp.float32(1))
    # A loss that does not fall cuts the rate.
    assert optax.tree.get(state, "scale") < 1


def test_between_syncs_the_outer_step_is_not_computed():
    optimizer = syncalgos.as_optimizer(syncalgos.diloco(4), optax.sgd(0.1))
    params = jax.tree.map(jnp.asarray, PARAMS)
    program = jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params)
    assert "cond[" in str(program)  # a select would compute both


@pytest.mark.parametrize("name", ["gpa", "ema_nesterov"])
def test_averages_of_bfloat16_params_are_those_of_float32(name):
    """Steps of 2^-6 are exact in bfloat16 below 2, the averages' moves are not."""
    told = {"learning_rate": 2.0**-6} if name == "ema_nesterov" else {}
    optimizer = syncalgos.as_optimizer(make(name, **told), optax.sgd(2.0**-6))

    def after(dtype):
        start = jnp.ones(3, dtype)
        batches = np.zeros(32)
        params, state = trained(optimizer, start, batches, lambda x, _: -x.sum())
        assert params.dtype == dtype
        return jax.tree.leaves(state.sync)

    for x, y in zip(after(jnp.bfloat16), after(jnp.float32), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_an_axis_of_ones_own():
    for axis in ("batch", ("hosts", "batch")):
        strategy = syncalgos.model_averaging(period=2, axis=axis)
        optimizer = syncalgos.as_optimizer(strategy, optax.sgd(0.1))
        own, _ = trained(optimizer, PARAMS, data())
        plain, _ = trained(optax.sgd(0.1), PARAMS, data())
        for key in own:
            np.testing.assert_allclose(own[key], plain[key], rtol=1e-5, atol=1e-6)


def test_under_a_data_parallel_loop_all_devices_agree():
    """Gradients are averaged by the loop; each device takes the outer step itself."""
    optimizer = syncalgos.as_optimizer(
        syncalgos.slowmo(4, learning_rate=0.05), optax.sgd(0.05)
    )
    batches = data(steps=12)

    def train(params, batches):
        mean = partial(jax.lax.pmean, axis_name="batch")
        return trained(optimizer, params, batches, mean=mean)[0]

    parts = batches.reshape(12, 2, 4, 4).swapaxes(0, 1)
    both = jax.pmap(train, axis_name="batch", in_axes=(None, 0))(PARAMS, parts)
    alone, _ = trained(optimizer, PARAMS, batches)
    for key in both:
        np.testing.assert_array_equal(both[key][0], both[key][1])
        np.testing.assert_allclose(both[key][0], alone[key], rtol=1e-4, atol=1e-5)


def test_sharded_params_stay_sharded():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = NamedSharding(mesh, P("fsdp"))
    params = {"w": jax.device_put(jnp.ones((8, 3)), cut)}
    optimizer = syncalgos.as_optimizer(syncalgos.diloco(2), optax.adam(0.1))
    state = jax.jit(optimizer.init)(params)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert updates["w"].sharding.is_equivalent_to(cut, 2)
    sizes = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.sync)]
    assert all(size[0] == 4 for size in sizes if len(size) == 2)


LABELS = {"seen": "outer", "frozen": "none"}
SEEN = {"seen": True, "frozen": False}


@pytest.mark.parametrize(
    "around",
    [
        lambda x: optax.masked(x, SEEN),
        lambda x: optax.partition({"outer": x, "none": optax.set_to_zero()}, LABELS),
        lambda x: optax.MultiSteps(optax.masked(optax.chain(x), SEEN), 1),
    ],
)
def test_center_is_params_where_a_mask_hides_them(around):
    strategy = syncalgos.lookahead(2, slow_lr=0.5)
    optimizer = around(syncalgos.as_optimizer(strategy, optax.sgd(1.0)))
    params = {"seen": {"w": jnp.zeros(2)}, "frozen": {"w": jnp.ones(3)}}
    params, state = trained(optimizer, params, data(steps=3), falling)
    center = syncalgos.center_of(strategy, state, params)
    assert float(params["seen"]["w"][0]) == 2  # the half of two steps, and a step
    assert float(center["seen"]["w"][0]) == 1
    np.testing.assert_array_equal(center["frozen"]["w"], params["frozen"]["w"])
    with pytest.raises(ValueError, match="center_of: params are not those that"):
        syncalgos.center_of(strategy, state, params["seen"])


def falling(params, batch):
    return -params["seen"]["w"].sum()


@pytest.mark.parametrize(
    ("strategy", "inner", "told"),
    [
        (syncalgos.diloco, optax.sgd(0.1), r"expected a Strategy.*call it: diloco\(\)"),
        (syncalgos.diloco(), optax.sgd, "inner must be an optax optimizer"),
    ],
)
def test_what_is_no_strategy_or_optimizer_is_refused(strategy, inner, told):
    with pytest.raises(ValueError, match=told):
        syncalgos.as_optimizer(strategy, inner)


def test_what_cannot_be_updated_is_refused():
    optimizer = syncalgos.as_optimizer(syncalgos.bmuf(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="int"):
        optimizer.init({"count": jnp.arange(3)})
    sought = syncalgos.as_optimizer(syncalgos.bmuf(), optax.lbfgs())
    with pytest.raises(ValueError, match=r"inner: a line search needs .* a sync"):
        sought.init(PARAMS)
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        optimizer.update(PARAMS, state)
