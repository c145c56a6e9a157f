"""A loop that stacks its replicas, sharded and not, trains as the engine does.

Those on a mesh run in a process of its own, which has eight devices (`stacked_loops`).
"""

from typing import Any, NamedTuple

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
    comparison = run_module("stacked_loops", *chosen_values(request, "name"))[name]
    assert max(comparison["apart"].values()) < ROUNDING, comparison["apart"]
    assert comparison["moved"] > 1e-3


def make_replica(strategy: Any) -> tuple[Replica, Any]:
    """Two workers' params, and the strategy's state."""
    params = {"w": jnp.array([[1.0], [3.0]])}
    return Replica(params), strategy.init(params)


def test_a_sync_without_the_reduce_is_refused():
    strategy = stacked(syncalgos.easgd(2, axis="replica"))
    replica, state = make_replica(strategy)
    with pytest.raises(ValueError, match="call reduce"):
        strategy.sync(replica, state, 0)
    _, reduced = strategy.reduce(replica.params, replica, state, 0)
    with pytest.raises(ValueError, match="once in a step"):
        strategy.reduce(replica.params, replica, reduced, 0)
    _, again = strategy.sync(replica, reduced, 0)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_a_loss_that_is_seen_is_asked_for_and_not_kept():
    def pull(replica: Replica, state: Any, step: jax.Array) -> tuple[Replica, Any]:
        mean = syncalgos.collectives.mean(replica.loss, "replica")
        return replica._replace(params={"w": mean[None]}), state

    strategy = stacked(syncalgos.Strategy(sync=pull, sees_loss=True, axis="replica"))
    replica, state = make_replica(strategy)
    with pytest.raises(ValueError, match="needs the loss"):
        strategy.sync(replica, state, 0)
    synced_replica, _ = strategy.sync(
        replica._replace(loss=jnp.array([1.0, 5.0])), state, 0
    )
    np.testing.assert_array_equal(synced_replica.params["w"], [[3.0], [3.0]])
    assert synced_replica.loss == ()


def test_buffers_stay_each_workers_own():
    strategy = stacked(syncalgos.model_averaging(1, axis="replica"))
    replica, state = make_replica(strategy)
    replica = replica._replace(buffers={"mean": jnp.array([0.0, 1.0])})
    synced_replica, _ = strategy.sync(replica, state, 0)
    np.testing.assert_array_equal(synced_replica.params["w"], [[2.0], [2.0]])
    np.testing.assert_array_equal(synced_replica.buffers["mean"], [0.0, 1.0])


def test_params_and_state_may_be_donated_both():
    strategy = stacked(syncalgos.diloco(2, axis="replica"))
    replica, state = make_replica(strategy)
    sync = jax.jit(strategy.sync, donate_argnums=(0, 1))
    replica, state = sync(replica, state, jnp.int32(0))
    assert np.isfinite(strategy.center(replica.params, state)["w"]).all()


class RefusedStack(NamedTuple):
    """Stacked replicas that are refused.

    Attributes:
        axis: the strategy's.
        workers: their number in each leaf of the params.
        message: a pattern in the refusal.
        mesh_axis: the axis of a mesh of three devices, if there is one.
    """

    axis: str | tuple[str, str]
    workers: Any
    message: str
    mesh_axis: str | None = None


REFUSED_STACKS = {
    "two axes": RefusedStack(("a", "b"), workers=2, message="single axis"),
    "an axis that the mesh lacks": RefusedStack(
        "replica", workers=3, message="replica", mesh_axis="diloco"
    ),
    "fewer workers than devices": RefusedStack(
        "diloco", workers=2, message="there are 3 workers", mesh_axis="diloco"
    ),
    "leaves of other numbers": RefusedStack(
        "diloco",
        workers={"b": 3, "c": 2},
        message=r"are 3 workers .*\['c'\] has shape \(2,",
    ),
}


@pytest.mark.parametrize("name", REFUSED_STACKS)
def test_other_axes_and_numbers_of_workers_are_refused(name):
    case = REFUSED_STACKS[name]
    mesh = None
    if case.mesh_axis is not None:
        mesh = jax.make_mesh((3,), (case.mesh_axis,), axis_types=(AxisType.Auto,))
    params = jax.tree.map(lambda n: jnp.ones((n, 2)), {"w": case.workers})
    with pytest.raises(ValueError, match=case.message):
        stacked(syncalgos.bmuf(axis=case.axis), mesh).init(params)


def test_a_state_is_made_of_params_that_lie_on_one_device_yet():
    mesh = jax.make_mesh((2,), ("diloco",), axis_types=(AxisType.Auto,))
    state = stacked(syncalgos.bmuf(axis="diloco"), mesh).init({"w": jnp.ones((2, 3))})
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.spec == PartitionSpec("diloco")


def test_a_center_that_would_count_workers_that_skip_is_refused():
    averaged = syncalgos.model_averaging(2, axis="replica")
    weighted = syncalgos.participating(averaged, syncalgos.sampled(0.5), stale=True)
    with pytest.raises(ValueError, match=r"count workers that skip: use stale=False"):
        stacked(weighted)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((2,), ("diloco",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"of type Auto: jax.make_mesh\("):
        stacked(syncalgos.bmuf(axis="diloco"), mesh)
