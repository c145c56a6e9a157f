# pyright: reportMissingImports=false
"""torchft's DiLoCo in two buckets: only the last bucket gets the mean.

Two parameters of 0, in a bucket each. Every worker's local step moves both by 1; the
stand-in for the manager answers each all-reduce with 10 times what it gets, as if the
others had moved further. After the sync at outer rate 1 both are -10 · -1 = 10.
"""

from unittest.mock import MagicMock

import torch
from torch.futures import Future
from torchft import Manager
from torchft.local_sgd import DiLoCo


class CompletedWork:
    """The all-reduce of a bucket, which ends when it is waited for."""

    def __init__(self, tensor):
        self.future = Future()
        self.tensor = tensor

    def wait(self, timeout=None):
        self.tensor.mul_(10.0)
        self.future.set_result([self.tensor])
        return True

    def get_future(self):
        return self.future


def allreduce(tensor, **options):
    return CompletedWork(tensor)


model = torch.nn.Module()
for name in ("first", "second"):
    model.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
manager = MagicMock(spec=Manager)
manager._use_async_quorum = False
manager.allreduce.side_effect = allreduce
manager.should_commit.return_value = True
manager.current_step.return_value = 0
inner_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
outer = torch.optim.SGD(model.parameters(), lr=1.0)
with DiLoCo(
    manager,
    [model],
    inner_optimizer,
    outer,
    sync_every=1,
    use_bucketization=True,
    bucket_cap_mb=2 * 4 / 2**20,
):
    for param in model.parameters():
        param.grad = -torch.ones(2)
    inner_optimizer.step()
for name, param in model.named_parameters():
    print(name, param.tolist(), "mean of the pseudo-gradients: [10.0, 10.0]")
