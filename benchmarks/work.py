"""Models of the project, which benchmarks train on random data with real shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import gpt, lenet, lstm, mlp
from syncalgos import DataParallel, Placement, Strategy, describe

PyTree = Any
LR = 0.01


class Work(NamedTuple):
    """A model, its loss and its data.

    Attributes:
        loss: (params, batch) -> scalar, a mean over its batch.
        params: params of the model.
        data: a tree of arrays (examples, ...).
        batch: number of examples of each worker in a step.
        steps: local steps in a dispatch, a multiple of 16.
    """

    loss: Callable[[PyTree, PyTree], jax.Array]
    params: PyTree
    data: PyTree
    batch: int
    steps: int

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(jax.tree.leaves(self.data)[0])


def make_trainer(
    loss: Callable[[PyTree, PyTree], jax.Array], strategy: Strategy, **options: Any
) -> DataParallel:
    """Makes a trainer by plain SGD, which knows that the losses here are means."""
    form = "merged" if describe(strategy).averages_grads else None
    options = {"placement": Placement(lane_form=form)} | options
    return DataParallel(loss, optax.sgd(LR), strategy, **options)


def _mean_loss(apply: Callable) -> Callable:
    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            apply(params, batch["x"]), batch["y"]
        )
        return jnp.mean(losses)

    return loss


mlp_loss = _mean_loss(mlp.apply)


def _draw_data(*shape: int, classes: int = 10) -> PyTree:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    return {"x": x, "y": rng.integers(0, classes, len(x), np.int32)}


def _mlp() -> Work:
    params = mlp.init(jax.random.key(0), (784, 256, 256, 10))
    return Work(mlp_loss, params, _draw_data(8192, 784), 32, 64)


def _lenet() -> Work:
    params = lenet.init(jax.random.key(0))
    return Work(_mean_loss(lenet.apply), params, _draw_data(4096, 28, 28, 1), 8, 16)


def _lstm() -> Work:
    params = lstm.init(jax.random.key(0), 40, 128, 10)
    loss = _mean_loss(lambda params, x: lstm.apply(params, x).mean(1))
    return Work(loss, params, _draw_data(1024, 64, 40), 8, 16)


def _gpt(width: int, layers: int, heads: int, context: int, batch: int) -> Work:
    params = gpt.init(jax.random.key(0), 65, context, width, layers)
    text = np.random.default_rng(0).integers(0, 65, (1024, context + 1), np.int32)
    loss = _mean_loss(lambda params, x: gpt.apply(params, x, heads))
    return Work(loss, params, {"x": text[:, :-1], "y": text[:, 1:]}, batch, 16)


WORK: dict[str, Callable[[], Work]] = {
    "mlp": _mlp,
    "lenet": _lenet,
    "lstm": _lstm,
    "gpt": partial(_gpt, 128, 4, 4, 128, 4),
    # 10.7 and 49.7 million params, one sequence per worker: a turn takes seconds.
    "gpt10m": partial(_gpt, 384, 6, 6, 64, 1),
    "gpt50m": partial(_gpt, 768, 7, 12, 32, 1),
}
