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
WORKERS, FSDP = "workers", "fsdp"


def shardings(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Cuts the longest side of each of the GPT's matrices; vectors are whole."""
    first = int(path.startswith("blocks/"))  # past the axis that counts layers
    if len(shape) - first < 2:
        return PartitionSpec()
    longest = max(range(first, len(shape)), key=shape.__getitem__)
    return PartitionSpec(*[None] * longest, FSDP)


def _specs(params: PyTree) -> PyTree:
    def spec(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return shardings(name, x.shape)

    return jax.tree_util.tree_map_with_path(spec, params)


def _local_step(work: Work, put: Callable, specs: PyTree, data, params, row):
    batch = jax.tree.map(lambda x: put(x[row], PartitionSpec(FSDP)), data)
    value, grads = jax.value_and_grad(work.loss)(params, batch)
    grads = jax.tree.map(put, grads, specs)
    stepped = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    return jax.tree.map(put, stepped, specs), value


def _under_shard_map(work: Work, mesh: Mesh, specs: PyTree) -> Callable:
    """Maps only the axis of workers; the compiler shards over the other axis."""
    put = lax.with_sharding_constraint

    def worker(params, data, rows):  # params: (1, ...), rows: (rounds, steps, 1, batch)
        local_step = partial(_local_step, work, put, specs, data)

        def block(params, rows):
            params, values = lax.scan(local_step, params, rows)
            return jax.tree.map(put, lax.pmean(params, WORKERS), specs), values

        first = jax.tree.map(lambda x: x[0], params)
        params, values = lax.scan(block, first, rows[:, :, 0])
        params = jax.tree.map(lambda x: x[None], params)
        return params, lax.pmean(values.reshape(-1), WORKERS)

    own, same = PartitionSpec(WORKERS), PartitionSpec()
    return jax.shard_map(
        worker,
        mesh=mesh,
        in_specs=(own, same, PartitionSpec(None, None, WORKERS)),
        out_specs=(own, same),
        axis_names={WORKERS},
        check_vma=False,
    )


def _under_vmap(work: Work, mesh: Mesh, specs: PyTree) -> Callable:
    """Leaves both axes to the compiler."""

    def put(x, spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def run(params, data, rows):  # rows: (rounds, steps, workers, batch)
        local_step = partial(_local_step, work, put, specs, data)
        of_all = jax.vmap(local_step, spmd_axis_name=WORKERS)

        def averaged(x, spec):
            everywhere = jnp.broadcast_to(x.mean(0), x.shape)
            return put(everywhere, PartitionSpec(WORKERS, *spec))

        def block(params, rows):
            params, values = lax.scan(of_all, params, rows)
            return jax.tree.map(averaged, params, specs), values

        params, values = lax.scan(block, params, rows)
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
    specs = _specs(work.params)
    own = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(WORKERS, *spec)), specs
    )
    same = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        FORMS[form](work, mesh, specs), out_shardings=(own, same), donate_argnums=0
    )
    data = jax.device_put(work.data, same)
    of_rows = NamedSharding(mesh, PartitionSpec(None, None, WORKERS, FSDP))

    def begin(x: Any, sharding: NamedSharding) -> jax.Array:
        return jax.device_put(np.broadcast_to(x, (workers, *x.shape)), sharding)

    params = jax.tree.map(begin, work.params, own)

    def go(rows):
        nonlocal params
        rows = rows.reshape(-1, PERIOD, workers, rows.shape[1] // workers)
        # The model adds sharding hints if it finds a mesh.
        with jax.set_mesh(mesh):
            params, losses = run(params, data, jax.device_put(rows, of_rows))
        jax.block_until_ready(params)
        return np.asarray(losses)

    return go
