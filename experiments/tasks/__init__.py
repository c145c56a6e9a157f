"""Tasks: a model, its data and what is measured; one file each."""

# Places of factories, not factories: --help lists the names without importing jax.
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
