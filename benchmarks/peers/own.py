"""syncalgos at the work of `benchmarks.peers`, which starts this script.

Whole dispatches of 64 steps on data resident on the devices; losses come to the host.
"""

import os
import time

import jax
import numpy as np
import optax

import syncalgos
from benchmarks.peers import work
from benchmarks.work import mlp_loss
from models import mlp

DISPATCH = 64  # steps
STRATEGIES = {
    "sync_sgd": syncalgos.sync_sgd,
    "model_averaging": lambda: syncalgos.model_averaging(work.PERIOD),
    "bmuf": lambda: syncalgos.bmuf(work.PERIOD),
    "diloco": lambda: syncalgos.diloco(work.PERIOD),
}


def main():
    task = work.task()
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(mlp_loss),
        optax.sgd(work.LR),
        STRATEGIES[task.algorithm](),
        workers=task.workers,
    )
    state = trainer.init(mlp.init(jax.random.key(0), work.SIZES))
    x, y = work.examples()
    data = trainer.place({"x": x, "y": y.astype(np.int32)})
    rows = work.rows(DISPATCH + task.steps, task.workers).astype(np.int32)
    rows = rows.reshape(-1, DISPATCH, task.workers * work.BATCH)
    start = 0.0
    for i, dispatch in enumerate(rows):
        if i == 1:  # the first one compiles and warms up
            start = time.perf_counter()
        state, metrics = trainer.run(state, dispatch, data)
        np.asarray(metrics["loss"])
    jax.block_until_ready(state)
    work.report(time.perf_counter() - start)


if __name__ == "__main__":
    main()
