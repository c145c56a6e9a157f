"""Validation data: a held-out part of the training data, for choosing settings."""

from collections.abc import Mapping

import numpy as np

from experiments.pipeline.prefetch import gather, read
from experiments.tasks.task import Data, Source
from syncalgos import checks


def split(data: Data, share: float) -> Data:
    """Holds out a share of the training data in place of the test data.

    The part is drawn at random, but is always the same. Labels keep their proportions,
    to within one example. If neighbouring examples overlap, the end of the training
    data is held out instead. Examples before it that share its content are left out of
    both parts, and it is thinned so that it has each content once (see
    `Data.covering`).

    Args:
        data: the data; its test data is not read.
        share: the share of the training examples to hold out, above 0 and below 1.

    Returns:
        A Data with the rest as training data and the part as test data. The held-out
        part of a source is read at once, the rest on demand.

    Raises:
        ValueError: the share is out of range, or leaves a part empty.

    Statistics that a task computes when it loads its training data, such as means of
    features or a vocabulary, include the held-out part.
    """
    share = checks.real("the share of validation data", share, above=0, below=1)
    examples = data.examples
    count = round(share * examples)
    left = examples - count - data.overlapping
    if count < 1 or left < 1:
        raise ValueError(
            f"validation data: a share of {share:g} of {examples} training examples "
            f"leaves {max(left, 0)} to train on and {count} to validate on"
        )
    if data.overlapping:
        kept = np.arange(left)
        held = np.arange(examples - count, examples)[:: data.covering]
    else:
        held = _drawn(data.groups.get("label"), examples, count)
        kept = np.setdiff1d(np.arange(examples), held)
    train = data.train
    return data._replace(
        train=gather(train, kept) if isinstance(train, dict) else Part(train, kept),
        test=gather(train, held),
        groups={name: group[kept] for name, group in data.groups.items()},
        part_of=(train, kept.astype(np.int32)) if isinstance(train, dict) else None,
    )


class Part:
    """A part of a source, whose examples are read one by one."""

    def __init__(self, source: Source, numbers: np.ndarray):
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Mapping[str, np.ndarray]:
        """Reads one example, by its number in the part."""
        return read(self.source, int(self.numbers[number]))


def _drawn(labels: np.ndarray | None, examples: int, count: int) -> np.ndarray:
    """Draws the numbers of examples, (count,), sorted, with labels in proportion."""
    # The same draw for all runs, so that they differ only in training.
    order = np.random.default_rng(0).permutation(examples)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced places in shuffled examples sorted by label: these take each label's
    # share, rounded up or down, and `count` examples in all.
    places = (2 * np.arange(count) + 1) * examples // (2 * count)
    return np.sort(order[places])
