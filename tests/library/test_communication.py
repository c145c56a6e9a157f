"""Bytes sent, against figures counted by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import syncalgos
from syncalgos import WORKERS, Strategy, collectives
from syncalgos._jaxprs import SENDS, SILENT
from syncalgos._ledger.traced import COLLECTIVES

PARAMS = {"w": np.zeros((4, 4), np.float32), "b": np.zeros(8, np.float32)}
BYTES = 4 * (16 + 8)


def make_strategy(action: Callable, **fields: Any) -> syncalgos.Strategy:
    """A strategy that does something with params at each sync."""

    def sync(
        replica: syncalgos.Replica, state: Any, step: jax.Array
    ) -> tuple[syncalgos.Replica, Any]:
        return replica._replace(params=action(replica.params, step)), state

    return Strategy(sync=sync, **fields)


def count_bytes(
    strategy: syncalgos.Strategy, workers: int = 4, steps: int = 1, **settings: Any
) -> syncalgos.Communication:
    return syncalgos.communication(
        strategy, PARAMS, workers=workers, steps=steps, **settings
    )


def test_ring_all_reduce_sends_twice_all_but_one_part():
    counts = count_bytes(syncalgos.sync_sgd(), workers=4, steps=10)
    assert counts.bytes_per_worker == 10 * 2 * 3 / 4 * BYTES
    assert counts.calls == 20  # two arrays
    assert counts.syncs == 10
    np.testing.assert_array_equal(counts.per_step, np.arange(1, 11) * 1.5 * BYTES)
    assert list(counts.by_collective) == ["all_reduce"]
    assert (
        counts.by_collective["all_reduce"].bytes_per_worker == counts.bytes_per_worker
    )


def test_the_text_of_a_count_has_its_totals_in_one_line():
    text = repr(count_bytes(syncalgos.model_averaging(period=500), steps=1000))
    assert f"bytes_per_worker={2 * 1.5 * BYTES}" in text
    assert "syncs=2" in text and "steps=1000" in text and "array" not in text


# What each of six workers sends of its params.
SENT_SHARES = {
    "mean": (collectives.mean, "all_reduce", 2 * 5 / 6),
    "mean of three": (lambda x: collectives.group_mean(x, 2), "all_reduce", 2 * 2 / 3),
    "gather": (collectives.gather, "all_gather", 5),
    "parts": (lambda x: collectives.all_to_all(spread(x)), "all_to_all", 6 * 5 / 6),
    "shift": (lambda x: collectives.shift(x, 1), "permute", 1),
    "shift to oneself": (lambda x: collectives.shift(x, 6), "permute", 0),
}


def spread(params: Any) -> Any:
    """The same for each of six workers."""
    return jax.tree.map(lambda x: jnp.stack([x] * 6), params)


@pytest.mark.parametrize(
    ("move", "kind", "share"), SENT_SHARES.values(), ids=SENT_SHARES
)
def test_collectives_are_counted_by_the_sizes_of_their_groups(move, kind, share):
    def action(params: Any, step: jax.Array) -> Any:
        sums = jax.tree.map(lambda x: x.sum(), move(params))
        return jax.tree.map(lambda x, total: x + total, params, sums)

    counts = count_bytes(make_strategy(action), workers=6)
    assert counts.bytes_per_worker == pytest.approx(share * BYTES, rel=1e-15)
    bytes_by_kind = {k: x.bytes_per_worker for k, x in counts.by_collective.items()}
    assert bytes_by_kind == ({kind: counts.bytes_per_worker} if share else {})


@custom_vmap
def ruled(x: jax.Array) -> jax.Array:
    return x


@ruled.def_vmap
def _(lanes, is_mapped, x):  # what every layout of several lanes runs
    return jnp.broadcast_to(x.mean(0), x.shape), True


unknown = Primitive("unknown")
unknown.def_abstract_eval(lambda x, **params: x)
one_device = jax.make_mesh((1,), ("d",))
on_devices = partial(jax.shard_map, mesh=one_device, in_specs=P(), out_specs=P())
GROUPS = [[0], [1, 2], [3, 4, 5]]
ZERO = jnp.zeros(6, jnp.int32)

# A reduction of an array by jax itself, and the times that each of six workers sends
# it, or what is refused.
BY_JAX = {
    "axes in another order": (lambda x: lax.pmean(x, ("lanes", "devices")), 2 * 5 / 6),
    "groups of unequal sizes": (
        lambda x: lax.psum(x, "devices", axis_index_groups=GROUPS),
        2 * 2 / 3,
    ),
    "in a rule": (jax.checkpoint(lambda x: lax.pmax(x, WORKERS)), 2 * 5 / 6),
    "over an axis of its own": (
        lambda x: jax.vmap(lambda y: lax.pmean(y, "own"), axis_name="own")(x),
        0,
    ),
    "part": (lambda x: lax.pmean(x, "lanes"), r"psum over \['lanes'\] cannot"),
    "part of ours": (lambda x: collectives.mean(x, "lanes"), "part of"),
    "part of our shift": (lambda x: collectives.shift(x, 1, "lanes"), "part of"),
    "broadcast": (lambda x: lax.pbroadcast(x, ("devices",), 0), "pbroadcast"),
    "ragged": (
        lambda x: lax.ragged_all_to_all(x, x, *[ZERO] * 4, axis_name="devices"),
        "ragged_all_to_all",
    ),
    "rule for lanes": (ruled, "custom_vmap_call"),
    "callback": (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback"),
    "foreign": (lambda x: jax.ffi.ffi_call("foreign", x)(x), "ffi_call"),
    "devices": (on_devices(lambda x: lax.psum(x, "d")), "shard_map"),
    "linear solver": (
        lambda x: jax.scipy.sparse.linalg.cg(lambda v: lax.pmean(v, WORKERS), x)[0],
        "loop of unknown length",
    ),
    "unknown": (lambda x: unknown.bind(x, over=("devices",)), "unknown"),
    "unknown function": (lambda x: unknown.bind(x, call=jnp.sin), "unknown"),
}


@pytest.mark.parametrize(("action", "share_or_message"), BY_JAX.values(), ids=BY_JAX)
def test_collectives_of_jax_are_counted_or_refused_by_name(action, share_or_message):
    strategy = make_strategy(lambda params, step: jax.tree.map(action, params))
    shapes = {"b": PARAMS["b"]}
    if isinstance(share_or_message, str):
        with pytest.raises(ValueError, match=share_or_message):
            syncalgos.communication(strategy, shapes, workers=6, steps=1)
    else:
        counts = syncalgos.communication(strategy, shapes, workers=6, steps=1)
        assert counts.bytes_per_worker == pytest.approx(
            share_or_message * 4 * 8, rel=1e-15
        )


def if_lanes(params: Any) -> Any:
    return collectives.mean(params) if lax.axis_size("lanes") > 1 else params


def if_one_lane_in_a_branch(params: Any) -> Any:
    is_apart = lax.psum(1, "lanes") == 1
    return lax.cond(is_apart, collectives.mean, lambda params: params, params)


def shorter_on_one_device(params: Any) -> Any:
    dtype = jnp.bfloat16 if lax.axis_size("devices") == 1 else jnp.float32
    return jax.tree.map(lambda x: collectives.mean(x.astype(dtype)), params)


def over_devices_alone(params: Any) -> Any:
    return lax.pmean(params, "devices")


def failing_in_lanes(params: Any) -> Any:
    if lax.axis_size("lanes") > 1:
        raise ValueError("one lane, please")
    return params


OF_LAYOUT = [
    if_lanes,
    if_one_lane_in_a_branch,
    shorter_on_one_device,
    over_devices_alone,
    failing_in_lanes,
]


@pytest.mark.parametrize("action", OF_LAYOUT, ids=lambda action: action.__name__)
def test_traffic_that_depends_on_the_layout_is_refused(action):
    strategy = make_strategy(lambda params, step: action(params))
    with pytest.raises(ValueError, match="depends on how its workers lie on devices"):
        count_bytes(strategy)


def make_trainer(strategy: syncalgos.Strategy, devices: int) -> syncalgos.DataParallel:
    return syncalgos.DataParallel(
        lambda params, batch: jnp.sum(params["b"]) * jnp.mean(batch),
        optax.sgd(0.1),
        strategy,
        workers=6,
        placement=syncalgos.Placement(devices=jax.devices()[:devices]),
    )


def test_a_trainer_asks_its_own_layout():
    def action(params: Any, step: jax.Array) -> Any:
        return collectives.mean(params) if lax.axis_size("lanes") == 2 else params

    with pytest.raises(ValueError, match="depends on how its workers lie on devices"):
        trainer = make_trainer(make_strategy(action), devices=3)
        trainer.communication(trainer.init(PARAMS), 1)
    trainer = make_trainer(make_strategy(action), devices=1)
    assert not trainer.communication(trainer.init(PARAMS), 1).calls


def send_in_all_ways(params: Any, step: jax.Array) -> Any:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    rows = jax.tree.map(lambda x: jnp.stack([x] * 6), params)
    results = [
        collectives.mean(half),
        collectives.agreed(params),
        collectives.group_mean(params, 2),
        collectives.group_mean(params, 3),
        jax.tree.map(lambda x: x[0], collectives.gather(params)),
        collectives.shift(params, 5),
        collectives.exchange(params, [[*range(1, 6), 0], [*range(6)]], step % 2),
        jax.tree.map(lambda x: x[0], collectives.all_to_all(rows)),
        jax.tree.map(jax.vmap(collectives.mean), params),
        jax.tree.map(jax.jit(lambda x: lax.pmean(x, WORKERS)), params),
    ]
    means = jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(0), *results)
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, params)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_collective_is_counted_alike_in_every_layout(devices):
    strategy = make_strategy(send_in_all_ways)
    trainer = make_trainer(strategy, devices)
    counts = trainer.communication(trainer.init(PARAMS), 4)
    assert repr(counts) == repr(count_bytes(strategy, workers=6, steps=4))


def test_a_function_of_any_name_is_walked():
    @jax.jit
    def _by_data(x: jax.Array, recorded: Any) -> Any:
        return collectives.mean(x)

    strategy = make_strategy(lambda params, step: _by_data(params, params))
    assert count_bytes(strategy).bytes_per_worker == 2 * 3 / 4 * BYTES


averaging_lanes = Primitive("averaging_lanes")
averaging_lanes.def_abstract_eval(lambda x: x)


def test_a_primitive_that_jax_does_not_define_is_refused_by_name():
    """Its rule for several lanes may send what no jaxpr shows."""
    strategy = make_strategy(
        lambda params, step: jax.tree.map(averaging_lanes.bind, params)
    )
    with pytest.raises(ValueError, match=r"averaging_lanes .* not one of jax's own"):
        count_bytes(strategy)
    assert not count_bytes(strategy, workers=1).calls


def test_every_collective_of_jax_is_known():
    """A new one is silent, or one that sends; those without a price are refused."""
    primitive_names = {
        x.name for x in vars(parallel).values() if hasattr(x, "def_abstract_eval")
    }
    assert {"psum", "ppermute_start", "axis_index"} <= primitive_names <= SENDS | SILENT
    assert {*COLLECTIVES} <= SENDS


def test_gossip_of_opt_state_sends_its_floats_too():
    """Adam's moments are twice the params; its count is no float, and stays."""
    replica = syncalgos.Replica(PARAMS, optax.adam(0.1).init(PARAMS))
    strategy = syncalgos.gossip(topology="ring", mix_opt_state=True)
    counts = syncalgos.communication(strategy, replica, workers=5, steps=3)
    assert counts.bytes_per_worker == 3 * 2 * 3 * BYTES


