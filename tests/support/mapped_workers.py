"""One worker's program mapped over all workers, as the engine does it."""

from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from syncalgos._engine.placement.backends import over_devices, vectorized
from syncalgos._engine.placement.make_layout import Placement, make_layout
from syncalgos._engine.program import Inputs, Outputs


def spread(layout, program):
    """Maps one worker's (own, shared) -> result over all workers.

    Returns:
        A jitted (own, Inputs) -> Outputs, whose `worker_state` is each worker's
        result.
    """

    def view(values, inputs):
        return Outputs(program(values, inputs.shared), ())

    on_device = partial(vectorized, view, layout.lanes, None)
    return over_devices(layout, on_device, donate=False)


def on_workers(layout, program, values, shared=()):
    """Runs such a program; own and the result lead with (devices, lanes)."""
    # Collectives of two programs in flight on CPU devices may wait for each other.
    return jax.block_until_ready(
        spread(layout, program)(values, Inputs(shared)).worker_state
    )


def over_workers(function, values, backend, devices):
    """Applies one to each worker's values; leaves lead with the workers, in and out."""
    workers = len(jax.tree.leaves(values)[0])
    layout = make_layout(workers, backend, Placement(range(devices)))
    lane_values = jax.tree.map(lambda x: x.reshape(*layout.shape, *x.shape[1:]), values)
    result = on_workers(
        layout, lambda lane_values, _: function(lane_values), lane_values
    )
    return jax.tree.map(lambda x: np.asarray(x).reshape(workers, *x.shape[2:]), result)


def shard_mapped(program, axis_name, workers=3, check_vma=False):
    """Maps one worker's program over as many devices, as jax.vmap maps it."""
    mesh = jax.make_mesh((workers,), (axis_name,), axis_types=(AxisType.Auto,))

    def on_one(values):
        result = program(jax.tree.map(lambda x: x[0], values))
        return jax.tree.map(lambda x: x[None], result)

    spec = PartitionSpec(axis_name)
    mapped = jax.shard_map(
        on_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped)
