"""The side of the workers: a file's settings and its local steps, in NumPy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Vectors = dict[str, Any]  # the content of a file
Settings = dict[str, Any]  # the values of its hyperparameters by name


def read_settings(vectors: Vectors) -> Settings:
    """Returns the values of a file's hyperparameters by name."""
    return {name: x["value"] for name, x in vectors["hyperparameters"].items()}


def find_rate(vectors: Vectors, step: int) -> float:
    """Returns the learning rate of a step."""
    learning_rate = vectors["inner_optimizer"]["learning_rate"]
    return learning_rate[step] if isinstance(learning_rate, list) else learning_rate


def split_leaves(vectors: Vectors, vector: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the leaves of a vector, views of it, by name."""
    leaves = {}
    start = 0
    for name, shape in vectors["leaves"].items():
        size = int(np.prod(shape))
        leaves[name] = vector[start : start + size].reshape(shape)
        start += size
    return leaves


def join_leaves(leaves: Iterable[Any]) -> np.ndarray:
    """Returns the vector of leaves in the order of the file."""
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def follow(
    vectors: Vectors, step: Callable[[list[np.ndarray]], Sequence]
) -> np.ndarray:
    """Calls a step with each step's gradients.

    Returns:
        The workers' params after each step, (steps, workers, size).
    """
    path = []
    for row in vectors["steps"]:
        params = step([np.array(gradient) for gradient in row["gradients"]])
        path.append([np.array(x, float) for x in params])
    return np.array(path)


def follow_server(
    vectors: Vectors, sync: Callable[[list[np.ndarray]], np.ndarray]
) -> np.ndarray:
    """Takes the file's local steps with heavy ball, and syncs at each period's end.

    Args:
        vectors: a file whose algorithm syncs params.
        sync: called with the workers' params at the end of each period, (size,) each;
            returns those from which all go on.

    Returns:
        The workers' params after each step, (steps, workers, size).
    """
    period = read_settings(vectors)["period"]
    decay = vectors["inner_optimizer"]["momentum"]
    start = np.array(vectors["start"])
    params = [start] * vectors["workers"]
    momenta = [np.zeros_like(start)] * vectors["workers"]
    path = []
    for step, row in enumerate(vectors["steps"]):
        for worker, gradient in enumerate(row["gradients"]):
            momenta[worker] = decay * momenta[worker] + np.array(gradient)
            move = find_rate(vectors, step) * momenta[worker]
            params[worker] = params[worker] - move
        if (step + 1) % period == 0:
            params = [sync(params)] * vectors["workers"]
        path.append(params.copy())
    return np.array(path)
