"""A bar chart of docs/records/peers.jsonl: `python -m benchmarks.peers.figure`.

Each bar shows how many times as fast as a peer syncalgos is, by medians.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from experiments.study import figures
from experiments.study.figures import LIGHT, Plot

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "peers.jsonl"
NAMES = {"exogym": "EXO Gym", "torch": "PyTorch"}


def format_times(times: float) -> str:
    return f"{times:.0f}" if times >= 10 else f"{times:.1f}"


def bars(times: Mapping[str, float], axes: Axes) -> None:
    """Draws bars that start at 1, the peer's speed."""
    axes.grid(visible=False)
    container = axes.barh([*times], [*times.values()], color=LIGHT["series-0"])
    axes.bar_label(container, [format_times(x) for x in times.values()], padding=4)


def main() -> None:
    """Writes the chart beside the records."""
    medians = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        if "syncalgos_to_peer" in record:
            peer = NAMES.get(record["peer"], record["peer"])
            _, median, _ = record["syncalgos_to_peer"]
            medians[f"{peer} {record['algorithm']}"] = median
    times = dict(sorted(medians.items(), key=lambda item: item[1]))
    plot = Plot(
        "peers",
        "",
        "How many times as fast as each peer syncalgos is",
        [],
        "times as fast (log)",
        log="x",
        x_limits=(1, 300),
        ticks={"1": 1, "10": 10, "100": 100},
        bars="x",
        draw_extra=partial(bars, times),
    )
    with figures.style():
        file = figures.svg(plot, figures.draw(plot, {}))
    RECORDS.with_suffix(".svg").write_text(file)


if __name__ == "__main__":
    main()
