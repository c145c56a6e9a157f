"""Minimal hand-written training loops to compare with, each for one algorithm.

They are written for their algorithm, their layout and dispatches of whole rounds. They
check nothing, count nothing and evaluate nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.work import LR, PyTree, Work

PERIOD = 16
AXES = ("devices", "lanes")
FORMS = ("vmap", "map")


def _local_step(
    work: Work, data: PyTree, params: PyTree, row: jax.Array
) -> tuple[PyTree, jax.Array]:
    batch = jax.tree.map(lambda x: x[row], data)
    value, grads = jax.value_and_grad(work.loss)(params, batch)
    return jax.tree.map(lambda p, g: p - LR * g, params, grads), value


def _sync_model_averaging(state: PyTree, mean: PyTree, workers: int) -> PyTree:
    return {"params": mean}


def _sync_bmuf(state: PyTree, mean: PyTree, workers: int) -> PyTree:
    """Returns the state after a block of classical BMUF."""
    velocity = jax.tree.map(
        lambda d, m, w: (1 - 1 / workers) * d + m - w,
        state["velocity"],
        mean,
        state["center"],
    )
    center = jax.tree.map(jnp.add, state["center"], velocity)
    return {"params": center, "center": center, "velocity": velocity}


SYNCS = {"model_averaging": _sync_model_averaging, "bmuf": _sync_bmuf}


def _under_vmap(work: Work, sync: Callable, workers: int) -> Callable:
    """Returns vmap over lanes of a scan over steps, with the sync inside a cond."""

    def train_worker(
        state: PyTree, inputs: tuple[jax.Array, PyTree, jax.Array]
    ) -> tuple[PyTree, jax.Array]:
        step, data, rows = inputs

        def local_step(
            carry: tuple[PyTree, jax.Array], row: jax.Array
        ) -> tuple[tuple[PyTree, jax.Array], jax.Array]:
            state, step = carry
            params, value = _local_step(work, data, state["params"], row)
            state = lax.cond(
                (step + 1) % PERIOD == 0,
                lambda s: sync(s, lax.pmean(s["params"], AXES), workers),
                lambda s: s,
                {**state, "params": params},
            )
            return (state, step + 1), value

        (state, _), values = lax.scan(local_step, (state, step), rows)
        return state, lax.pmean(values, AXES)

    return jax.vmap(
        train_worker,
        in_axes=(0, (None, None, 1)),
        axis_name="lanes",
        out_axes=(0, None),
    )


def _map_lanes(work: Work, sync: Callable, workers: int) -> Callable:
    """Returns rounds without a branch: lax.map over lanes of a scan over steps.

    State that all lanes share is held once per device.
    """

    def train_device(
        state: PyTree, inputs: tuple[jax.Array, PyTree, jax.Array]
    ) -> tuple[PyTree, jax.Array]:
        _, data, rows = inputs  # rows: (steps, lanes, batch)
        lanes = rows.shape[1]
        rounds = rows.reshape(-1, PERIOD, *rows.shape[1:]).swapaxes(1, 2)
        first_lane = jax.tree.map(lambda x: x[0], _shared_state(state))
        state = {"params": state["params"], **first_lane}

        def train_block(state: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
            params, values = lax.map(
                lambda lane: lax.scan(partial(_local_step, work, data), *lane),
                (state["params"], rows),
            )
            device_mean = jax.tree.map(lambda x: x.mean(0), params)
            state = sync(state, lax.pmean(device_mean, "devices"), workers)
            lane_params = _broadcast(state["params"], lanes)
            return {**state, "params": lane_params}, values.mean(0)

        state, values = lax.scan(train_block, state, rounds)
        shared = _broadcast(_shared_state(state), lanes)
        return {**state, **shared}, lax.pmean(values.reshape(-1), "devices")

    return train_device


def _shared_state(state: PyTree) -> PyTree:
    """Returns what is identical in all lanes: the state without the params."""
    return {name: x for name, x in state.items() if name != "params"}


def _broadcast(tree: PyTree, lanes: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), tree)


def loop(
    work: Work, algorithm: str, form: str, workers: int, devices: int
) -> Callable[[int, Any, np.ndarray], np.ndarray]:
    """Returns go(step, data, rows) -> losses, which keeps its own donated state.

    Args:
        work: the training work; it uses plain SGD.
        algorithm: name of the algorithm, one of SYNCS.
        form: form of the loop, one of FORMS.
        workers: number of workers.
        devices: number of devices, which must divide the workers.
    """
    make_program = {"vmap": _under_vmap, "map": _map_lanes}[form]
    run = jax.pmap(
        make_program(work, SYNCS[algorithm], workers),
        axis_name="devices",
        in_axes=(0, (None, None, 1)),
        out_axes=(0, None),
        devices=jax.devices()[:devices],
        donate_argnums=0,
    )
    lanes = workers // devices
    state: Any = {"params": work.params}
    if algorithm == "bmuf":
        zeros = jax.tree.map(jnp.zeros_like, work.params)
        state = {**state, "center": work.params, "velocity": zeros}
    state = jax.tree.map(
        lambda x: np.broadcast_to(np.asarray(x), (devices, lanes, *x.shape)), state
    )

    def go(step: int, data: Any, rows: np.ndarray) -> np.ndarray:
        nonlocal state
        rows = rows.reshape(len(rows), devices, lanes, -1)
        state, losses = run(state, (np.int32(step), data, rows))
        jax.block_until_ready(state)
        return np.asarray(losses)

    return go


def whole_batch(work: Work) -> Callable[[int, Any, np.ndarray], np.ndarray]:
    """Returns go as `loop` does; each step is one gradient of the global batch."""

    @partial(jax.jit, donate_argnums=0)
    def run(params: PyTree, data: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
        return lax.scan(partial(_local_step, work, data), params, rows)

    params = jax.tree.map(jnp.array, work.params)

    def go(step: int, data: Any, rows: np.ndarray) -> np.ndarray:
        nonlocal params
        params, losses = run(params, data, rows)
        jax.block_until_ready(params)
        return np.asarray(losses)

    return go
