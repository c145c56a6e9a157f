"""The README's figure, which benchmarks.harness.studies writes with the others.

Each point is an algorithm of the atlas on MNIST-1D, at its best: the bytes that a
worker sent, and the test accuracy. A line joins the algorithms that no other beats with
as few bytes.
"""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.harness.atlas import FIRST, read
from experiments.study.report import figures
from experiments.study.report.charts import Plot
from experiments.study.report.styles import LIGHT

SHARES = {0.01: "1 %", 0.03: "3 %", 0.1: "10 %", 0.3: "30 %", 1: "100 %"}
# Positions of the names, in points from the algorithms' points.
NAMES = {
    "sparseloco": (9, -4),
    "distributed_lion": (-76, 9),
    "streaming_diloco": (9, -2),
    "model_averaging": (9, -5),
    "loco": (-22, 9),
    "quantized_sgd": (-36, 12),
    "gossip": (7, -13),
    "sync_sgd": (-4, 10),
}


def draw(points: dict[str, tuple[float, float]], best: list[str]) -> Figure:
    """Returns the points on a logarithmic axis of bytes."""
    figure = Figure(figsize=(400 / 72, 280 / 72), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(0.009, 3), ylim=(70, 97))
    axes.set(xlabel="bytes sent, as a share of synchronous SGD (logarithmic)")
    axes.set_title("test accuracy, %")
    axes.set_xticks([*SHARES], SHARES.values())
    axes.minorticks_off()
    line = [points[name] for name in best]
    axes.plot(*zip(*line, strict=True), color=LIGHT["series-0"])
    for name, point in points.items():
        colour = LIGHT["series-0" if name in best else "muted"]
        axes.plot(*point, "o", color=colour, alpha=1 if name in best else 0.5)
        if at := NAMES.get(name):
            axes.annotate(name, point, at, textcoords="offset points", color=colour)
    return figure


def write(folder: Path) -> Path:
    """Writes the figure of a study beside its records, and returns its path."""
    lines = read(folder)
    whole = float(lines[FIRST]["bytes_per_worker"])
    points = {
        name: (
            float(x["bytes_per_worker"]) / whole,
            100 * float(x["test_accuracy_mean"]),
        )
        for name, x in lines.items()
    }
    best = [
        name
        for name, (sent, reached) in sorted(points.items(), key=lambda x: x[1])
        if all(y < reached or x > sent for x, y in points.values() if y != reached)
    ]
    text = ", ".join(f"{x}: {points[x][0]:.2g}, {points[x][1]:.1f} %" for x in best)
    title = "Test accuracy by the share of synchronous SGD's bytes, on MNIST-1D"
    plot = Plot("accuracy-by-bytes", "", title, text, "", lambda: draw(points, best))
    with figures.style():
        file, _ = figures.pictures(plot, plot.draw())
    path = folder / f"{plot.name}.svg"
    path.write_text(file)
    return path
