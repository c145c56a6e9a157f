# pyright: reportMissingImports=false
"""Lookahead of torch_optimizer and timm: slow weights that start late.

One number from 0, SGD at rate 1, gradients of -1, k = 2, alpha = 0.5. By algorithm 1 of
Zhang et al. 2019 the slow weights start at 0, so after two steps the number is
0 + 0.5 (2 - 0) = 1.
"""

import sys

import torch


def train(make_optimizer):
    """Returns the number after each of four steps."""
    number = torch.nn.Parameter(torch.zeros(()))
    optimizer = make_optimizer(torch.optim.SGD([number], lr=1.0))
    values = []
    for _ in range(4):
        number.grad = torch.tensor(-1.0)
        optimizer.step()
        values.append(number.item())
    return values


def use_torch_optimizer(base):
    from torch_optimizer import Lookahead

    return Lookahead(base, k=2, alpha=0.5)


def use_timm(base):
    from timm.optim import Lookahead  # needs torchvision

    return Lookahead(base, alpha=0.5, k=2)


print("algorithm 1", [1.0, 1.0, 2.0, 2.0])
for make_optimizer in (use_torch_optimizer, use_timm):
    try:
        print(make_optimizer.__name__, train(make_optimizer))
    except (ImportError, RuntimeError) as error:
        print(make_optimizer.__name__, "not run here:", error, file=sys.stderr)
