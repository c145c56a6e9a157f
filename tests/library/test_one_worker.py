"""Tests of a strategy of one worker as an optimizer of optax."""

from collections.abc import Callable
from functools import partial
from typing import Any

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


def loss(params: Any, batch: Any) -> jax.Array:
    """Least squares, of the batch's rows."""
    squares = (batch @ params["matrix"] - batch[:, :3] + params["scalar"]) ** 2
    return jnp.mean(squares) + jnp.sum(params["empty"])


def make_batches(seed: int = 0, steps: int = STEPS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, 8, 4)).astype(np.float32)


def train_alone(
    optimizer: optax.GradientTransformation,
    params: Any,
    batches: Any,
    loss: Callable = loss,
    mean: Callable = lambda grads: grads,
) -> tuple[Any, Any]:
    """The params and the state after a loop of one's own."""

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        grads = mean(jax.grad(loss)(params, batch))
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: Any) -> Any:
        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0]

    return run(jax.tree.map(jnp.asarray, params))


# Rounds, a peer that is oneself, anchors, a server, votes.
DEFAULT_NAMES = "fedavg", "gossip", "zero_one_adam"
SLOW_NAMES = (
    "diloco",
    "async_diloco",
    "dynamic_averaging",
    "powersgd",
    "scaffold",
    "gpa",
    "easgd",
)


