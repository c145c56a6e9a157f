"""A bar chart of docs/records/peers.jsonl: `python -m benchmarks.peers.figure`.

Each bar shows how many times as fast as a peer syncalgos is, by medians.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from experiments.study.report import figures
from experiments.study.report.charts import WIDTH, Plot
from experiments.study.report.styles import LIGHT

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "peers.jsonl"
NAMES = {"exogym": "EXO Gym", "torch": "PyTorch"}


def rounded(times: float) -> str:
    return f"{times:.0f}" if times >= 10 else f"{times:.1f}"


def draw(times: Mapping[str, float]) -> Figure:
    """Returns bars that start at 1, the peer's speed, on a logarithmic axis."""
    figure = Figure(figsize=(WIDTH / 72, 3), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(1, 300), xlabel="times as fast (logarithmic)")
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.grid(visible=False)
    bars = axes.barh([*times], [*times.values()], color=LIGHT["series-0"])
    axes.bar_label(bars, [rounded(x) for x in times.values()], padding=4)
    return figure


def main() -> None:
    """Writes the chart beside the records."""
    lines = map(json.loads, RECORDS.read_text().splitlines())
    medians = {
        f"{NAMES.get(x['peer'], x['peer'])} {x['algorithm']}": x["syncalgos_to_peer"][1]
        for x in lines
        if "syncalgos_to_peer" in x
    }
    times = dict(sorted(medians.items(), key=lambda item: item[1]))
    title = "How many times as fast as each peer syncalgos is"
    text = ", ".join(f"{name}: {rounded(x)}" for name, x in times.items())
    plot = Plot("peers", "", title, text, "", lambda: draw(times))
    with figures.style():
        file, _ = figures.pictures(plot, plot.draw())
    RECORDS.with_suffix(".svg").write_text(file)


if __name__ == "__main__":
    main()
