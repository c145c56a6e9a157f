# pyright: reportMissingImports=false
"""fairscale's SlowMo: the first anchor is taken after step 0.

Two workers, one number from 0, SGD at rate 1, gradients of -1 and -3, a sync every 2
steps, slow_lr and slow_momentum 0.5. By algorithm 1 of Wang et al. 2019:
u = (0 - mean(2, 6)) / 1 = -4, and both numbers are 0 + 0.5 · 1 · 4 = 2.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from fairscale.experimental.nn.data_parallel import SlowMoDistributedDataParallel


def train(rank, port, is_memory_efficient, inits_first, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.cuda.synchronize = lambda *args: None  # which it calls on CPUs, too
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    parallel = SlowMoDistributedDataParallel(
        model,
        nprocs_per_node=1,
        slowmo_momentum=0.5,
        slowmo_lr=0.5,
        slowmo_frequency=2,
        localsgd_frequency=2,
        slowmo_memory_efficient=is_memory_efficient,
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    if inits_first:
        parallel._init_global_momentum_buffers(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        (parallel(torch.ones(1, 1)) * (-1.0 - 2.0 * rank)).sum().backward()
        optimizer.step()
        parallel.perform_slowmo(optimizer)
    queue.put((rank, round(model.weight.item(), 6)))
    dist.barrier()


if __name__ == "__main__":
    port = 29531
    for is_memory_efficient in (True, False):
        for inits_first in (False, True):
            queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
            args = (port, is_memory_efficient, inits_first, queue)
            torch.multiprocessing.spawn(train, args, 2)
            results = sorted([queue.get(), queue.get()])
            values = [value for _, value in results]
            print(
                f"slowmo_memory_efficient={is_memory_efficient}, buffers before step "
                f"0: {inits_first}: {values}, algorithm 1: [2.0, 2.0]"
            )
            port += 1
