"""Partitions: the training examples of each worker."""

from collections.abc import Mapping

import numpy as np

from syncalgos import checks

LEAST = 10  # the fewest examples of a shard in a Dirichlet partition
DRAWS = 1000  # tries of a Dirichlet partition before an error


def check(kind: str) -> None:
    """Raises a ValueError unless the kind of a partition has the right form.

    Args:
        kind: iid, dirichlet:ALPHA, or a group's name. `shards` checks that the data has
            the group.
    """
    _read_kind(kind)


def shards(
    kind: str, groups: Mapping[str, np.ndarray], examples: int, workers: int, seed: int
) -> list[np.ndarray] | None:
    """Assigns each training example to one worker.

    - iid: no shards; all workers share one stream of all examples.
    - a group's name, such as label or speaker: the examples are ordered by group and
      cut into equal parts, one for each worker, so that a worker has few groups. The
      order of groups, and the order within a group, are random.
    - dirichlet:ALPHA: the workers' shares of each label are drawn from Dir(ALPHA, …,
      ALPHA). Near 0, one worker has all of a label; far above 1, all have the same
      share. Draws repeat until every worker has 10 examples. Shards differ in size.

    Args:
        kind: one of the above.
        groups: the number of each example's group, (examples,), by name.
        examples: the number of training examples.
        workers: the number of workers.
        seed: the seed for the draws.

    Returns:
        The numbers of each worker's examples, in no particular order; None for iid.

    Raises:
        ValueError: the kind is unknown, the examples lack the group, or there are too
            few examples.

    Source: Yurochkin et al., "Bayesian nonparametric federated learning of neural
    networks", ICML 2019, which draws shares of each label; Hsu, Qi and Brown,
    "Measuring the effects of non-identical data distribution for federated visual
    classification", 2019, which draws labels of each worker.
    """
    alpha = _read_kind(kind)
    if kind == "iid":
        return None
    needed = kind if alpha is None else "label"
    if needed not in groups:
        known = ["iid", *groups, *(["dirichlet:ALPHA"] if "label" in groups else [])]
        raise ValueError(
            f"--partition {kind}: these examples are not grouped by {needed}"
            f"{checks.nearest(needed, known)} (possible here: {', '.join(known)})"
        )
    least = 1 if alpha is None else LEAST
    if examples < least * workers:
        raise ValueError(
            f"--partition {kind}: {examples} examples are too few for {workers} "
            f"workers with at least {least} each: use at most {examples // least}"
        )
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    _, group, sizes = np.unique(groups[needed], return_inverse=True, return_counts=True)
    order = rng.permutation(examples)
    if alpha is None:
        rank = rng.permutation(len(sizes))[group]
        return np.array_split(order[np.argsort(rank[order], kind="stable")], workers)
    order = order[np.argsort(group[order], kind="stable")]
    owner = np.repeat(
        np.tile(np.arange(workers), len(sizes)),
        _dirichlet(alpha, sizes, workers, rng).ravel(),
    )
    return [order[owner == worker] for worker in range(workers)]


def _dirichlet(
    alpha: float, sizes: np.ndarray, workers: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws the number of examples of each label for each worker, (labels, workers)."""
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(workers, alpha), len(sizes))
        ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(int)
        # Sums of shares may round to slightly less.
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= LEAST:
            return counts
    raise ValueError(
        f"--partition dirichlet:{alpha:g}: in each of {DRAWS} draws one of the "
        f"{workers} workers had fewer than {LEAST} examples: use a larger ALPHA or "
        "fewer workers"
    )


def _read_kind(kind: str) -> float | None:
    """Returns a Dirichlet partition's ALPHA, else None; raises for unknown kinds."""
    name, colon, text = kind.partition(":")
    if name == "dirichlet":
        try:
            alpha = float(text)
        except ValueError:
            alpha = text
        return checks.real(
            f"--partition {name}:ALPHA: ALPHA", alpha, above=0, below=1e9
        )
    if colon or not name.isidentifier():
        hint = checks.nearest(f"{name}:", ["iid", "dirichlet"])  # iid:3 is near iid
        raise ValueError(
            f"unknown --partition {kind!r}{hint} (one of: iid, dirichlet:ALPHA such as "
            "dirichlet:0.1, or a group of the task such as label or speaker)"
        )
    return None
