"""The README's figure, which benchmarks.harness.studies writes with the others.

Each point is an algorithm of the atlas on MNIST-1D, at its best: the bytes that a
worker sent, and the test accuracy. A line joins the algorithms that no other beats with
as few bytes.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.harness.atlas import REFERENCE, read_table
from experiments import files
from experiments.study import figures
from experiments.study.figures import LIGHT, Line, Plot

# Positions of the names, in points from the algorithms' points.
NAMES = {
    "sparseloco": (9, -4),
    "distributed_lion": (-76, 9),
    "streaming_diloco": (9, -2),
    "diloco": (-44, -12),
    "bmuf": (-40, -2),
    "model_averaging": (9, -5),
    "loco": (-28, 8),
    "quantized_sgd": (-36, 12),
    "gossip": (7, -13),
    "sync_sgd": (-4, 10),
}


def plot(points: Mapping[str, tuple[float, float]]) -> Plot:
    """Returns the figure of bytes and accuracies by algorithm."""
    best = figures.front(points)
    x, y = np.array([points[name] for name in best]).T

    def draw_points(axes: Axes) -> None:
        for name, point in points.items():
            colour = LIGHT["series-0" if name in best else "muted"]
            axes.plot(*point, "o", color=colour, alpha=0.5)
            if name in NAMES:
                axes.annotate(
                    name, point, NAMES[name], textcoords="offset points", color=colour
                )

    return Plot(
        "accuracy-by-bytes",
        "",
        "Test accuracy (%) by bytes sent, on MNIST-1D; line: the best for their bytes",
        [Line("best", "", x, y, y, y)],
        "bytes sent, as a share of synchronous SGD (log)",
        log="x",
        limits=(70, 97),
        x_limits=(0.009, 3),
        ticks={"1 %": 0.01, "3 %": 0.03, "10 %": 0.1, "30 %": 0.3, "100 %": 1.0},
        legend=(),
        draw_extra=draw_points,
    )


def write_headline(folder: Path) -> Path:
    """Writes the figure of a study beside its records, and returns its path."""
    lines = read_table(folder)
    reference_bytes = float(lines[REFERENCE]["bytes_per_worker"])
    points = {}
    for name, line in lines.items():
        share = float(line["bytes_per_worker"]) / reference_bytes
        points[name] = (share, 100 * float(line["test_accuracy_mean"]))
    figure = plot(points)
    path = folder / f"{figure.name}.svg"
    with figures.style():
        look = {"best": {"color": LIGHT["series-0"], "marker": "o"}}
        files.write(path, figures.svg(figure, figures.draw(figure, look)))
    return path
