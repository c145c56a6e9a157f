"""Tasks: a model, its data and what is measured; one file each."""

# Where their factories are: --help lists the names without importing jax.
TASKS: dict[str, str] = {
    name: f"experiments.tasks.{name}:{name}"
    for name in (
        "digits",
        "mnist",
        "fashion_mnist",
        "spoken_digits",
        "shakespeare",
        "embeddings",
        "cifar10",
        "imagenet_synthetic",
    )
}