def test_one_worker_sends_nothing():
    strategy = syncalgos.chain(
        syncalgos.sync_sgd(),
        make_strategy(lambda params, step: collectives.shift(params, 1)),
        make_strategy(lambda p, s: jax.tree.map(lambda x: x[0], collectives.gather(p))),
    )
    counts = count_bytes(strategy, workers=1, steps=3)
    assert counts[:3] == (0, 0, 0)
    assert counts.by_collective == {}
    np.testing.assert_array_equal(counts.per_step, np.zeros(3))
    np.testing.assert_array_equal(counts.calls_per_step, np.zeros(3))
    assert counts.calls_per_step.dtype == np.int64


def test_nested_branches_are_picked_by_the_step():
    late_average = syncalgos.every(syncalgos.average(), 2)
    strategy = syncalgos.chain(
        syncalgos.until(syncalgos.sync_sgd(), 4), syncalgos.after(late_average, 4)
    )
    counts = count_bytes(strategy, workers=2, steps=9)
    arrays_sent = (
        np.diff(counts.per_step, prepend=0) / BYTES
    )  # a ring of two sends all once
    np.testing.assert_array_equal(arrays_sent, [1, 1, 1, 1, 0, 1, 0, 1, 0])
    assert counts.syncs == 6


def test_calls_are_counted_by_the_step_for_all_and_for_each_collective():
    strategy = syncalgos.chain(
        syncalgos.every(syncalgos.average(), 2),
        syncalgos.every(make_strategy(lambda p, step: collectives.shift(p, 1)), 3),
    )
    counts = count_bytes(
        strategy, workers=4, steps=6
    )  # two arrays: two calls each time
    np.testing.assert_array_equal(counts.calls_per_step, [0, 2, 4, 6, 6, 10])
    assert counts.calls_per_step.dtype == np.int64
    assert counts.calls == 10
    ring, permute = (counts.by_collective[name] for name in ("all_reduce", "permute"))
    np.testing.assert_array_equal(ring.calls_per_step, [0, 2, 2, 4, 4, 6])
    np.testing.assert_array_equal(permute.calls_per_step, [0, 0, 2, 2, 2, 4])
    assert (ring.calls, permute.calls) == (6, 4)


