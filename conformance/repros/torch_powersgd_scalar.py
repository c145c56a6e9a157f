# pyright: reportMissingImports=false
"""torch's powerSGD_hook on a parameter without axes.

IndexError at step 2, where compression starts: the hook takes tensor.shape[0].
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x


os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
dist.init_process_group("gloo", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(Scale())
state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
for step in range(4):
    model(torch.tensor(1.0)).backward()
    print("step", step, "without an error")
