# pyright: reportMissingImports=false
"""PyTorch with gloo doing the work of `benchmarks.peers`, which starts this script.

It has one process per worker, and uses DistributedDataParallel, or
PeriodicModelAverager every 16 steps.
"""

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import work


def network() -> nn.Module:
    """Returns the MLP, identical on all workers."""
    torch.manual_seed(0)
    inputs, width1, width2, classes = work.SIZES
    return nn.Sequential(
        nn.Linear(inputs, width1),
        nn.ReLU(),
        nn.Linear(width1, width2),
        nn.ReLU(),
        nn.Linear(width2, classes),
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the inner optimizer; fused is no slower than PyTorch's other forms."""
    return torch.optim.SGD(model.parameters(), lr=work.LR, fused=True)


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    task: work.PeerTask,
    sync: Callable[[], None] = lambda: None,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Trains; worker 0 reports the seconds of its steps.

    Args:
        model: replicated by the caller.
        optimizer: its optimizer.
        rank: index of the worker.
        task: the task to measure.
        sync: function to call after each step of the optimizer.
        wait: function to call before the clock is read, if steps do not wait for all.
    """
    x, y = map(torch.from_numpy, work.examples())
    rows = torch.from_numpy(
        work.draw_rows(work.WARMUP + task.steps, task.workers)[:, rank]
    )
    start = 0.0
    for step, row in enumerate(rows):
        if step == work.WARMUP:
            wait()
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[row]), y[row]).backward()
        optimizer.step()
        sync()
    wait()
    if rank == 0:
        work.report_seconds(time.perf_counter() - start)


def worker(rank: int, task: work.PeerTask, port: int) -> None:
    """Trains one worker in its process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=task.workers)
    model = network()
    if task.algorithm == "ddp":
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        train(parallel, sgd(parallel), rank, task, wait=dist.barrier)
    else:
        averager = PeriodicModelAverager(work.PERIOD)

        def sync() -> None:
            averager.average_parameters(model.parameters())

        train(model, sgd(model), rank, task, sync, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    task = work.task()
    torch.multiprocessing.spawn(worker, (task, free_port()), task.workers)
