"""A loop that stacks its replicas, sharded and not, trains as the engine does.

Those on a mesh run in a process of its own, which has eight devices (`stacked_loops`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.chosen_tests import chosen_values
from support.device_processes import run_module
from support.tiers import tiers

import syncalgos
from syncalgos import Replica, stacked

ROUNDING = 1e-12  # of float64 after 8 steps, summed in another order
# What acts between means of params, and on gradients in two hops; peers, groups, data.
NAMES = "bmuf", "quantized_sgd", "gossip", "hierarchical", "dynamic_averaging"


@pytest.mark.parametrize("name", tiers(NAMES, slow=NAMES[:3]))
def test_an_algorithm_trains_stacked_replicas_as_the_engine_trains_workers(
    name, request
):
    seen = run_module("stacked_loops", *chosen_values(request, "name"))[name]
    assert max(seen["apart"].values()) < ROUNDING, seen["apart"]
    assert seen["moved"] > 1e-3


def replica_of(strategy):
    """Two workers' params, and the strategy's state."""
    params = {"w": jnp.array([[1.0], [3.0]])}
    return Replica(params), strategy.init(params)


def test_a_sync_without_the_reduce_is_refused():
    strategy = stacked(syncalgos.easgd(2, axis="replica"))
    replica, state = replica_of(strategy)
    with pytest.raises(ValueError, match="call reduce"):
        strategy.sync(replica, state, 0)
    _, reduced = strategy.reduce(replica.params, replica, state, 0)
    with pytest.raises(ValueError, match="once in a step"):
        strategy.reduce(replica.params, replica, reduced, 0)
    _, again = strategy.sync(replica, reduced, 0)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_a_loss_that_is_seen_is_asked_for_and_not_kept():
    def pull(replica, state, step):
        mean = syncalgos.collectives.mean(replica.loss, "replica")
        return replica._replace(params={"w": mean[None]}), state

    strategy = stacked(syncalgos.Strategy(sync=pull, sees_loss=True, axis="replica"))
    replica, state = replica_of(strategy)
    with pytest.raises(ValueError, match="needs the loss"):
        strategy.sync(replica, state, 0)
    after, _ = strategy.sync(replica._replace(loss=jnp.array([1.0, 5.0])), state, 0)
    np.testing.assert_array_equal(after.params["w"], [[3.0], [3.0]])
    assert after.loss == ()


def test_buffers_stay_each_workers_own():
    strategy = stacked(syncalgos.model_averaging(1, axis="replica"))
    replica, state = replica_of(strategy)
    replica = replica._replace(buffers={"mean": jnp.array([0.0, 1.0])})
    after, _ = strategy.sync(replica, state, 0)
    np.testing.assert_array_equal(after.params["w"], [[2.0], [2.0]])
    np.testing.assert_array_equal(after.buffers["mean"], [0.0, 1.0])


def test_params_and_state_may_be_donated_both():
    strategy = stacked(syncalgos.diloco(2, axis="replica"))
    replica, state = replica_of(strategy)
    sync = jax.jit(strategy.sync, donate_argnums=(0, 1))
    replica, state = sync(replica, state, jnp.int32(0))
    assert np.isfinite(strategy.center(replica.params, state)["w"]).all()


@pytest.mark.parametrize(
    ("axis", "mesh_axis", "workers", "message"),
    [
        (("a", "b"), None, 2, "single axis"),
        ("replica", "diloco", 3, "replica"),
        ("diloco", "diloco", 2, "there are 3 workers"),
        ("diloco", None, {"b": 3, "c": 2}, r"are 3 workers .*\['c'\] has shape \(2,"),
    ],
)
def test_other_axes_and_numbers_of_workers_are_refused(
    axis, mesh_axis, workers, message
):
    mesh = mesh_axis and jax.make_mesh((3,), (mesh_axis,), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=message):
        params = jax.tree.map(lambda n: jnp.ones((n, 2)), {"w": workers})
        stacked(syncalgos.bmuf(axis=axis), mesh).init(params)


def test_a_state_is_made_of_params_that_lie_on_one_device_yet():
    mesh = jax.make_mesh((2,), ("diloco",), axis_types=(AxisType.Auto,))
    state = stacked(syncalgos.bmuf(axis="diloco"), mesh).init({"w": jnp.ones((2, 3))})
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.spec == PartitionSpec("diloco")


def test_a_center_that_would_count_who_skips_is_refused():
    averaged = syncalgos.model_averaging(2, axis="replica")
    weighted = syncalgos.participating(averaged, syncalgos.sampled(0.5), stale=True)
    with pytest.raises(ValueError, match=r"count workers that skip: use stale=False"):
        stacked(weighted)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((2,), ("diloco",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"of type Auto: jax.make_mesh\("):
        stacked(syncalgos.bmuf(axis="diloco"), mesh)
