"""The colour, line and marker of each algorithm, in figures and legends."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")
CSS = (TEMPLATES / "report.css").read_text()
# The stylesheet is the one place of all colours: its first block is the light page's.
LIGHT = dict(re.findall(r"--([\w-]+): (#\w{6})", CSS.partition("@media")[0]))
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}

# Seven hues, then each in two other tones. Eyes without one kind of cone distinguish
# them too: simulated after Machado (2009), any two of the first seven and any two
# tones of a hue are 10 or more apart in CIE Lab, where 2.3 can just be seen.
HUES = 7
COLOURS = [colour for name, colour in LIGHT.items() if name.startswith("series-")]
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 2))
MARKERS = {  # matplotlib's names, and SVG paths around 13, 6
    "o": "M9.5 6a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "s": "M9.8 2.8h6.4v6.4h-6.4z",
    "^": "M13 2l4.1 7.2H8.9z",
    "D": "M13 1.6L17.4 6 13 10.4 8.6 6z",
    "v": "M13 10L8.9 2.8h8.2z",
    "P": "M11.6 2h2.8v2.6H17v2.8h-2.6V10h-2.8V7.4H9V4.6h2.6z",
    "X": "M9 3.8L10.8 2 13 4.2 15.2 2 17 3.8 14.8 6 17 8.2 15.2 10 13 7.8 10.8 10 9 8.2"
    " 11.2 6z",
}

Styles = Mapping[str, dict[str, Any]]


def styles(algos: Mapping[str, str]) -> Styles:
    """Gives each label a style of its own: a hue an algorithm, a tone a variant.

    Args:
        algos: the algorithm's name by label, in the order of the legend.

    Returns:
        Properties of matplotlib's lines by label: color, linestyle and marker.
    """
    hues = list(dict.fromkeys(algos.values()))
    seen = dict.fromkeys(hues, 0)
    found = {}
    for i, (label, algo) in enumerate(algos.items()):
        turn, hue = divmod(hues.index(algo), HUES)
        tone = (turn + seen[algo]) % (len(COLOURS) // HUES)
        seen[algo] += 1
        # Five dashes and seven markers: a step more each round, so that no pair of
        # them returns before 35 labels.
        dash = DASHES[(i + i // len(MARKERS)) % len(DASHES)]
        found[label] = {
            "color": COLOURS[tone * HUES + hue],
            "linestyle": (0, dash) if dash else "-",
            "marker": list(MARKERS)[i % len(MARKERS)],
        }
    return found
