# pyright: reportMissingImports=false
"""A file's params as a PyTorch model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.adapters.local_steps import find_rate, split_leaves


class TorchModel(nn.Module):
    """The params of a file, by leaf. The loss has the gradient that it is called with.

    Args:
        vectors: the content of the file.
        least_axes: the axes that a scalar gets; projects that take no parameter without
            axes need 1.
        dtype: of the params.
        names: the leaves to hold; None holds all.
    """

    def __init__(
        self,
        vectors: dict[str, Any],
        least_axes: int = 0,
        dtype: torch.dtype = torch.float64,
        names: list[str] | None = None,
    ):
        super().__init__()
        leaves = split_leaves(vectors, np.array(vectors["start"]))
        for name in names if names is not None else leaves:
            leaf = torch.tensor(leaves[name], dtype=dtype)
            shape = leaf.shape or (1,) * least_axes
            self.register_parameter(name, nn.Parameter(leaf.reshape(shape)))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the product of params and gradient, a scalar."""
        return nn.utils.parameters_to_vector(self.parameters()) @ gradient


def flatten(model: nn.Module) -> np.ndarray:
    """Returns a copy of the params as a vector of float64."""
    vector = nn.utils.parameters_to_vector(model.parameters())
    return vector.detach().double().numpy().copy()


def set_gradients(model: nn.Module, gradient: Any) -> None:
    """Sets the gradients of the params to the parts of a vector."""
    params = list(model.parameters())
    parts = torch.as_tensor(gradient).split([x.numel() for x in params])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.reshape(param.shape).to(param.dtype).clone()


def make_sgd(params: Any, vectors: dict[str, Any]) -> torch.optim.SGD:
    """Returns the file's inner optimizer, at the rate of step 0."""
    momentum = vectors["inner_optimizer"]["momentum"]
    return torch.optim.SGD(params, lr=find_rate(vectors, 0), momentum=momentum)


def list_gradients(
    vectors: dict[str, Any], worker: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Returns a worker's gradients, (steps, size)."""
    rows = [row["gradients"][worker] for row in vectors["steps"]]
    return torch.tensor(rows, dtype=dtype)


def follow_gradients(
    model: nn.Module,
    vectors: dict[str, Any],
    worker: int,
    take_step: Callable[[], Any],
) -> list[np.ndarray]:
    """Takes a step with each of a worker's gradients; returns the params after each."""
    path = []
    for gradient in list_gradients(vectors, worker):
        set_gradients(model, gradient)
        take_step()
        path.append(flatten(model))
    return path


class HeavyBall:
    """The file's inner optimizer behind an optimizer that takes plain steps.

    Projects whose optimizer has the algorithm in it move params along what the
    algorithm makes of a gradient. That move, divided by the project's rate, is the
    gradient that this heavy ball takes.
    """

    def __init__(self, params: Any, vectors: dict[str, Any], rate: float):
        self.params = list(params)
        self.momenta = [torch.zeros_like(x) for x in self.params]
        self.inner_optimizer = vectors["inner_optimizer"]
        self.rate = rate

    @torch.no_grad()
    def step(self, plain_step: Callable[[], Any]) -> None:
        """Takes the plain step, and puts the heavy ball's in its place."""
        old_params = [x.detach().clone() for x in self.params]
        plain_step()
        for param, old, momentum in zip(
            self.params, old_params, self.momenta, strict=True
        ):
            momentum.mul_(self.inner_optimizer["momentum"]).add_(
                (old - param) / self.rate
            )
            param.copy_(old - self.inner_optimizer["learning_rate"] * momentum)
