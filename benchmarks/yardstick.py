"""The engine against a hand-written loop: `python -m benchmarks.yardstick`.

The loop has the form that anyone would write: pmap over devices, vmap over a device
workers, one scan over the steps, the sync under a cond; donated, data resident on the
devices. Both train an MLP 784-256-256-10 on 32 examples a worker and step, in turn, and
the ratio of their rates is taken pair by pair.
"""

import argparse
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import syncalgos
from models import mlp

SIZES, BATCH, PERIOD, LR = (784, 256, 256, 10), 32, 16, 0.01
WORKER_AXES = ("devices", "lanes")
WARMUPS = 2  # the loop by hand compiles twice: for NumPy state, then for its own


def loss(params, batch):
    logits = mlp.apply(params, batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def averaging(state, step):
    """Model averaging by hand."""
    params = lax.cond(
        (step + 1) % PERIOD == 0,
        lambda p: lax.pmean(p, WORKER_AXES),
        lambda p: p,
        state["params"],
    )
    return {"params": params}


def filtering(state, step):
    """Classical BMUF by hand."""

    def block(s):
        momentum = 1 - 1 / lax.axis_size(WORKER_AXES)
        mean = lax.pmean(s["params"], WORKER_AXES)
        velocity = jax.tree.map(
            lambda d, m, w: momentum * d + m - w, s["velocity"], mean, s["center"]
        )
        center = jax.tree.map(jnp.add, s["center"], velocity)
        return {"params": center, "center": center, "velocity": velocity}

    return lax.cond((step + 1) % PERIOD == 0, block, lambda s: s, state)


def by_hand(sync, params, workers, devices):
    """Returns go(step, data, rows) -> losses, which keeps its own state."""
    lanes = workers // devices

    def worker(state, step, data, rows):
        def local_step(carry, row):
            state, step = carry
            batch = jax.tree.map(lambda x: x[row], data)
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            stepped = jax.tree.map(lambda p, g: p - LR * g, state["params"], grads)
            return (sync({**state, "params": stepped}, step), step + 1), value

        (state, step), values = lax.scan(local_step, (state, step), rows)
        return state, lax.pmean(values, WORKER_AXES)

    run = jax.pmap(
        lambda state, rest: jax.vmap(
            worker, in_axes=(0, None, None, 1), axis_name="lanes", out_axes=(0, None)
        )(state, *rest),
        axis_name="devices",
        in_axes=(0, (None, None, 1)),
        out_axes=(0, None),
        devices=jax.devices()[:devices],
        donate_argnums=0,
    )
    state = {"params": params}
    if sync is filtering:
        zeros = jax.tree.map(jnp.zeros_like, params)
        state = {"params": params, "center": params, "velocity": zeros}
    state = jax.tree.map(
        lambda x: np.broadcast_to(np.asarray(x), (devices, lanes, *x.shape)), state
    )

    def go(step, data, rows):
        nonlocal state
        rows = rows.reshape(len(rows), devices, lanes, -1)
        state, losses = run(state, (np.int32(step), data, rows))
        jax.block_until_ready(state)
        return np.asarray(losses)

    return go


def by_engine(strategy, params, workers):
    """The same through `DataParallel`."""
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss), optax.sgd(LR), strategy, workers=workers
    )
    state = trainer.init(params)

    def go(step, data, rows):
        nonlocal state
        state, metrics = trainer.run(state, rows, data)
        jax.block_until_ready(state)
        return np.asarray(metrics["loss"])

    return go, trainer


def measure(name, workers, steps, repeats):
    """Times both in turn; returns a record."""
    sync, strategy = {
        "model_averaging": (averaging, syncalgos.model_averaging(PERIOD)),
        "bmuf": (filtering, syncalgos.bmuf(PERIOD)),
    }[name]
    rng = np.random.default_rng(0)
    params = mlp.init(jax.random.key(0), SIZES)
    engine, trainer = by_engine(strategy, params, workers)
    x = rng.normal(size=(8192, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], 8192, np.int32)
    data = trainer.place({"x": x, "y": y})
    devices = trainer.layout.shape[0]
    loops = {"engine": engine, "hand": by_hand(sync, params, workers, devices)}
    rates = {kind: [] for kind in loops}
    for turn in range(WARMUPS + repeats):
        rows = rng.integers(0, 8192, (steps, workers * BATCH), np.int32)
        losses = {}
        for kind in sorted(loops, reverse=bool(turn % 2)):
            start = time.perf_counter()
            losses[kind] = loops[kind](turn * steps, data, rows)
            rates[kind].append(steps * workers / (time.perf_counter() - start))
        if turn == 0:  # later, rounding may have grown
            np.testing.assert_allclose(losses["engine"], losses["hand"], rtol=1e-4)
    engine_rates, hand_rates = (rates[kind][WARMUPS:] for kind in ("engine", "hand"))
    return {
        "benchmark": "yardstick",
        "algorithm": name,
        "workers": workers,
        "devices": devices,
        "engine_worker_steps_per_second": spread(engine_rates),
        "hand_worker_steps_per_second": spread(hand_rates),
        "ratio": spread([e / h for e, h in zip(engine_rates, hand_rates, strict=True)]),
        "repeats": repeats,
    }


def spread(values):
    """Minimum, median and maximum."""
    return [round(f(values), 4) for f in (min, statistics.median, max)]


def main():
    parser = argparse.ArgumentParser(description="The engine against a loop by hand.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=64, help="local steps a dispatch")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    for name in ("model_averaging", "bmuf"):
        for workers in arguments.workers:
            record = measure(name, workers, arguments.steps, arguments.repeats)
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
