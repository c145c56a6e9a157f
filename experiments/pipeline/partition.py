"""Partitions: the training examples of each worker, if workers see different data."""

from collections.abc import Mapping

import numpy as np

from syncalgos import checks

LEAST = 10  # examples of a worker's shard, in a Dirichlet partition
DRAWS = 1000  # of Dirichlet partitions, before it counts as impossible


def check(kind: str) -> None:
    """Raises a ValueError unless the kind of a partition is well written.

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
    - a group's name, such as label or speaker: the examples, ordered by group, are cut
      into equal parts, one for each worker, so that a worker has few groups. The order
      of the groups and that within a group are drawn.
    - dirichlet:ALPHA: workers get shares of each label drawn from Dir(ALPHA, …, ALPHA):
      near 0 one worker has all of a label, far above 1 all have the same share. Drawn
      anew until every worker has 10 examples. Shards differ in size.

    Args:
        kind: as above.
        groups: by name, the number of each example's group, (examples,).
        examples: the number of training examples.
        workers: the number of workers.
        seed: for the draws.

    Returns:
        The numbers of each worker's examples, in no particular order; None for iid.

    Raises:
        ValueError: an unknown kind, one whose group the examples lack, or too few
            examples.

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
        f"--partition dirichlet:{alpha:g}: in {DRAWS} draws there was always one of "
        f"{workers} workers with fewer than {LEAST} examples: use a larger ALPHA or "
        "fewer workers"
    )


def _read_kind(kind: str) -> float | None:
    """Returns a Dirichlet partition's ALPHA, else None; refuses unknown kinds."""
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
            "dirichlet:0.1, or a group of the task's such as label or speaker)"
        )
    return None
