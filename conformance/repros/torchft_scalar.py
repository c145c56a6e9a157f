# pyright: reportMissingImports=false
"""torchft's DiLoCo refuses a parameter without axes: TypeError as it is made."""

from unittest.mock import MagicMock

import torch
from torchft import Manager
from torchft.local_sgd import DiLoCo

model = torch.nn.Module()
model.scale = torch.nn.Parameter(torch.tensor(1.0))
manager = MagicMock(spec=Manager)
manager._use_async_quorum = False
inner_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
outer_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
try:
    with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=2):
        print("no error")
except TypeError as error:
    print("TypeError:", error)
