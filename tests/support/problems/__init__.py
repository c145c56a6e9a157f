"""A small problem for many tests: data, loss, the gradient by hand, and training.

A two-layer network of four leaves, one of them a scalar. NumPy oracles hold a model as
one float64 vector: `flatten` and `unflatten` go between the two forms.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import syncalgos

SHAPES = {"bias": (4,), "kernel": (3, 4), "readout": (4,), "scale": ()}
_STOPS = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])


def flatten(params, lead=0):
    """Joins the leaves behind their `lead` leading axes: (*lead, size)."""
    leaves = [np.asarray(params[name]) for name in SHAPES]
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)


def unflatten(vector):
    parts = np.split(vector, _STOPS[:-1])
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def initial_params():
    return unflatten(np.random.default_rng(0).normal(size=_STOPS[-1]))


def make_batches(steps, global_batch=48, seed=1):
    """Returns x (steps, global_batch, 3) and noisy targets (steps, global_batch)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, global_batch, 3))
    target = np.sin(x.sum(-1)) + 0.3 * rng.normal(size=(steps, global_batch))
    return x, target


def loss(params, batch):
    x, target = batch
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"])
    error = params["scale"] * (hidden @ params["readout"]) - target
    return jnp.mean(error**2) / 2


def gradient(vector, x, target):
    """The gradient of `loss`, by hand in NumPy."""
    params = unflatten(vector)
    hidden = np.tanh(x @ params["kernel"] + params["bias"])  # (batch, 4)
    output = hidden @ params["readout"]
    error = (params["scale"] * output - target) / len(target)
    to_hidden = np.outer(error * params["scale"], params["readout"]) * (1 - hidden**2)
    return flatten(
        {
            "bias": to_hidden.sum(0),
            "kernel": x.T @ to_hidden,
            "readout": params["scale"] * (hidden.T @ error),
            "scale": error @ output,
        }
    )


class TrainedProblem(NamedTuple):
    """The models after each of the steps asked for."""

    centers: np.ndarray  # (times, size)
    replicas: np.ndarray  # (times, workers, size)


def train(
    strategy, optimizer, workers=3, look_steps=(4, 8, 12), batches=None, backend="vmap"
):
    """Trains on the batches in turn, and looks at the model after some of the steps.

    Equal distances in `look_steps` compile once.
    """
    x, target = make_batches(look_steps[-1]) if batches is None else batches
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss), optimizer, strategy, workers=workers, backend=backend
    )
    state = trainer.init(initial_params())
    centers = []
    replicas = []
    for start, stop in zip((0, *look_steps), look_steps, strict=False):
        state, _ = trainer.run(state, (x[start:stop], target[start:stop]))
        centers.append(flatten(trainer.center(state).params))
        lane_params = flatten(state.replica.params, lead=2)  # (devices, lanes, size)
        replicas.append(lane_params.reshape(workers, -1))
    return TrainedProblem(np.array(centers), np.array(replicas))


def relative_error(actual, expected):
    """The largest error of each model, relative to its largest entry; the worst."""
    error = np.max(np.abs(actual - expected), axis=-1)
    return np.max(error / np.max(np.abs(expected), axis=-1))
