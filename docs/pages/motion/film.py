"""Turns the recorded steps of workers into the pictures of a film."""

from typing import NamedTuple

import numpy as np

from pages.motion import landscape

WIDTH = 640
FLOOR = 358  # pixels
PAUSE_PICTURES = 14  # pictures before the film begins again
NEEDLE = 0.25
LONGEST = 60  # of a gradient's length; pixels


class Recorded(NamedTuple):
    """The way of workers and their center over the loss.

    Attributes:
        name: of the algorithm.
        places: of the workers, first at the start, (steps + 1, workers, 2).
        local: where they are between a local step and its sync, (steps, workers, 2).
        slopes: each worker's own gradient before a step, (steps, workers, 2).
        center: its places, first at the start, (steps + 1, 2).
        syncs: whether anything is sent after a step, (steps,).
        settings: the algorithm's arguments besides its period, in words.
    """

    name: str
    places: np.ndarray
    local: np.ndarray
    slopes: np.ndarray
    center: np.ndarray
    syncs: np.ndarray
    settings: str = ""


class Film(NamedTuple):
    """A film in pixels, rounded to a tenth.

    Attributes:
        workers: (pictures, workers, 2).
        center: (pictures, 2).
        needles: from each worker, (pictures, workers, 2).
        step: that is shown, (pictures,).
        flashes: the first pictures of the syncs that stand alone.
    """

    workers: np.ndarray
    center: np.ndarray
    needles: np.ndarray
    step: np.ndarray
    flashes: list[int]


def film(recorded: Recorded) -> Film:
    """Gives every step a picture, and more to the syncs that stand alone."""
    places = pixels(recorded.places)
    local = pixels(recorded.local)
    center = pixels(recorded.center)
    needles = _needles(recorded)
    pictures = [(places[0], center[0], needles[0], 0)]
    flashes = []
    for step, is_alone in enumerate(stands_alone(recorded.syncs)):
        needle_and_step = needles[step + 1], step + 1
        if is_alone:
            flashes.append(len(pictures))
            way = places[step + 1] - local[step]
            gain = center[step + 1] - center[step]
            # It waits, and then goes slowly enough to be seen.
            pictures += [
                (
                    local[step] + share * way,
                    center[step] + share * gain,
                    *needle_and_step,
                )
                for share in (0.0, 0.2, 0.7)
            ]
        pictures.append((places[step + 1], center[step + 1], *needle_and_step))
    pictures += [pictures[-1]] * PAUSE_PICTURES
    # Rounded as they are drawn: tails go by lengths, and end where workers are.
    workers, film_center, film_needles, steps = (
        np.round(np.array(x), 1) for x in zip(*pictures, strict=True)
    )
    return Film(workers, film_center, film_needles, steps.astype(int), flashes)


def pixels(places: np.ndarray) -> np.ndarray:
    """Returns where places of the loss lie in the picture."""
    corner = np.array([landscape.LEFT, landscape.TOP])
    return _size(np.asarray(places, np.float64) - corner)


def _size(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors in pixels, of which the second counts downwards."""
    scale = WIDTH / (landscape.RIGHT - landscape.LEFT)
    return vectors * np.array([scale, -scale])


def stands_alone(syncs: np.ndarray) -> np.ndarray:
    """Whether a step has a sync, and the steps before and after have none."""
    beside = np.pad(syncs, 1)
    return syncs & ~beside[:-2] & ~beside[2:]


def _needles(recorded: Recorded) -> np.ndarray:
    """Returns the worker's own will at steps of dense syncs, (steps + 1, workers, 2).

    That is along its own gradient; where the sync moves workers, back to where it would
    have stayed. Long gradients are shortened.
    """
    moved = recorded.local - recorded.places[1:]
    dense = (recorded.syncs & ~stands_alone(recorded.syncs))[:, None, None]
    nothing = np.zeros_like(moved[:1])
    if np.abs(np.where(dense, moved, 0)).max() > 1e-5:
        return _size(np.concatenate([nothing, np.where(dense, moved, 0)]))
    slopes = np.where(dense, -NEEDLE * recorded.slopes, 0)
    drawn = _size(np.concatenate([slopes, nothing]))
    length = np.linalg.norm(drawn, axis=-1, keepdims=True)
    return drawn / np.maximum(1, length / LONGEST)
