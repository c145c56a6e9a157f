"""Tasks: a model, its data and its measures, with one file for each task."""

from typing import Literal

# Schedules of the learning rate; here, so that --help does not import jax.
Schedule = Literal["constant", "linear", "cosine", "wsd", "step", "plateau"]

# Names, not factories, so that --help does not import jax.
TASKS = (
    "digits",
    "mnist",
    "fashion_mnist",
    "spoken_digits",
    "shakespeare",
    "gpt2_synthetic",
    "text",
    "embeddings",
    "cifar10",
    "imagenet_synthetic",
    "mnist1d",
    "quadratic",
    "rosenbrock",
    "table",
)
