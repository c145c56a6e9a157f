"""Tasks: a model, its data and what is measured; one file each."""

# Names, not factories: --help lists them without importing jax.
TASKS = (
    "digits",
    "mnist",
    "fashion_mnist",
    "spoken_digits",
    "shakespeare",
    "embeddings",
    "cifar10",
    "imagenet_synthetic",
)
