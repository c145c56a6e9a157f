"""The text of SVG shapes, and of their values over a film."""

from collections.abc import Iterable

import numpy as np

SECONDS = 0.11  # a picture


def animate(attribute: str, values: Iterable[float]) -> str:
    """Returns an attribute's values over the film, one for each picture."""
    values = [*values]
    return (
        f'<animate attributeName="{attribute}" dur="{duration(len(values))}s" '
        f'repeatCount="indefinite" values="{write_numbers(values, ";")}"/>'
    )


def travel(places: np.ndarray) -> str:
    """Returns places over the film, one for each picture."""
    # Whole pixels take a third of the file away, and no eye follows less.
    values = ";".join(write_numbers(place, " ", 0) for place in places)
    return (
        '<animateTransform attributeName="transform" type="translate" '
        f'dur="{duration(len(places))}s" repeatCount="indefinite" values="{values}"/>'
    )


def duration(pictures: int) -> str:
    """Returns the seconds of a film."""
    return _number(SECONDS * (pictures - 1), 2)


def place_group(place: np.ndarray) -> str:
    """Returns the attribute that puts a group at a place."""
    return f'transform="translate({write_numbers(place, " ")})"'


def petal(radius: float) -> str:
    """Returns a quarter of a disc around the direction to the right."""
    x = _number(radius * np.sqrt(0.5))
    return f"M0 0L{x}-{x}A{radius} {radius} 0 0 1 {x} {x}z"


def cross(place: np.ndarray, size: float) -> str:
    """Returns two strokes, each twice the size wide, which cross at a place."""
    x, y = place - size
    return (
        f"M{write_numbers((x, y), ' ')}l{2 * size} {2 * size}"
        f"m0-{2 * size}l-{2 * size} {2 * size}"
    )


def line(points: np.ndarray) -> str:
    """Returns a line through points, each told from the one before: it is shorter."""
    tenths = np.round(10 * points).astype(int)
    text = f"M{write_numbers(tenths[0] / 10, ' ')}l"
    moves = np.diff(tenths, axis=0)
    return text + " ".join(write_numbers(move / 10, " ") for move in moves)


def smooth_loop(points: np.ndarray) -> str:
    """Returns a smooth closed line through points (Catmull and Rom)."""
    slopes = (np.roll(points, -1, axis=0) - np.roll(points, 1, axis=0)) / 6
    nodes = np.round([points - slopes, points], 1).swapaxes(0, 1)  # (points, 2, 2)
    first_point = nodes[0, 1]
    following = np.roll(nodes, -1, axis=0)
    starts = np.concatenate([first_point[None], following[:-1, 1]])
    moves = (following - starts[:, None]).reshape(-1, 4)
    leave = write_numbers(slopes[0], " ")
    first_move, *later_moves = (write_numbers(move, " ") for move in moves)
    beginning = write_numbers(first_point, " ")
    return f"M{beginning}c{leave} {first_move}s{' '.join(later_moves)}z"


def write_numbers(values: Iterable[float], between: str, digits: int = 1) -> str:
    """Returns rounded numbers in one text."""
    return between.join(_number(x, digits) for x in values)


def _number(value: float, digits: int = 1) -> str:
    """Returns a number in as few characters as SVG allows."""
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if digits else text
    text = "0" if text == "-0" else text
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