@pytest.mark.parametrize(
    "names", [DEFAULT_NAMES, pytest.param(SLOW_NAMES, marks=pytest.mark.slow)]
)
def test_as_optimizer_trains_as_the_engine_does_with_one_worker(names):
    inner_optimizer = joint_strategies.optimizers(
        {name: owed(name).optimizer for name in names}
    )
    strategy = joint_strategies.strategies({name: make(name) for name in names})
    joint_loss = joint_strategies.loss_of_all(loss)
    start = dict.fromkeys(names, PARAMS)
    optimizer = optax.chain(
        optax.identity(), syncalgos.as_optimizer(strategy, inner_optimizer)
    )
    params_alone, state = train_alone(optimizer, start, make_batches(), joint_loss)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(joint_loss), inner_optimizer, strategy, workers=1
    )
    engine_state, _ = trainer.run(trainer.init(start), make_batches())
    params = jax.tree.map(lambda x: np.asarray(x)[0, 0], engine_state.replica.params)
    engine_center = trainer.center(engine_state).params
    center = syncalgos.center_of(strategy, state, params_alone)
    for name in names:
        values = params_alone[name], center[name]
        expected = params[name], engine_center[name]
        for x, y in zip(*map(jax.tree.leaves, (values, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)
    with pytest.raises(ValueError, match="exactly one as_optimizer, got 0"):
        syncalgos.center_of(strategy, inner_optimizer.init(start), start)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_params_keep_their_dtypes(dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    optimizer = syncalgos.as_optimizer(syncalgos.bmuf(2), optax.adam(0.01))
    state = jax.eval_shape(optimizer.init, params)
    updates, new_state = jax.eval_shape(optimizer.update, params, state, params)

    def list_kinds(tree: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert list_kinds(updates) == list_kinds(params)
    assert list_kinds(new_state) == list_kinds(state)


def test_as_optimizer_fits_into_chains_and_passes_the_loss_on():
    inner_optimizer = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        syncalgos.as_optimizer(syncalgos.lookahead(3), inner_optimizer),
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
    settings = {"learning_rate": 2.0**-6} if name == "ema_nesterov" else {}
    optimizer = syncalgos.as_optimizer(make(name, **settings), optax.sgd(2.0**-6))

    def train_state(dtype: Any) -> list[jax.Array]:
        start = jnp.ones(3, dtype)
        batches = np.zeros(32)
        params, state = train_alone(optimizer, start, batches, lambda x, _: -x.sum())
        assert params.dtype == dtype
        return jax.tree.leaves(state.sync)

    for x, y in zip(train_state(jnp.bfloat16), train_state(jnp.float32), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_an_axis_of_ones_own_is_that_of_one_worker():
    for axis in ("batch", ("hosts", "batch")):
        strategy = syncalgos.model_averaging(period=2, axis=axis)
        optimizer = syncalgos.as_optimizer(strategy, optax.sgd(0.1))
        params_alone, _ = train_alone(optimizer, PARAMS, make_batches())
        plain_params, _ = train_alone(optax.sgd(0.1), PARAMS, make_batches())
        for key in params_alone:
            np.testing.assert_allclose(
                params_alone[key], plain_params[key], rtol=1e-5, atol=1e-6
            )


def test_under_a_data_parallel_loop_all_devices_agree():
    """Gradients are averaged by the loop; each device takes the outer step itself."""
    optimizer = syncalgos.as_optimizer(
        syncalgos.slowmo(4, learning_rate=0.05), optax.sgd(0.05)
    )
    batches = make_batches(steps=12)

    def train(params: Any, batches: Any) -> Any:
        mean = partial(jax.lax.pmean, axis_name="batch")
        return train_alone(optimizer, params, batches, mean=mean)[0]

    device_batches = batches.reshape(12, 2, 4, 4).swapaxes(0, 1)
    params_of_devices = jax.pmap(train, axis_name="batch", in_axes=(None, 0))(
        PARAMS, device_batches
    )
    alone, _ = train_alone(optimizer, PARAMS, batches)
    for key in params_of_devices:
        np.testing.assert_array_equal(
            params_of_devices[key][0], params_of_devices[key][1]
        )
        np.testing.assert_allclose(
            params_of_devices[key][0], alone[key], rtol=1e-4, atol=1e-5
        )


def test_sharded_params_stay_sharded():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    params = {"w": jax.device_put(jnp.ones((8, 3)), sharding)}
    optimizer = syncalgos.as_optimizer(syncalgos.diloco(2), optax.adam(0.1))
    state = jax.jit(optimizer.init)(params)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)
    sizes = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.sync)]
    assert all(size[0] == 4 for size in sizes if len(size) == 2)


LABELS = {"seen": "outer", "frozen": "none"}
SEEN_MASK = {"seen": True, "frozen": False}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: optax.masked(x, SEEN_MASK),
        lambda x: optax.partition({"outer": x, "none": optax.set_to_zero()}, LABELS),
        lambda x: optax.MultiSteps(optax.masked(optax.chain(x), SEEN_MASK), 1),
    ],
)
def test_center_is_params_where_a_mask_hides_them(wrap):
    strategy = syncalgos.lookahead(2, slow_lr=0.5)
    optimizer = wrap(syncalgos.as_optimizer(strategy, optax.sgd(1.0)))
    params = {"seen": {"w": jnp.zeros(2)}, "frozen": {"w": jnp.ones(3)}}
    params, state = train_alone(optimizer, params, make_batches(steps=3), falling_loss)
    center = syncalgos.center_of(strategy, state, params)
    assert float(params["seen"]["w"][0]) == 2  # the half of two steps, and a step
    assert float(center["seen"]["w"][0]) == 1
    np.testing.assert_array_equal(center["frozen"]["w"], params["frozen"]["w"])
    with pytest.raises(ValueError, match="center_of: params are not those that"):
        syncalgos.center_of(strategy, state, params["seen"])


def falling_loss(params: Any, batch: Any) -> jax.Array:
    return -params["seen"]["w"].sum()


@pytest.mark.parametrize(
    ("strategy", "inner_optimizer", "message"),
    [
        (syncalgos.diloco, optax.sgd(0.1), r"expected a Strategy.*call it: diloco\(\)"),
        (syncalgos.diloco(), optax.sgd, "inner must be an optax optimizer"),
    ],
)
def test_a_value_that_is_no_strategy_or_optimizer_is_refused(
    strategy, inner_optimizer, message
):
    with pytest.raises(ValueError, match=message):
        syncalgos.as_optimizer(strategy, inner_optimizer)


def test_params_or_optimizers_that_cannot_be_updated_are_refused():
    optimizer = syncalgos.as_optimizer(syncalgos.bmuf(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="int"):
        optimizer.init({"count": jnp.arange(3)})
    sought = syncalgos.as_optimizer(syncalgos.bmuf(), optax.lbfgs())
    with pytest.raises(ValueError, match=r"inner: a line search needs .* a sync"):
        sought.init(PARAMS)
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        optimizer.update(PARAMS, state)