def test_switch_and_jit_and_loop_are_counted():
    @jax.jit
    def rotate(params: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, p: collectives.shift(p, 1), params)

    def action(params: Any, step: jax.Array) -> Any:
        return lax.switch(step % 3, [lambda p: p, collectives.mean, rotate], params)

    step_bytes = np.diff(
        count_bytes(make_strategy(action), workers=4, steps=6).per_step, prepend=0
    )
    np.testing.assert_array_equal(step_bytes, [0, 1.5 * BYTES, 3 * BYTES] * 2)


@pytest.mark.parametrize("workers", [1, 4])
def test_branch_that_asks_for_the_worker_and_sends_nothing_is_counted(workers):
    def action(params: Any, step: jax.Array) -> Any:
        index = lax.cond(step % 2 == 0, collectives.index, lambda: jnp.int32(0))
        mean = lax.cond(step % 2 == 0, collectives.mean, lambda x: x, jnp.ones(()))
        return jax.tree.map(lambda x: x + mean.astype(x.dtype) * index, params)

    counts = count_bytes(make_strategy(action), workers=workers, steps=4)
    ring = 0 if workers == 1 else 4 * 2 * (workers - 1) / workers
    np.testing.assert_allclose(np.diff(counts.per_step, prepend=0), [ring, 0] * 2)


