# pyright: reportMissingImports=false
"""EXO Gym doing the work of `benchmarks.peers`, which starts this script.

It uses EXO Gym's Trainer with one process per worker, without logging and evaluation:
all-reduce of gradients, FedAvg (an average of the models) and DiLoCo, the last two
every 16 steps. Each batch is one slice of tensors, which is faster than the default
collation.
"""

import time

import exogym.trainer
import torch
import torch.distributed as dist
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, Strategy
from exogym.strategy.strategy import SimpleReduceStrategy
from torch import nn

from benchmarks.peers import work
from benchmarks.peers.torch_gloo import free_port, network


def connect(backend: str, rank: int, world_size: int) -> None:
    """Connects the workers; EXO Gym's own function only works on macOS."""
    dist.init_process_group(backend, rank=rank, world_size=world_size)


# Its processes import this module again, so this takes effect in them.
exogym.trainer.init_process_group_portsafe = connect


class Timed(Strategy):
    """A mix-in for strategies: worker 0 reports the seconds of its steps."""

    def step(self):
        super().step()
        if self.local_step == work.WARMUP:
            self.start = time.perf_counter()
        if self.local_step == self.max_steps and self.rank == 0:
            work.report_seconds(time.perf_counter() - self.start)


class Reduce(Timed, SimpleReduceStrategy):
    pass


class FedAvg(Timed, FedAvgStrategy):
    pass


class DiLoCo(Timed, DiLoCoStrategy):
    pass


class Examples(torch.utils.data.Dataset):
    """The examples; a batch is one slice of the tensors."""

    def __init__(self):
        self.x, self.y = map(torch.from_numpy, work.examples())

    def __len__(self):
        return len(self.y)

    def __getitems__(self, rows):
        return self.x[rows], self.y[rows]


def examples(rank, workers, train_dataset):
    """Returns the examples, made in each worker's process."""
    return Examples()


def unchanged(batch):
    """Returns the batch unchanged."""
    return batch


class Loss(nn.Module):
    """The network with its loss, as EXO Gym requires."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)


def strategy(algorithm: str):
    """Returns the strategy with a name."""
    inner_spec = OptimSpec(torch.optim.SGD, lr=work.LR, fused=True)
    if algorithm == "all_reduce":
        return Reduce(optim_spec=inner_spec)
    if algorithm == "fedavg":
        return FedAvg(optim_spec=inner_spec, H=work.PERIOD)
    outer_spec = OptimSpec(
        torch.optim.SGD, lr=work.OUTER_LR, momentum=work.OUTER_MOMENTUM, nesterov=True
    )
    return DiLoCo(optim_spec=inner_spec, outer_optim_spec=outer_spec, H=work.PERIOD)


def main():
    task = work.task()
    trainer = exogym.trainer.Trainer(Loss(), examples, examples, free_port(), "cpu")
    trainer.fit(
        num_epochs=1,
        max_steps=work.WARMUP + task.steps,
        strategy=strategy(task.algorithm),
        num_nodes=task.workers,
        batch_size=work.BATCH,
        minibatch_size=work.BATCH,
        val_size=0,
        dataloader_kwargs={"collate_fn": unchanged},
        disable_logging=True,
    )


if __name__ == "__main__":
    main()
