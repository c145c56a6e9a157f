"""Tasks: a model, its data and its measures, with one file for each task."""

from typing import Literal

# Schedules of the learning rate; here, so that --help does not import jax.
Schedule = Literal["constant", "linear", "cosine", "wsd", "step", "plateau"]

# Names and their files, not factories, so that --help does not import jax.
TASKS = {
    "digits": "digits",
    "mnist": "mnist",
    "fashion_mnist": "mnist",
    "spoken_digits": "spoken_digits",
    "shakespeare": "language",
    "gpt2_synthetic": "language",
    "text": "text",
    "embeddings": "embeddings",
    "cifar10": "cifar10",
    "imagenet_synthetic": "imagenet_synthetic",
    "mnist1d": "mnist1d",
    "quadratic": "functions",
    "rosenbrock": "functions",
    "table": "table",
}
