# pyright: reportMissingImports=false
"""torchft doing the work of `benchmarks.peers`, which starts this script.

Each worker has one process and one replica group; they use gloo and one lighthouse. It
measures torchft's DDP, LocalSGD and DiLoCo, the last two every 16 steps. All workers
start from equal weights, so that nothing is sent at step 0, as its manual recommends.
"""

from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import (
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from benchmarks.peers import work
from benchmarks.peers.torch_gloo import free_port, network, sgd, train

TIMEOUT = timedelta(seconds=60)


def make_manager(
    model: torch.nn.Module,
    rank: int,
    workers: int,
    store: TCPStore,
    lighthouse: str,
    is_ddp: bool = False,
) -> Manager:
    """Returns the manager of a worker, a replica group of one process.

    The caller keeps the store, which ends when nothing refers to it.
    """
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=workers,
        use_async_quorum=is_ddp,  # the others forbid it
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{rank}",
        hostname="localhost",
        init_sync=False,
    )


def train_managed(rank: int, task: work.PeerTask, lighthouse: str) -> None:
    """Trains one worker with the task's algorithm."""
    model = network()
    is_ddp = task.algorithm == "ddp"
    store = TCPStore("localhost", free_port(), is_master=True)
    optimizer = sgd(model)
    manager = make_manager(model, rank, task.workers, store, lighthouse, is_ddp)
    if is_ddp:
        parallel = DistributedDataParallel(manager, model)
        train(parallel, Optimizer(manager, optimizer), rank, task)
    elif task.algorithm == "local_sgd":
        with LocalSGD(manager, model, optimizer, work.PERIOD):
            train(model, optimizer, rank, task)
    else:
        outer_optimizer = torch.optim.SGD(
            model.parameters(),
            lr=work.OUTER_LR,
            momentum=work.OUTER_MOMENTUM,
            nesterov=True,
        )
        context = DiLoCo(
            manager,
            [model],
            optimizer,
            outer_optimizer,
            work.PERIOD,
            pin_memory=False,
        )
        with context:
            train(model, optimizer, rank, task)
    manager.shutdown(wait=False)


def main():
    task = work.task()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=task.workers)
    port = lighthouse.address().rsplit(":", 1)[1]
    address = f"http://localhost:{port}"
    torch.multiprocessing.spawn(train_managed, (task, address), task.workers)
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