def test_sends_that_depend_on_the_params_are_refused():
    def action(params: Any, step: jax.Array) -> Any:
        return lax.cond(params["b"][0] > 0, collectives.mean, lambda p: p, params)

    with pytest.raises(ValueError, match="depends on more than the step"):
        count_bytes(make_strategy(action))


def test_stacked_workers_are_refused():
    with pytest.raises(ValueError, match="count the strategy that was given to `sta"):
        count_bytes(syncalgos.stacked(syncalgos.bmuf(2, axis="group")))


def test_optimizer_state_and_dtypes_count_with_their_own_size():
    params = {"w": jnp.zeros((4, 4), jnp.bfloat16)}
    optimizer = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)
    replica = syncalgos.Replica(params, optimizer.init(params))
    strategy = syncalgos.chain(syncalgos.average(), syncalgos.average("opt_state"))
    counts = syncalgos.communication(strategy, replica, workers=2, steps=1)
    assert counts.bytes_per_worker == 16 * (2 + 4)


def test_trainer_counts_what_its_state_holds():
    strategy = syncalgos.chain(syncalgos.average(), syncalgos.average("opt_state"))
    loss = syncalgos.stateless(lambda params, batch: jnp.sum(params["w"]) * 0)
    trainer = syncalgos.DataParallel(
        loss, optax.sgd(0.1, momentum=0.9), strategy, workers=4, backend="vmap"
    )
    state = trainer.init(PARAMS)
    assert trainer.communication(state, 3).bytes_per_worker == 3 * 2 * 1.5 * BYTES
    assert trainer.communication(state, 3, workers=2).bytes_per_worker == 6 * BYTES


def test_integer_params_are_named():
    with pytest.raises(ValueError, match=r"params\['n'\] is of dtype int32"):
        syncalgos.communication(
            syncalgos.sync_sgd(), {"n": np.zeros(3, np.int32)}, workers=2, steps=1
        )


def test_strategy_over_another_axis_is_refused_where_none_is_named():
    with pytest.raises(
        ValueError, match=r"'batch' is mapped here; .*declare it: Strategy\(…, axis=…\)"
    ):
        count_bytes(syncalgos.bmuf(2, axis="batch")._replace(axis=None))


def test_shapes_will_do_for_arrays():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    counts = syncalgos.communication(syncalgos.sync_sgd(), shapes, workers=2, steps=1)
    assert counts.bytes_per_worker == BYTES


@pytest.mark.parametrize(("workers", "steps"), [(0, 1), (1, 0), (1.5, 1), (2, -1)])
def test_bad_counts_are_refused(workers, steps):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        count_bytes(syncalgos.sync_sgd(), workers, steps)
