"""Hand-written loops for workers of several devices: FSDP inside, averaging across.

They are written for their model, their layout and dispatches of whole rounds. They
check nothing, count nothing and evaluate nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.work import LR, PyTree, Work

PERIOD = 16
WORKERS = "workers"
FSDP = "fsdp"
Put = Callable[[jax.Array, PartitionSpec], jax.Array]


def shardings(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Cuts the longest side of each of the GPT's matrices; vectors are whole."""
    layer_axes = int(path.startswith("blocks/"))  # past the axis that counts layers
    if len(shape) - layer_axes < 2:
        return PartitionSpec()
    longest = max(range(layer_axes, len(shape)), key=shape.__getitem__)
    return PartitionSpec(*[None] * longest, FSDP)


def _param_specs(params: PyTree) -> PyTree:
    def spec(path: Any, x: jax.Array) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return shardings(name, x.shape)

    return jax.tree_util.tree_map_with_path(spec, params)


def _local_step(
    work: Work, put: Put, specs: PyTree, data: PyTree, params: PyTree, row: jax.Array
) -> tuple[PyTree, jax.Array]:
    batch = jax.tree.map(lambda x: put(x[row], PartitionSpec(FSDP)), data)
    value, grads = jax.value_and_grad(work.loss)(params, batch)
    grads = jax.tree.map(put, grads, specs)
    new_params = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    return jax.tree.map(put, new_params, specs), value


def _under_shard_map(work: Work, mesh: Mesh, specs: PyTree) -> Callable:
    """Maps only the axis of workers; the compiler shards over the other axis."""
    put = lax.with_sharding_constraint

    # params: (1, ...), rows: (rounds, steps, 1, batch)
    def train_worker(
        params: PyTree, data: PyTree, rows: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        local_step = partial(_local_step, work, put, specs, data)

        def train_block(params: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
            params, values = lax.scan(local_step, params, rows)
            return jax.tree.map(put, lax.pmean(params, WORKERS), specs), values

        worker_params = jax.tree.map(lambda x: x[0], params)
        worker_params, values = lax.scan(train_block, worker_params, rows[:, :, 0])
        params = jax.tree.map(lambda x: x[None], worker_params)
        return params, lax.pmean(values.reshape(-1), WORKERS)

    by_worker = PartitionSpec(WORKERS)
    replicated = PartitionSpec()
    return jax.shard_map(
        train_worker,
        mesh=mesh,
        in_specs=(by_worker, replicated, PartitionSpec(None, None, WORKERS)),
        out_specs=(by_worker, replicated),
        axis_names={WORKERS},
        check_vma=False,
    )


def _under_vmap(work: Work, mesh: Mesh, specs: PyTree) -> Callable:
    """Leaves both axes to the compiler."""

    def put(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def average(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        means = jnp.broadcast_to(x.mean(0), x.shape)
        return put(means, PartitionSpec(WORKERS, *spec))

    # rows: (rounds, steps, workers, batch)
    def run(params: PyTree, data: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
        local_step = partial(_local_step, work, put, specs, data)
        all_workers_step = jax.vmap(local_step, spmd_axis_name=WORKERS)

        def train_block(params: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
            params, values = lax.scan(all_workers_step, params, rows)
            return jax.tree.map(average, params, specs), values

        params, values = lax.scan(train_block, params, rows)
        return params, values.reshape(-1, values.shape[-1]).mean(1)

    return run


FORMS: dict[str, Callable[[Work, Mesh, PyTree], Callable]] = {
    "by hand, shard_map": _under_shard_map,
    "by hand, vmap": _under_vmap,
}


def loop(
    work: Work, form: str, workers: int, devices: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns go(rows) -> losses, which keeps its own donated state.

    Args:
        work: the GPT, trained with plain SGD; its data lie on all devices.
        form: form of the loop, one of FORMS.
        workers: number of workers.
        devices: number of devices of each worker.
    """
    grid = np.array(jax.devices()[: workers * devices]).reshape(workers, devices)
    mesh = Mesh(grid, (WORKERS, FSDP))
    specs = _param_specs(work.params)
    param_shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(WORKERS, *spec)), specs
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        FORMS[form](work, mesh, specs),
        out_shardings=(param_shardings, replicated),
        donate_argnums=0,
    )
    data = jax.device_put(work.data, replicated)
    row_sharding = NamedSharding(mesh, PartitionSpec(None, None, WORKERS, FSDP))

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        return jax.device_put(np.broadcast_to(x, (workers, *x.shape)), sharding)

    params = jax.tree.map(place, work.params, param_shardings)

    def go(rows: np.ndarray) -> np.ndarray:
        nonlocal params
        rows = rows.reshape(-1, PERIOD, workers, rows.shape[1] // workers)
        # The model adds sharding hints if it finds a mesh.
        with jax.set_mesh(mesh):
            params, losses = run(params, data, jax.device_put(rows, row_sharding))
        jax.block_until_ready(params)
        return np.asarray(losses)

    return go
