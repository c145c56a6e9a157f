"""syncalgos doing the work of `benchmarks.peers`, which starts this script.

It makes dispatches of 64 steps on data resident on the devices, and copies losses to
the host.
"""

import os
import time
from typing import Any

import jax
import numpy as np

import syncalgos
from benchmarks.peers import work
from benchmarks.work import make_trainer, mlp_loss
from models import mlp

DISPATCH = 64  # steps
STRATEGIES = {
    "sync_sgd": syncalgos.sync_sgd,
    "model_averaging": lambda: syncalgos.model_averaging(work.PERIOD),
    "bmuf": lambda: syncalgos.bmuf(work.PERIOD),
    "diloco": lambda: syncalgos.diloco(work.PERIOD),
}


def train(
    task: work.PeerTask, process_workers: slice = slice(None), **options: Any
) -> float:
    """Trains; returns the seconds of all dispatches except the first.

    Args:
        task: the task to measure.
        process_workers: the workers of this process.
        options: arguments of `DataParallel`.
    """
    strategy = STRATEGIES[task.algorithm]()
    options = {"workers": task.workers} | options
    trainer = make_trainer(mlp_loss, strategy, **options)
    state = trainer.init(mlp.init(jax.random.key(0), work.SIZES))
    x, y = work.examples()
    data = trainer.place({"x": x, "y": y.astype(np.int32)})
    rows = work.draw_rows(DISPATCH + task.steps, task.workers)[:, process_workers]
    dispatches = rows.astype(np.int32).reshape(-1, DISPATCH, rows[0].size)
    start = 0.0
    for i, dispatch in enumerate(dispatches):
        if i == 1:  # the first one compiles and warms up
            start = time.perf_counter()
        state, metrics = trainer.run(state, dispatch, data)
        np.asarray(metrics["loss"])
    jax.block_until_ready(state)
    return time.perf_counter() - start


def main():
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    work.report_seconds(train(work.task()))


if __name__ == "__main__":
    main()
