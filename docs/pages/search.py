"""What readers search for, and the pages that answer; pages that no search finds."""

# By page: words that a reader may type who does not know those of the page.
ENTRIES = {
    "models-and-tasks": ("own data", "own table", "CSV", "dataset"),
    "comparing": (
        "confidence interval",
        "seeds",
        "p-value",
        "network",
        "1 Gbit/s",
        "10 Gbit/s",
        "bandwidth",
    ),
    "choosing": ("learning rate", "period", "hyperparameters"),
    "many-hosts": ("resume", "checkpoint", "Slurm", "Kubernetes", "scheduler"),
    "own-loop": ("training loop", "shard_map", "pmap"),
    "larger-than-a-device": ("FSDP", "tensor parallelism", "sharding"),
    "process-group": ("PyTorch", "torch.distributed", "MPI"),
    "_made/algorithms/model_averaging": ("local SGD", "parameter averaging"),
    "_made/algorithms/fedavg": ("federated averaging", "FedAvg"),
    "_made/algorithms/bmuf": ("block momentum", "FedAvgM"),
    "_made/algorithms/sync_sgd": ("all-reduce SGD", "DDP", "synchronous SGD"),
}
# Source listings and what changed: their many words would hide the pages.
HIDDEN = ("_made/files/", "_made/changelog")
HIDE = "---\nno-search: true\n"


def add_entries(text: str, page: str) -> str:
    """Returns a page's text with its entries below its title, which none sees."""
    if page not in ENTRIES:
        return text
    title, _, body = text.partition("\n")
    entries = [f"```{{index}} ! {entry}\n```\n" for entry in ENTRIES[page]]
    return f"{title}\n\n{''.join(entries)}{body}"


def hide(text: str, page: str) -> str:
    """Returns a page's text, with a mark for the search if it is to be hidden."""
    if not page.startswith(HIDDEN):
        return text
    if text.startswith("---\n"):
        return HIDE + text.removeprefix("---\n")
    return f"{HIDE}---\n\n{text}"
