"""Generated images for models of ImageNet, to measure throughput."""

from functools import partial
from typing import Literal

import numpy as np

from experiments.data.feeding import gather
from experiments.tasks import classify
from experiments.tasks.task import Arrays, Data, Task
from syncalgos import checks
from syncalgos.collectives import WORKERS, Axis

CLASSES = 1000
TILES = 8  # a class is a pattern of 8×8 coloured tiles
HELD_OUT = 32


def imagenet_synthetic(
    model: Literal["resnet50", "resnet20"] = "resnet50",
    image_size: int = 64,
    classes: int = 8,
    examples: int = 4096,
    batch_norm: Literal["worker", "global"] = "worker",
    remat: bool = False,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Task:
    """Noisy patterns of any size, generated on the host one by one.

    The model has ImageNet's 1,000 outputs, but only a few classes occur, so that the
    loss falls within a short run.

    Args:
        model: resnet50 or resnet20.
        image_size: width and height in pixels, at least 32; 224 for ImageNet.
        classes: the number of classes that occur, at most 1,000.
        examples: the number of training examples.
        batch_norm: statistics of each worker's own batch, or of the global batch.
        remat: recompute blocks for the gradient, to save memory.
        seed: the seed of the patterns and their noise.
        axis: the axis of the workers.
    """
    checks.whole("--image-size", image_size, least=32)
    checks.whole("--examples", examples, least=1)
    if checks.whole("--classes", classes, least=1) > CLASSES:
        raise ValueError(f"--classes must be at most {CLASSES}, got {classes}")
    shape = (image_size, image_size, 3)
    network = classify.network(model, shape, CLASSES, batch_norm, remat, axis)

    def prepare(x, key, train):
        return classify.normalise_images(x, 0.5, 0.25)

    return Task(
        **classify.fields(network, prepare),
        load=partial(_load, image_size, classes, examples, seed),
        batch_size=16,
        steps=30,
        lr={"sgd": 0.01, "": 1e-3},
        momentum=0.9,
        # The batches of a dispatch are generated first, and kept on the host.
        dispatch_steps=1,
        eval_batch=32,
    )


class Pictures:
    """Examples generated on demand, determined by seed and number."""

    def __init__(
        self, size: int, classes: int, first_number: int, examples: int, seed: int
    ):
        self.size = size
        self.first_number = first_number
        self.examples = examples
        self.seed = seed
        tiles = np.random.default_rng([seed]).integers(
            0, 256, (classes, TILES, TILES, 3)
        )
        places = np.arange(size) * TILES // size
        self.patterns = tiles[:, places][:, :, places].astype(np.uint8)

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, number: int) -> Arrays:
        """One image, (size, size, 3) bytes, half pattern and half noise."""
        y, draws = self._drawn(number)
        noise = draws.integers(0, 256, (self.size, self.size, 3), dtype=np.uint8)
        # Bytes, as in data sets of real images.
        return {"x": self.patterns[y] // 2 + noise // 2, "y": np.asarray(y, np.int32)}

    def labels(self) -> np.ndarray:
        """The classes of all examples, (examples,), without their images."""
        return np.array([self._drawn(i)[0] for i in range(len(self))], np.int32)

    def _drawn(self, number: int) -> tuple[int, np.random.Generator]:
        """An image's class, and the generator of its noise."""
        # One generator per example: threads may read examples in any order.
        draws = np.random.default_rng([self.seed, self.first_number + number])
        return int(draws.integers(len(self.patterns))), draws


def _load(size: int, classes: int, examples: int, seed: int) -> Data:
    train = Pictures(size, classes, HELD_OUT, examples, seed)
    test = gather(Pictures(size, classes, 0, HELD_OUT, seed), np.arange(HELD_OUT))
    return Data(train, test, groups={"label": train.labels()})
